"""Reading what the user wrote for vLLM after `--`, without knowing all of vLLM's flags."""

from __future__ import annotations

from collections.abc import Sequence

#: Long names of the short flags that matter to us.
_SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-cc": "--compilation-config",
}


def flags_of(args: Sequence[str]) -> set[str]:
    """The flags in `args`, spelled with dashes and without values (`--max_len=3` is `--max-len`).

    A dotted flag (`--kv-transfer-config.kv_role x`) counts as the flag before the dot.
    """
    return {_flag(word) for word in args if word.startswith("-")}


def option(args: Sequence[str], name: str) -> str | None:
    """The last value that `args` give to the flag `name`, None without one."""
    found = None
    for index, word in enumerate(args):
        if not word.startswith("-") or _flag(word) != name:
            continue
        _, equals, value = word.partition("=")
        if equals:
            found = value
        elif index + 1 < len(args):
            found = args[index + 1]
    return found


def _flag(word: str) -> str:
    name = word.partition("=")[0].partition(".")[0].replace("_", "-")
    return "--optimization-level" if name.startswith("-O") else _SHORT.get(name, name)
