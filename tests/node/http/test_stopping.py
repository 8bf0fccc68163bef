"""How a node starts, is ready, stops and leaves."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.node.fakes import engine as fake
from tests.node.fakes.client import ask, get
from tests.node.fakes.cluster import Cluster
from tests.node.fakes.engine import Gate
from tests.node.http.bodies import CHAT, chat


async def test_ready_means_that_somebody_can_serve(nodes: Cluster) -> None:
    a = await nodes.add("a", up=False)
    assert (await get(a.port, "/healthz")).status == 200
    assert (await get(a.port, "/readyz")).status == 503
    await nodes.add("b")
    await a.until(lambda: a.sees(["b"]))
    told = json.loads((await get(a.port, "/readyz")).body)
    assert told == {"ready": True, "leaving": False, "nodes": ["b"]}


async def test_a_node_that_leaves_sends_balancers_away_before_it_refuses_anybody(nodes: Cluster) -> None:
    a, b = await nodes.add("a", stop_grace_s=30), await nodes.add("b")
    await nodes.agree()
    assert (await get(a.port, "/readyz")).status == 200
    stopping = asyncio.create_task(a.node.stop())
    await a.draining.wait()
    # Whoever asks has not been told yet: the node goes on serving, through its peer.
    answer = await ask(a.port, "POST", CHAT, (), chat())
    assert (answer.status, answer.one("x-grapevine-target")) == (200, "b")
    told = await get(a.port, "/readyz")
    assert told.status == 503 and json.loads(told.body) == {"ready": False, "leaving": True, "nodes": []}
    await stopping
    with pytest.raises(ConnectionError):
        await get(a.port, "/readyz")
    assert (await get(b.port, "/readyz")).status == 200


async def test_a_second_request_to_stop_does_not_wait_for_what_runs(nodes: Cluster) -> None:
    a = await nodes.add("a", stop_grace_s=3000)
    a.fake.script = fake.stall
    running = asyncio.create_task(ask(a.port, "POST", CHAT, (), chat()))
    await a.fake.until(lambda: a.fake.active == 1)
    stopping = asyncio.create_task(a.node.stop())
    await a.draining.wait()
    a.node.hurry()
    await stopping
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await running


async def test_a_stopping_node_finishes_what_runs(nodes: Cluster) -> None:
    a = await nodes.add("a", stop_grace_s=5)
    gate = Gate()
    a.fake.script = fake.hold(gate)
    running = asyncio.create_task(ask(a.port, "POST", CHAT, (), chat()))
    await a.fake.until(lambda: a.fake.active == 1)
    stopping = asyncio.create_task(a.node.stop())
    await a.draining.wait()
    gate.open()
    assert (await running).status == 200
    await stopping
    with pytest.raises(ConnectionError):
        await get(a.port, "/healthz")


async def test_a_stopping_node_cuts_what_does_not_end(nodes: Cluster) -> None:
    a = await nodes.add("a", stop_grace_s=0)
    a.fake.script = fake.stall
    running = asyncio.create_task(ask(a.port, "POST", CHAT, (), chat()))
    await a.fake.until(lambda: a.fake.active == 1)
    await a.node.stop()
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await running
    await a.fake.until(lambda: a.fake.disconnects == 1)


async def test_what_cannot_start_leaves_nothing_behind(nodes: Cluster) -> None:
    from gossip import GossipError
    from node.assembly import Node

    a = await nodes.add("a")
    settings = nodes.settings("late", gossip_port=a.node.gossip.address[1])
    node = Node(settings)
    with pytest.raises(GossipError):
        await node.start()
    assert not (nodes.folder / "state" / "running" / "late.json").exists()
    with pytest.raises(ConnectionError):
        await get(node.http_port, "/healthz")
