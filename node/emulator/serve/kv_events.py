"""What enters and leaves the emulated cache, told over ZMQ as vLLM tells it (vllm/distributed/kv_events.py).

Rules
1. A message is the topic, its number (8 bytes, the largest first) and a batch in msgpack: `[seconds, events]`. An event
   is a map whose `type` is `BlockStored` or `BlockRemoved`.
2. An endpoint with a `*` and those of `ipc://` and `inproc://` are bound, others are connected to.
3. Whoever does not listen, or not fast enough, misses events: nothing here waits. There is no replay.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from importlib import import_module
from typing import Any

import msgpack

from node.emulator.job import Action, Done, Evicted, Job, Stored
from node.errors import LocalError

#: Requests remembered; one that is aborted stays until then, as its last blocks come after its end.
MAX_JOBS = 4096

_MEDIUM = "GPU"
_TOKEN_BYTES = 4


class KvEvents:
    """A publisher of one engine. Needs pyzmq, which every vLLM brings."""

    def __init__(self, endpoint: str, block_size: int, *, topic: str = "") -> None:
        """Begin to publish. Raises `LocalError`."""
        try:
            zmq: Any = import_module("zmq")  # not every host has it
        except ImportError:
            raise LocalError("--kv-events-endpoint needs pyzmq: pip install pyzmq") from None
        self._topic = topic.encode()
        self._block_size = block_size
        self._jobs: OrderedDict[str, tuple[dict[Hashable, int], Job, bytes]] = OrderedDict()
        self._numbers = itertools.count()
        self._flags = zmq.NOBLOCK
        self._dropped: type[Exception] = zmq.Again
        self._socket: Any = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        bound = "*" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
        try:
            (self._socket.bind if bound else self._socket.connect)(endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            raise LocalError(f"--kv-events-endpoint {endpoint}: {error}") from None

    def begin(self, job: Job, tokens: bytes) -> None:
        """Learn of a request before it is computed: ``tokens`` are its prompt and answer, packed."""
        self._jobs[job.rid] = ({key: place for place, key in enumerate(job.keys)}, job, tokens)
        while len(self._jobs) > MAX_JOBS:
            self._jobs.popitem(last=False)

    def on_action(self, action: Action) -> None:
        """Tell what an action of the engine says of its cache."""
        match action:
            case Stored():
                self._stored(action)
            case Evicted():
                self.removed(action.keys)
            case Done():
                self._jobs.pop(action.rid, None)
            case _:
                pass

    def removed(self, keys: Sequence[Hashable]) -> None:
        """Tell of blocks that left the cache."""
        if keys:
            self._send([{"type": "BlockRemoved", "block_hashes": list(keys), "medium": _MEDIUM}])

    def close(self) -> None:
        """Publish no more."""
        self._socket.close()

    def _stored(self, action: Stored) -> None:
        """One event for each run of blocks that follow each other: others were in the cache before."""
        known = self._jobs.get(action.rid)
        if known is None:
            return
        places, job, tokens = known
        runs: list[list[int]] = []
        for place in sorted(places[key] for key in action.keys):
            if runs and runs[-1][-1] == place - 1:
                runs[-1].append(place)
            else:
                runs.append([place])
        size = self._block_size * _TOKEN_BYTES
        self._send(
            [
                {
                    "type": "BlockStored",
                    "block_hashes": [job.keys[place] for place in run],
                    "parent_block_hash": job.keys[run[0] - 1] if run[0] else None,
                    "token_ids": _ids(tokens[run[0] * size : (run[-1] + 1) * size]),
                    "block_size": self._block_size,
                    "lora_id": None,
                    "medium": _MEDIUM,
                    "lora_name": None,
                }
                for run in runs
            ]
        )

    def _send(self, events: list[dict[str, object]]) -> None:
        number = next(self._numbers).to_bytes(8, "big")
        batch: bytes = msgpack.packb([time.time(), events])
        with contextlib.suppress(self._dropped):  # rule 3
            self._socket.send_multipart((self._topic, number, batch), self._flags)


def _ids(packed: bytes) -> list[int]:
    ids = array("I", packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()
