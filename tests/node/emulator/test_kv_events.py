"""KV events of the emulated engine, read with vLLM's own classes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from node.emulator import tokens
from node.emulator.serve.kv_events import KvEvents
from node.emulator.serve.server import EmulatedServer, ServeOptions
from node.errors import LocalError
from tests.node.emulator.test_server import CONFIG, MODEL, post
from tests.waiting import PATIENCE_S

zmq = pytest.importorskip("zmq")
msgspec = pytest.importorskip("msgspec")
vllm_events = pytest.importorskip("vllm.distributed.kv_events")

SIZE = CONFIG.block_size
SMALL = replace(CONFIG, kv_tokens=512, max_model_len=512)


@dataclass
class Listener:
    """A router that follows one engine's cache as it is told."""

    server: EmulatedServer
    socket: Any
    numbers: list[int] = field(default_factory=list)
    stored: dict[bytes, Any] = field(default_factory=dict)
    tokens: dict[bytes, list[int]] = field(default_factory=dict)
    removed: set[bytes] = field(default_factory=set)

    async def complete(self, prompt: list[int], answer: int = 1) -> None:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": answer, "ignore_eos": True}
        assert (await post(self.server, "/v1/completions", body))[0] == 200

    async def hear(self) -> None:
        topic, number, batch = await self.socket.recv_multipart()
        assert topic == b"kv"
        self.numbers.append(int.from_bytes(number, "big"))
        for event in msgspec.msgpack.decode(batch, type=vllm_events.KVEventBatch).events:
            if isinstance(event, vllm_events.BlockStored):
                assert event.block_size == SIZE and len(event.token_ids) == SIZE * len(event.block_hashes)
                parent = event.parent_block_hash
                for place, key in enumerate(event.block_hashes):
                    self.stored[key] = parent
                    self.tokens[key] = event.token_ids[place * SIZE : (place + 1) * SIZE]
                    parent = key
            else:
                assert isinstance(event, vllm_events.BlockRemoved)
                for key in event.block_hashes:
                    self.stored.pop(key, None)  # one from before we listened
                self.removed |= set(event.block_hashes)

    async def until(self, what: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not what():
                await self.hear()


@pytest.fixture
async def listener(tmp_path: Path) -> AsyncIterator[Listener]:
    import zmq.asyncio

    endpoint = f"ipc://{tmp_path}/events"
    options = ServeOptions(models=(MODEL,), kv_events=endpoint, kv_events_topic="kv")
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.SUBSCRIBE, b"kv")
        socket.setsockopt(zmq.LINGER, 0)
        async with EmulatedServer(SMALL, options) as server:
            socket.connect(endpoint)
            heard = Listener(server, socket)
            for number in range(10_000):  # what is told before the subscription has arrived, nobody hears
                await heard.complete([number + 1] * SIZE)
                if await socket.poll(10):
                    break
            await post(server, "/reset_prefix_cache", {})
            await heard.until(lambda: bool(heard.removed))
            assert not heard.stored
            heard.removed.clear()
            yield heard


async def test_blocks_are_told_with_their_tokens_and_what_they_follow(listener: Listener) -> None:
    prompt = list(range(100, 100 + 3 * SIZE + 5))
    keys = tokens.block_hashes(tokens.pack(prompt), SIZE)
    await listener.complete(prompt, answer=SIZE)
    await listener.until(lambda: len(listener.stored) == 4)
    assert [listener.stored[key] for key in keys] == [None, *keys[:2]]
    assert [token for key in keys for token in listener.tokens[key]] == prompt[: 3 * SIZE]
    assert keys[2] in listener.stored.values()  # the block in which the answer begins

    other = prompt[: 2 * SIZE] + [7] * SIZE  # shares two blocks: only the third is news
    await listener.complete(other)
    await listener.until(lambda: len(listener.stored) == 5)
    third = tokens.block_hashes(tokens.pack(other), SIZE)[2]
    assert (listener.stored[third], listener.tokens[third]) == (keys[1], [7] * SIZE)
    assert listener.numbers == list(range(listener.numbers[0], listener.numbers[-1] + 1))


async def test_who_follows_the_events_knows_what_the_cache_holds(listener: Listener) -> None:
    engine = listener.server.engine
    for number in range(12):  # three times what fits
        await listener.complete([1000 + number] * (8 * SIZE))
    last = tokens.block_hashes(tokens.pack([1011] * (8 * SIZE)), SIZE)
    await listener.until(lambda: last[-1] in listener.stored)
    assert listener.removed and not listener.removed & listener.stored.keys()
    assert len(listener.stored) <= SMALL.blocks
    for number in range(12):
        keys = tokens.block_hashes(tokens.pack([1000 + number] * (8 * SIZE)), SIZE)
        before = engine.counts.hit
        held = sum(1 for key in keys if key in listener.stored)
        await listener.complete([1000 + number] * (8 * SIZE))
        assert engine.counts.hit - before == min(held, 7) * SIZE  # one token is always computed
        await asyncio.wait_for(listener.until(lambda keys=keys: keys[-1] in listener.stored), PATIENCE_S)  # type: ignore[misc]


def test_an_endpoint_that_cannot_be_used_is_an_error_of_one_line() -> None:
    with pytest.raises(LocalError, match="nowhere"):
        KvEvents("nowhere://*", SIZE)
