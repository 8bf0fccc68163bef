"""One side of a transfer by another library, run by the interpreter of that library's own environment.

`python -m benches.transfer_library NAME BYTES`: takes that much memory, prints what the other side must know of it, and
obeys one command a line: `connect JSON` (of the other side), `read BLOCK_BYTES COUNT ALL_AT_ONCE`: reads so many blocks
out of the other side's memory, over TCP, and prints the seconds. Needs only the library that is measured.
"""

from __future__ import annotations

import base64
import ctypes
import json
import mmap
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

#: (own addresses, the other side's, bytes of each)
Spans = tuple[list[int], list[int], list[int]]


class Memory:
    """Bytes at a fixed address, all of them touched."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        ctypes.memset(self.address, 0, nbytes)

    def sign(self, every: int = 4096) -> None:
        """Make every page another one."""
        for start in range(0, self.nbytes, every):
            self._map[start : start + 8] = (start + 1).to_bytes(8, "little")

    def check(self, nbytes: int, every: int = 4096) -> None:
        """Raise RuntimeError when this is not what the other side has."""
        for start in range(0, nbytes, every):
            if self._map[start : start + 8] != (start + 1).to_bytes(8, "little"):
                raise RuntimeError(f"the library says that it is done, and byte {start} is not here")


class Mooncake:
    """The Mooncake transfer engine over TCP."""

    def __init__(self, memory: Memory, name: str) -> None:
        from mooncake.engine import TransferEngine

        self._engine = TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("the engine cannot be initialised")
        if self._engine.register_memory(memory.address, memory.nbytes):
            raise RuntimeError("memory cannot be registered")
        self._other = ""

    def about(self) -> dict[str, Any]:
        """What the other side must know."""
        return {"at": f"127.0.0.1:{self._engine.get_rpc_port()}"}

    def connect(self, other: dict[str, Any]) -> None:
        """Learn it."""
        self._other = other["at"]

    def read(self, spans: Spans) -> None:
        """Read all and wait."""
        own, others, sizes = spans
        if len(own) == 1:
            failed = self._engine.transfer_sync_read(self._other, own[0], others[0], sizes[0])
        else:
            failed = self._engine.batch_transfer_sync_read(self._other, own, others, sizes)
        if failed:
            raise RuntimeError("the transfer failed")


class Nixl:
    """NIXL with UCX over TCP."""

    def __init__(self, memory: Memory, name: str) -> None:
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self._agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        self._agent.register_memory([(memory.address, memory.nbytes, 0, "")], "DRAM")
        self._other = ""

    def about(self) -> dict[str, Any]:
        """What the other side must know."""
        return {"metadata": base64.b64encode(self._agent.get_agent_metadata()).decode()}

    def connect(self, other: dict[str, Any]) -> None:
        """Learn it."""
        name = self._agent.add_remote_agent(base64.b64decode(other["metadata"]))
        self._other = name.decode() if isinstance(name, bytes) else name

    def read(self, spans: Spans) -> None:
        """Read all and wait."""
        own, others, sizes = spans
        here, there = (
            self._agent.get_xfer_descs([(at, size, 0) for at, size in zip(side, sizes, strict=True)], "DRAM")
            for side in (own, others)
        )
        handle = self._agent.initialize_xfer("READ", here, there, self._other)
        state = self._agent.transfer(handle)
        while state not in ("DONE", "ERR"):
            state = self._agent.check_xfer_state(handle)
        self._agent.release_xfer_handle(handle)
        if state == "ERR":
            raise RuntimeError("the transfer failed")


LIBRARIES: dict[str, Callable[[Memory, str], Mooncake | Nixl]] = {"mooncake": Mooncake, "nixl": Nixl}


def read(library: Mooncake | Nixl, memory: Memory, other: int, block_bytes: int, count: int, *, at_once: bool) -> float:
    """Seconds for `count` blocks, one after the other or given to the library together."""
    starts = range(0, count * block_bytes, block_bytes)
    spans: list[Spans] = [([memory.address + at], [other + at], [block_bytes]) for at in starts]
    if at_once:
        spans = [tuple([side[n][0] for side in spans] for n in range(3))]  # type: ignore[misc]
    started = time.perf_counter()
    for span in spans:
        library.read(span)
    return time.perf_counter() - started


def main(arguments: Sequence[str]) -> None:
    """Obey until the input ends."""
    name, nbytes, role = arguments
    memory = Memory(int(nbytes))
    if role == "source":
        memory.sign()
    library = LIBRARIES[name](memory, role)
    other = 0
    print(json.dumps({**library.about(), "address": memory.address}), flush=True)
    for line in sys.stdin:
        command, _, rest = line.partition(" ")
        if command == "connect":
            told = json.loads(rest)
            other = told["address"]
            library.connect(told)
            print("null", flush=True)
        else:
            block_bytes, count, at_once = map(int, rest.split())
            seconds = read(library, memory, other, block_bytes, count, at_once=bool(at_once))
            memory.check(block_bytes * count)
            print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
