"""What a node that is about to go asks of a peer, "take these from me", and what that answers. msgpack, bounded.

The chains are in the form in which nodes tell each other what they use most (`kvmigrate.bodies`). An offer without any
asks only for room. Decoders raise `RemoteError` and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvmigrate import bodies
from kvmigrate.errors import RemoteError as KvRemoteError
from kvmigrate.layout import MAX_SLOTS
from kvmigrate.messages import MAX_CHAINS, MAX_ENTRIES, MAX_TEXT, Chain, Chains
from kvmigrate.pool_types import Room
from kvmigrate.pull_types import Reason
from kvmigrate.wire import MAX_CONTROL_BYTES
from node.errors import RemoteError
from node.wire import integer, number, pack, text, unpack_map

#: Behind `node.peers.PEER_PREFIX`.
TAKE_PATH: Final = "/kv/take"
#: Longest time of one copy, seconds: whoever wants more asks again.
STEP_S: Final = 5.0
MAX_OFFER: Final = MAX_CONTROL_BYTES - 1024
MAX_TAKEN: Final = 16 * 1024
_MAX_BYTES: Final = 1 << 50


@dataclass(frozen=True, slots=True)
class Offer:
    """Take these chains, within so many seconds; the first `shared` of them somebody came back for."""

    chains: tuple[Chain, ...] = ()
    shared: int = 0
    seconds: float = STEP_S

    def encode(self) -> bytes:
        """Pack it."""
        return pack({"c": bodies.pack(Chains(self.chains)), "s": self.shared, "d": self.seconds})


@dataclass(frozen=True, slots=True)
class Taken:
    """What came of it. `held`: blocks of each chain that are there now; `room`: what there is left of it."""

    reason: Reason
    detail: str = ""
    blocks: int = 0
    nbytes: int = 0
    held: Sequence[int] = ()
    room: Room = Room()  # noqa: RUF009 - a tuple never changes

    def encode(self) -> bytes:
        """Pack it."""
        fields = {"w": self.reason.value, "t": _printable(self.detail), "n": self.blocks, "b": self.nbytes}
        return pack(fields | {"h": list(self.held), "f": self.room.free, "k": self.room.cold})


def decode_offer(data: bytes) -> Offer:
    """Unpack a peer's offer."""
    fields = unpack_map(data, MAX_OFFER, "offer")
    packed = fields.get("c")
    if not isinstance(packed, bytes):
        raise RemoteError("offer: no chains")
    try:
        chains = bodies.unpack(Chains, packed)
    except KvRemoteError as error:
        raise RemoteError(f"offer: {error}") from error
    assert isinstance(chains, Chains)
    return Offer(chains.chains, integer(fields, "s", 0, len(chains.chains)), number(fields, "d", 0.0, STEP_S))


def decode_taken(data: bytes) -> Taken:
    """Unpack a peer's answer."""
    fields = unpack_map(data, MAX_TAKEN, "taken")
    word = text(fields, "w", MAX_TEXT)
    if word not in list(Reason):
        raise RemoteError("taken: no reason that is known")
    held = fields.get("h")
    if not isinstance(held, list) or len(held) > MAX_CHAINS:
        raise RemoteError("taken: no list of blocks")
    counts = [integer({"h": count}, "h", 0, MAX_ENTRIES) for count in held]
    return Taken(
        Reason(word),
        text(fields, "t", MAX_TEXT, ""),
        integer(fields, "n", 0, MAX_SLOTS),
        integer(fields, "b", 0, _MAX_BYTES),
        counts,
        Room(integer(fields, "f", 0, MAX_SLOTS), integer(fields, "k", 0, MAX_SLOTS)),
    )


def _printable(words: str) -> str:
    plain = words.encode("ascii", "replace").decode()
    return "".join(letter if letter.isprintable() else " " for letter in plain)[:MAX_TEXT]
