"""Emulated engines behind real nodes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from node.assembly import Node
from node.chunks import CHUNK_BYTES
from node.settings import GIB
from tests.node.emulator.pair import CHUNKS, CONFIG, MODEL, POOL_GIB, PROMPT, Pair, at, two_nodes
from tests.node.fakes.client import ask, connect
from tests.waiting import PATIENCE_S

#: Blocks that a small pool holds: of 67 that a prompt fills.
SLOTS = 90


@pytest.fixture
async def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    # A pull may take as long as computing would, and these engines are fast: on a busy machine that is not enough.
    monkeypatch.setattr("node.kv_pulls.PULL_MIN_S", PATIENCE_S / 2)
    monkeypatch.setattr("node.kv_pulls.PULL_MAX_S", PATIENCE_S / 2)
    async with two_nodes(tmp_path) as both:
        yield both


async def test_kv_is_pulled_from_one_emulated_engine_to_the_other_and_the_answer_is_the_same(pair: Pair) -> None:
    bob = pair.nodes[1]
    _, cold = await pair.send(0, *at("ann"))
    await pair.until(lambda: bob.registry.roster.prefixes.count("ann") == CHUNKS)
    answer, pulled = await pair.send(0, *at("bob", "ann"))
    blocks = int(answer.one("x-grapevine-pulled-blocks") or 0)
    assert blocks > 20 and pulled == cold
    engine, connector = pair.servers[1].engine, pair.servers[1].connector
    assert connector is not None and connector.loaded == engine.counts.external_hit // 16
    assert engine.counts.external_hit >= (blocks - 3) * 16
    assert answer.one("x-grapevine-target") == "bob"


async def test_the_second_request_is_routed_to_the_holder_and_hits(pair: Pair) -> None:
    await pair.send(0, *at("bob"))
    await pair.until(lambda: pair.nodes[0].registry.roster.prefixes.count("bob") == CHUNKS)
    answer, _ = await pair.send(0, ("x-grapevine-no-pull", "1"))
    assert answer.one("x-grapevine-target") == "bob"
    assert (answer.one("x-grapevine-reason") or "").startswith("prefix")
    assert pair.servers[1].engine.counts.hit > 500


async def test_a_prompt_that_the_pool_dropped_and_the_engine_still_has_is_routed_to_it(tmp_path: Path) -> None:
    """A KV cache is often larger than the pool: what the pool dropped is no reason to compute it again elsewhere."""
    other = PROMPT.replace("house", "garden")
    async with two_nodes(tmp_path, block_bytes=int(POOL_GIB * GIB) // SLOTS) as pair:
        ann, bob = pair.nodes
        for prompt in (PROMPT, other):
            await pair.send(0, *at("bob"), prompt=prompt)
        await pair.until(lambda: ann.registry.roster.prefixes.count("bob") == CHUNKS + len(other) // CHUNK_BYTES)
        assert bob.kv.pool is not None
        stats = bob.kv.pool.stats()
        assert stats.slots <= SLOTS and stats.evictions, "the pool has no room for both"
        before = pair.servers[1].engine.counts.hit
        answer, _ = await pair.send(0, ("x-grapevine-no-pull", "1"))
        assert answer.one("x-grapevine-target") == "bob"
        assert pair.servers[1].engine.counts.hit - before > 500


async def test_a_stream_that_moves_takes_its_kv_along(pair: Pair) -> None:
    """Its continuation is token ids, that no chunk stands for: the client's own chunks travel with it."""
    bob = pair.nodes[1]
    # So long that it is not over before it can be moved.
    sent = {"model": MODEL, "prompt": PROMPT, "max_tokens": 800, "ignore_eos": True, "stream": True}
    body = json.dumps({**sent, "return_token_ids": False}).encode()
    whole = text_of((await ask(bob.http_port, "POST", "/v1/completions", tuple(at("bob")), body)).body)
    await pair.until(lambda: bob.registry.roster.prefixes.count("bob") == CHUNKS)
    begun = pair.servers[0].engine.counts.prompt
    async with connect("127.0.0.1", bob.http_port) as client:
        await client.send("POST", "/v1/completions", tuple(at("bob")), body)
        assert (await client.head()).status == 200
        shown = await client.chunk()
        bob.drain(60)
        assert bob.handovers.move_all() == 1
        while piece := await client.chunk():
            shown += piece
    assert text_of(shown) == whole and b"error" not in shown
    assert bob.admission.active == 0
    connector, counts = pair.servers[0].connector, pair.servers[0].engine.counts
    assert connector is not None and connector.loaded > 20  # pulled from bob, that runs nothing any more
    # The prompt went there twice, ahead of the move and with it: pulled the first time, the engine's own the second.
    assert counts.hit + counts.external_hit > (counts.prompt - begun) * 0.8
    assert b'cause="moved",result="carried"} 1.0' in bob.metrics.page()


async def test_every_entry_knows_how_large_the_caches_are(pair: Pair) -> None:
    ann = pair.nodes[0]
    await pair.until(lambda: [_kv_tokens(ann, name) for name in ("ann", "bob")] == [CONFIG.kv_tokens] * 2)


def _kv_tokens(node: Node, name: str) -> int:
    seen = node.registry.roster.get(name)
    return seen.models[MODEL].kv_tokens if seen is not None and MODEL in seen.models else 0


def text_of(raw: bytes) -> str:
    events = [json.loads(line[6:]) for line in raw.split(b"\n\n") if line.startswith(b"data: {")]
    return "".join(choice["text"] for event in events for choice in event["choices"])
