"""What pulls from each peer came to: rates, failures, and whose blocks are not like ours. For people."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from kvmigrate.pull_types import FINE, Part, Reason

#: Peers that are remembered, the ones pulled from last.
MAX_PEERS = 4096
#: Why a pull failed, for people.
WORDS = {
    Reason.UNREACHABLE: "it cannot be reached",
    Reason.REFUSED: "it refused us",
    Reason.MISMATCH: "its blocks are not like ours",
    Reason.BUSY: "too many pulls at a time",
    Reason.GONE: "it evicted a block meanwhile",
    Reason.CORRUPT: "a block did not have its digest",
    Reason.STALLED: "it stopped sending",
    Reason.SLOW: "others gave its blocks before it did",
    Reason.DEADLINE: "it took too long",
    Reason.BROKEN: "the connection broke",
    Reason.FULL: "our pool has no free slot",
    Reason.UNCONFIGURED: "our engine has not connected yet",
}

_log = logging.getLogger("grapevine.kv")


@dataclass(slots=True)
class _Peer:
    pulls: int = 0
    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    ways: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    last: str = ""
    unlike: str = ""


class PeerPulls:
    """Totals by peer since the start. Lives in the event loop."""

    def __init__(self) -> None:
        self._peers: OrderedDict[str, _Peer] = OrderedDict()

    def note(self, name: str, part: Part, *, whole: bool = False) -> None:
        """Take what one attempt at a peer came to, and say it in one line of the log. `whole`: others gave the rest."""
        peer = self._peers.setdefault(name, _Peer())
        self._peers.move_to_end(name)
        if len(self._peers) > MAX_PEERS:
            self._peers.popitem(last=False)
        peer.pulls += 1
        peer.blocks += part.blocks
        peer.bytes += part.bytes
        peer.seconds += max(0.0, part.seconds - part.lookup_s) if part.blocks else 0.0
        if part.blocks:
            peer.ways[part.way] += part.blocks
        if part.reason in FINE:
            peer.unlike = ""
        else:
            peer.failures[part.reason] += 1
            peer.last = told(part)
        if part.reason is Reason.MISMATCH:
            peer.unlike = part.detail
        _say(name, part, "others gave the rest" if whole else "the rest is computed")

    def unlike(self) -> dict[str, str]:
        """Peers that told us a fingerprint other than ours, and what differs."""
        return {name: peer.unlike for name, peer in self._peers.items() if peer.unlike}

    def forget_unlike(self) -> None:
        """Our own engine is another one now."""
        for peer in self._peers.values():
            peer.unlike = ""

    def snapshot(self) -> dict[str, dict[str, object]]:
        """JSON-able, the peer pulled from last first."""
        return {name: _shown(self._peers[name]) for name in reversed(self._peers)}


def told(part: Part) -> str:
    """Why an attempt failed, in words."""
    words = WORDS.get(part.reason, part.reason.value)
    return f"{words} ({part.detail})" if part.detail else words


def _say(name: str, part: Part, rest: str) -> None:
    came = f"{part.blocks} blocks, {part.bytes / 1e6:.1f} MB in {part.seconds:.3f} s"
    if part.reason in FINE:
        level = logging.INFO if part.blocks else logging.DEBUG
        _log.log(level, "pulled from %s (%s): %s", name, part.way or "nothing to fetch", came)
    else:
        # That others were faster costs nobody anything.
        level = logging.INFO if part.reason is Reason.SLOW else logging.WARNING
        _log.log(level, "pull from %s ended early: %s; %s, %s", name, told(part), came, rest)


def _shown(peer: _Peer) -> dict[str, object]:
    return {
        "pulls": peer.pulls,
        "blocks": peer.blocks,
        "bytes": peer.bytes,
        "bytes_s": round(peer.bytes / peer.seconds) if peer.seconds > 0 else 0,
        "ways": dict(peer.ways),
        "failures": dict(peer.failures),
        "last_failure": peer.last,
    }
