"""An engine without our connector that serves others too: what its node tells the peers of its load."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from node.emulator import EngineConfig, Timing
from node.engine.client import EngineAddress
from node.load import LoadVector
from node.relay.session import Session
from tests.node.emulator.pair import MODEL, Pair, two_nodes
from tests.node.fakes.client import ask, connect

#: Slow enough that its cache is full, and an answer over, only long after the test.
SLOW = EngineConfig(
    name="t",
    timing=Timing(step_s=0.02, prefill_s=1e-4),
    block_size=16,
    kv_tokens=8192,
    step_tokens=512,
    max_model_len=8192,
)
STREAMS = 4
BODY = json.dumps(
    {"model": MODEL, "prompt": "a b c d", "max_tokens": 8000, "ignore_eos": True, "stream": True}
).encode()


async def test_the_peers_hear_how_full_it_is_of_requests_that_no_node_saw(tmp_path: Path) -> None:
    async with two_nodes(tmp_path, config=SLOW, linked=False) as pair, AsyncExitStack() as streams:
        ann, bob = pair.nodes
        assert not ann.kv.connected
        assert (_seen(pair).running, _seen(pair).kv_use) == (0, 0)
        for _ in range(STREAMS):
            client = await streams.enter_async_context(connect("127.0.0.1", pair.servers[0].port))
            await client.send("POST", "/v1/completions", (), BODY)
            assert (await client.head()).status == 200
        await pair.until(lambda: _seen(pair).running == STREAMS and _seen(pair).kv_use > 0.02)
        assert (ann.meter.active, bob.registry.load("bob").running) == (0, 0)
        heard = _seen(pair).kv_use
        await pair.until(lambda: _seen(pair).kv_use > heard)
        question = json.dumps({"model": MODEL, "prompt": "Who is it?", "max_tokens": 8}).encode()
        answer = await ask(bob.http_port, "POST", "/route/explain", body=question)
        barriers = {each["node"]: each["barrier_ms"] for each in json.loads(answer.body)["candidates"]}
        assert barriers["ann"] > 0 == barriers["bob"]
        await streams.aclose()
        await pair.until(lambda: _seen(pair).running == 0 and _seen(pair).kv_use == 0)


async def test_it_claims_no_more_prompts_than_its_cache_has_room_for(tmp_path: Path) -> None:
    """Whoever claims what was driven out long ago is sent prompts for nothing."""
    async with two_nodes(
        tmp_path, config=replace(SLOW, timing=Timing(step_s=1e-3, prefill_s=1e-6)), linked=False
    ) as pair:
        ann = pair.nodes[0]
        prompts = [f"{name} " + f"{name} said so. " * 1500 for name in ("first", "second", "third")]
        for prompt in prompts:
            body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 1}).encode()
            answer = await ask(ann.http_port, "POST", "/v1/completions", [("x-grapevine-force-target", "ann")], body)
            assert answer.status == 200, answer.body
        matched = []
        for prompt in prompts:
            body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 1}).encode()
            matched.append(
                json.loads((await ask(ann.http_port, "POST", "/route/explain", body=body)).body)["matched_chunks"]
            )
        assert not matched[0].get("ann") and matched[2]["ann"] > 0


async def test_an_engine_with_our_connector_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[EngineAddress] = []

    async def read_page(session: Session, address: EngineAddress) -> bytes:
        asked.append(address)
        return b""

    async with two_nodes(tmp_path) as pair:
        monkeypatch.setattr("node.assembly.read_page", read_page)
        for node in pair.nodes:
            assert node.engine.ready and node.kv.connected
            await node.onlooker.turn()
    assert asked == []


def _seen(pair: Pair) -> LoadVector:
    """What bob has heard of ann."""
    return pair.nodes[1].registry.load("ann")
