"""Which engines answer in the form that `node.relay.carry.whole` writes, to the byte.

The form belongs to a version of vLLM, and some options add to it what a stream does not tell. An engine whose command
line is not ours may have any of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from node.engine.args import flags_of

#: How `/version` begins. The second is `node.emulator`'s.
_VLLM = "0.32."
_EMULATED = "emulated-"
#: Options that add members of their own, or that may come from a file where we do not see them.
_OTHER_FORM = frozenset(["--config", "--kv-transfer-config", "--ec-transfer-config", "--enable-return-routed-experts"])
#: Options that put something between the text and a chat's message.
_PARSERS = frozenset(["--reasoning-parser", "--tool-call-parser", "--enable-auto-tool-choice"])


def known_form(version: str, args: Sequence[str] | None, *, chat: bool) -> bool:
    """Whether its answers (a chat's, or a completion's) are known; ``args``: the user's for a vLLM that we started."""
    if version.startswith(_EMULATED):
        return True
    if args is None or not version.startswith(_VLLM):
        return False
    return flags_of(args).isdisjoint(_OTHER_FORM | _PARSERS if chat else _OTHER_FORM)
