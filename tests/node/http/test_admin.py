"""What an operator asks of a node: drain, join, leave."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.node.fakes import engine as fake
from tests.node.fakes.client import ask, bearer, get
from tests.node.fakes.cluster import Cluster, cluster
from tests.node.fakes.engine import Gate
from tests.node.http.bodies import CHAT, chat


async def test_admin_is_closed_without_a_token(nodes: Cluster) -> None:
    a = await nodes.add("a")
    answer = await ask(a.port, "POST", "/admin/drain", (bearer("x"),))
    assert answer.status == 403 and json.loads(answer.body)["error"]["code"] == "admin_disabled"
    assert not a.node.admission.draining


async def test_admin_wants_its_token(nodes: Cluster) -> None:
    a = await nodes.add("a", admin_token="secret")
    assert (await ask(a.port, "POST", "/admin/drain")).status == 401
    assert (await ask(a.port, "POST", "/admin/drain", (bearer("wrong"),))).status == 403
    assert (await ask(a.port, "POST", CHAT, (), chat())).status == 200
    assert (await ask(a.port, "POST", "/admin/drain", (bearer("secret"),))).status == 202
    assert a.node.vector().draining
    assert (await ask(a.port, "POST", CHAT, (), chat())).status == 503
    assert (await ask(a.port, "POST", "/admin/undrain", (bearer("secret"),))).status == 200
    assert (await ask(a.port, "POST", CHAT, (), chat())).status == 200
    assert (await get(a.port, "/admin/secrets", bearer("secret"))).status == 404


async def test_admin_join_brings_two_nodes_together(nodes: Cluster) -> None:
    a = await nodes.add("a", admin_token="secret")
    async with cluster() as others:
        other = await others.add("z", models=["z"])
        bad = await ask(a.port, "POST", "/admin/join", (bearer("secret"),), b'{"addresses": ["no port:"]}')
        assert bad.status == 400
        host, port = other.node.gossip.address
        body = json.dumps({"addresses": [f"{host}:{port}"]}).encode()
        assert (await ask(a.port, "POST", "/admin/join", (bearer("secret"),), body)).status == 202
        for member in (a, other):
            await member.until(lambda member=member: member.sees(["a", "z"]))  # type: ignore[misc]
        answer = await ask(a.port, "POST", CHAT, (), chat("z"))
        assert answer.one("x-grapevine-target") == "z"


async def test_admin_leave_asks_the_process_to_end(nodes: Cluster) -> None:
    a = await nodes.add("a", admin_token="secret")
    asked = asyncio.Event()
    a.node._on_leave = asked.set
    assert (await ask(a.port, "POST", "/admin/leave", (bearer("secret"),))).status == 202
    assert asked.is_set() and a.node.admission.draining
    late = await ask(a.port, "POST", "/admin/undrain", (bearer("secret"),))
    assert late.status == 409 and json.loads(late.body)["error"]["code"] == "leaving"


@pytest.mark.parametrize("body", [b"x", b"[]", b'{"timeout_s": -1}', b'{"timeout_s": true}', b'{"timeout_s": 1e9}'])
async def test_a_drain_with_a_deadline_that_makes_no_sense_is_refused(nodes: Cluster, body: bytes) -> None:
    a = await nodes.add("a", admin_token="secret")
    answer = await ask(a.port, "POST", "/admin/drain", (bearer("secret"),), body)
    assert answer.status == 400 and json.loads(answer.body)["error"]["code"] == "bad_timeout"
    assert not a.node.admission.draining


async def test_a_drain_tells_how_it_goes(nodes: Cluster) -> None:
    a = await nodes.add("a", admin_token="secret")
    gate = Gate()
    a.fake.script = fake.hold(gate)
    running = asyncio.create_task(ask(a.port, "POST", CHAT, (), chat()))
    await a.fake.until(lambda: a.fake.active == 1)

    async def told(method: str = "GET", body: bytes = b"") -> dict[str, Any]:
        answer = await ask(a.port, method, "/admin/drain", (bearer("secret"),), body)
        return dict(json.loads(answer.body))

    assert (await told())["phase"] == "serving"
    begun = await told("POST", b'{"timeout_s": 600}')
    assert (begun["name"], begun["phase"], begun["running"], begun["leaving"]) == ("a", "draining", 1, False)
    assert 590 < begun["left_s"] <= 600
    assert (await told("POST", b'{"timeout_s": 0}'))["phase"] == "overdue"
    gate.open()
    assert (await running).status == 200
    await a.node.drainer.over()
    done = await told()
    assert (done["phase"], done["running"], done["running_at_begin"]) == ("drained", 0, 1)
