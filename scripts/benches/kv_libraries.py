"""The same bytes by other transfer libraries over TCP, in turns with our pulls; see `transfer_library`.

Theirs are stopped while we pull, since threads of theirs poll for work, and ours wait for theirs without polling: each
has the machine to itself.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benches.child import Child
from benches.kv_pair import Pair
from benches.peers import PEERS
from benches.result import Result, Target

#: As much as our pulls move.
TOTAL = 128 << 20
SIZES = {"1m": 1 << 20, "3m": 3 << 20}


@dataclass(frozen=True, slots=True)
class Library:
    """What is compared with, and how it is told to use TCP as fast as it can."""

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)


LIBRARIES = (
    Library("mooncake"),
    # Without these limits UCX would take shared memory, and segments that are slow on loopback.
    Library(
        "nixl", {"UCX_TLS": "tcp,self", "UCX_TCP_TX_SEG_SIZE": "512k", "UCX_TCP_RX_SEG_SIZE": "512k", "UCX_WARN": "n"}
    ),
)
TARGETS: dict[str, Target] = {
    f"pull_over_{library.name}_{size}": (">=", 1.5) for library in LIBRARIES for size in SIZES
}


async def compare(result: Result, source: Child, directory: Path, library: Library, pairs: int) -> None:
    """Add `pull_over_...`: our rate by its better one, of blocks one after the other and of all at once."""
    peer = PEERS[library.name]
    if not peer.ready:
        why = peer.lacks or "scripts/bench peers install"
        result.note(f"pull_over_{library.name}: not measured, it is not installed ({why})")
        return
    try:
        with _side(library, "source") as theirs, _side(library, "target") as here:
            told, back = theirs.hear(), here.hear()
            here.ask(f"connect {json.dumps(told)}")
            theirs.ask(f"connect {json.dumps(back)}")
            for size, block_bytes in SIZES.items():
                await _size(result, source, directory, (theirs, here), f"{library.name}_{size}", block_bytes, pairs)
    except (RuntimeError, OSError) as error:
        result.note(f"pull_over_{library.name}: not measured, {error}")


def _side(library: Library, role: str) -> Child:
    return Child(
        "benches.transfer_library",
        library.name,
        str(TOTAL),
        role,
        python=PEERS[library.name].python,
        environment=library.environment,
        quiet=True,
    )


async def _size(  # noqa: PLR0917 - one call
    result: Result, source: Child, directory: Path, sides: tuple[Child, Child], name: str, block_bytes: int, pairs: int
) -> None:
    count = TOTAL // block_bytes
    pair = Pair(source, directory, block_bytes, count)
    ours, each, together = [], [], []
    there, here = sides
    try:
        await pair.pull()
        for at_once in (0, 1):
            here.ask(f"read {block_bytes} {count} {at_once}")
        for _ in range(pairs):
            with there.stopped(), here.stopped():
                ours.append(await pair.pull())
            each.append(pair.bytes / here.ask(f"read {block_bytes} {count} 0"))
            together.append(pair.bytes / here.ask(f"read {block_bytes} {count} 1"))
    finally:
        await pair.close()
    best = max(statistics.median(each), statistics.median(together))
    result.add(f"{name.replace('_', '_gb_s_')}", best / 1e9)
    result.add(f"pull_over_{name}", statistics.median(ours) / best)
