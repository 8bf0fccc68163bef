"""Everything beside the relayed API: models, state, health, metrics, page, explain, admin, credentials."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gossip import ClusterKey, Keyring
from node.http.signature import AUTH_HEADER, PeerCall, PeerSigner
from node.meta import NodeMeta
from node.peers import PLAN_HEADER
from node.plan import Plan
from tests.node.fakes import engine as fake
from tests.node.fakes.client import RawAnswer, ask, connect
from tests.node.fakes.cluster import Cluster, cluster
from tests.node.fakes.engine import Gate
from tests.node.http.bodies import CHAT, chat


@pytest.fixture
async def nodes() -> AsyncIterator[Cluster]:
    async with cluster() as empty:
        yield empty


def _has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            return False
    return True


async def get(port: int, path: str, *headers: tuple[str, str]) -> RawAnswer:
    return await ask(port, "GET", path, headers)


def bearer(token: str) -> tuple[str, str]:
    return ("Authorization", f"Bearer {token}")


async def test_models_are_the_union_of_the_cluster(nodes: Cluster) -> None:
    a, b = await nodes.add("a", models=["m", "one"]), await nodes.add("b", models=["m", "org/two"])
    await nodes.agree()
    for entry in (a, b):
        answer = json.loads((await get(entry.port, "/v1/models")).body)
        assert answer["object"] == "list"
        assert [card["id"] for card in answer["data"]] == ["m", "one", "org/two"]
        card = json.loads((await get(entry.port, "/v1/models/org/two")).body)
        assert card["object"] == "model" and card["max_model_len"] == 4096
    missing = await get(a.port, "/v1/models/none")
    assert missing.status == 404 and json.loads(missing.body)["error"]["code"] == "model_not_found"


async def test_models_follow_the_engine(nodes: Cluster) -> None:
    a, b = await nodes.add("a"), await nodes.add("b", models=["m"])
    await nodes.agree()
    b.fake.models.append("adapter")
    b.supervisor.up()
    await a.until(lambda: a.node.registry.roster.get("b") is not None and "adapter" in _models(a.node, "b"))
    b.fake.models.remove("adapter")
    b.supervisor.up()
    await a.until(lambda: "adapter" not in _models(a.node, "b"))


def _models(node: object, name: str) -> set[str]:
    return set(node.registry.describe(name).models)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("path", "header", "status"),
    [
        (b"/v1/models", b"Authorization: Bearer \xff", 401),
        (b"/admin/drain", b"Authorization: Bearer \xff", 403),
        (b"/peer/v1/x", b"x-grapevine-auth: a.\xff", 403),
    ],
)
async def test_a_credential_that_is_no_text_is_a_wrong_one(
    nodes: Cluster, path: bytes, header: bytes, status: int
) -> None:
    a = await nodes.add("a", api_key=("s",), admin_token="t", cluster_key="a long enough key")
    async with connect("127.0.0.1", a.port) as client:
        client.writer.write(b"POST " + path + b" HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n" + header + b"\r\n\r\n")
        assert (await client.answer()).status == status


@pytest.mark.parametrize("target", [CHAT + "?", CHAT + "#part", CHAT + "?#", CHAT + "?a=%20&b=c+d|{}"])
async def test_a_signed_call_arrives_whatever_the_target_looks_like(nodes: Cluster, target: str) -> None:
    """A target loses its fragment on the way: the signature is over what arrives."""
    a = await nodes.add("a", models=["other"], cluster_key="a long enough key")
    b = await nodes.add("b", cluster_key="a long enough key")
    await nodes.agree()
    answer = await ask(a.port, "POST", target, (), chat())
    assert answer.status == 200 and answer.one("x-grapevine-target") == "b", answer.body
    assert b.fake.received[0].target == target.partition("#")[0]


async def test_a_peer_at_an_impossible_address_is_replaced(nodes: Cluster) -> None:
    a = await nodes.add("a", models=["other"], cluster_key="a long enough key")
    b, c = await nodes.add("b", cluster_key="a long enough key"), await nodes.add("c", cluster_key="a long enough key")
    await nodes.agree()
    for address in ("a..b:80", "x" * 64 + ":80"):
        a.node.registry._meta[b.name] = NodeMeta(address)
        a.node.registry.worked(b.name)
        for _ in range(4):
            answer = await ask(a.port, "POST", CHAT, (), chat())
            assert (answer.status, answer.one("x-grapevine-target")) == (200, c.name), answer.body
        answer = await ask(a.port, "POST", CHAT, (("x-grapevine-force-target", b.name),), chat())
        assert answer.status == 503


@pytest.mark.skipif(not _has_ipv6(), reason="this host has no IPv6")
@pytest.mark.parametrize("host", ["::", "::1"])
async def test_nodes_that_listen_for_ipv6_find_each_other(nodes: Cluster, host: str) -> None:
    a = await nodes.add("a", host=host, models=["other"])
    await nodes.add("b", host=host)
    await nodes.agree()
    async with connect("::1", a.port) as client:
        answer = await client.ask("POST", CHAT, (), chat())
    assert answer.status == 200 and answer.one("x-grapevine-target") == "b"


async def test_the_state_shows_every_member_with_a_fresh_load_vector(nodes: Cluster) -> None:
    a, b = await nodes.add("a"), await nodes.add("b")
    await nodes.agree()
    await ask(a.port, "POST", CHAT, (("x-grapevine-force-target", "b"),), chat())
    state = json.loads((await get(a.port, "/gossip/state")).body)
    assert state["self"] == "a" and state["cluster"] == "default"
    assert state["engine"]["state"] == "ready" and state["kv"]["enabled"] is False
    assert [member["name"] for member in state["members"]] == ["a", "b"]
    for member, node in zip(state["members"], (a, b), strict=True):
        assert member["state"] == "alive" and member["models"] == ["m"]
        assert member["http"] == f"127.0.0.1:{node.port}"
        assert member["load"]["ready"] is True and member["load"]["slots"] == 256
        assert 0 <= member["load_age_s"] < 2
        assert isinstance(member["incarnation"], int) and member["suspected_by"] == []
        assert member["latency"] is not None and member["digest_size"] == 0
    assert state["decisions"][0]["target"] == "b" and state["decisions"][0]["status"] == 200
    short = json.loads((await get(b.port, "/gossip/members")).body)
    assert [member["state"] for member in short["members"]] == ["alive", "alive"]


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


async def test_metrics_are_ours_and_then_the_engines(nodes: Cluster) -> None:
    a = await nodes.add("a")
    await ask(a.port, "POST", CHAT, (), chat())
    answer = await get(a.port, "/metrics")
    text = answer.body.decode()
    assert (answer.one("Content-Type") or "").startswith("text/plain")
    assert 'grapevine_requests_total{place="local",status="200"} 1.0' in text
    assert "grapevine_active_requests 0.0" in text and "grapevine_decide_seconds_bucket" in text
    assert text.rstrip().endswith('vllm:demo{node="a"} 1.0')
    a.supervisor.down()
    assert "vllm:" not in (await get(a.port, "/metrics")).body.decode()


async def test_the_page_loads_nothing_from_elsewhere(nodes: Cluster) -> None:
    a = await nodes.add("a")
    answer = await get(a.port, "/")
    page = answer.body.decode()
    assert answer.status == 200 and "text/html" in (answer.one("Content-Type") or "")
    assert "http://" not in page and "https://" not in page and "//" not in page.replace("<!--", "")
    assert "default-src 'none'" in (answer.one("Content-Security-Policy") or "")
    for name in re.findall(r'(?:src|href)="(page/[^"]+)"', page):
        file = await get(a.port, f"/{name}")
        assert file.status == 200 and file.one("X-Content-Type-Options") == "nosniff"
        tag = file.one("ETag")
        assert tag and (await get(a.port, f"/{name}", ("If-None-Match", tag))).status == 304
    assert (await get(a.port, "/page/nothing.js")).status == 404


async def test_recent_decisions_can_be_read_back(nodes: Cluster) -> None:
    a = await nodes.add("a")
    await ask(a.port, "POST", CHAT, (), chat())
    await ask(a.port, "POST", CHAT, (), chat("nope"))
    told = json.loads((await get(a.port, "/route/recent")).body)
    refused, run = told["decisions"]
    assert (run["target"], run["status"], run["policy"]) == ("a", 200, "cost") and run["cost"]["node"] == "a"
    assert run["ran_ms"] <= run["first_byte_ms"] and (refused["status"], refused["target"]) == (404, None)
    assert len(json.loads((await get(a.port, "/route/recent?limit=1")).body)["decisions"]) == 1
    bad = await get(a.port, "/route/recent?limit=-1")
    assert bad.status == 400 and "limit" in bad.body.decode()


async def test_explain_runs_nothing(nodes: Cluster) -> None:
    a, b = await nodes.add("a"), await nodes.add("b")
    await nodes.agree()
    answer = await ask(a.port, "POST", "/route/explain", (), chat())
    told = json.loads(answer.body)
    assert told["plan"]["target"] in {"a", "b"} and told["plan"]["reason"]
    assert {cost["node"] for cost in told["candidates"]} == {"a", "b"}
    assert all("total_ms" in cost and "queue_ms" in cost for cost in told["candidates"])
    unknown = json.loads((await ask(a.port, "POST", "/route/explain", (), chat("nope"))).body)
    assert unknown["refusal"]["status"] == 404
    assert not a.fake.received and not b.fake.received


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("GET", "/v2/x", 404), ("POST", "/healthz", 405), ("GET", "/route/explain", 405)],
)
async def test_what_is_not_there_is_an_error_in_openais_form(
    nodes: Cluster, method: str, path: str, status: int
) -> None:
    a = await nodes.add("a")
    answer = await ask(a.port, method, path)
    assert answer.status == status
    error = json.loads(answer.body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert (answer.one("Allow") is not None) == (status == 405)


@pytest.mark.parametrize(
    "path", ["/v1/../admin", "/v1/%2e%2E/x", "/v1/..%2fx", "/v1/a/./b", "/v1/..\\x", "/peer/v1/../x", "/v1/..#/x"]
)
async def test_a_path_that_climbs_out_of_the_api_goes_nowhere(nodes: Cluster, path: str) -> None:
    """An engine behind a gateway would resolve it, and be asked for what lies beside its API, with the node's key."""
    a = await nodes.add("a")
    answer = await ask(a.port, "POST", path, (), chat())
    assert answer.status == 400 and json.loads(answer.body)["error"]["code"] == "bad_path"
    assert not a.fake.received
    assert (await ask(a.port, "POST", "/v1/..x/a.b/%2541", (), chat())).status == 200


async def test_head_answers_like_get_without_a_body(nodes: Cluster) -> None:
    a = await nodes.add("a")
    async with connect("127.0.0.1", a.port) as client:
        for path in ("/healthz", "/v1/models", "/"):
            assert (await client.ask("HEAD", path)).status == 200


async def test_a_protocol_upgrade_is_refused(nodes: Cluster) -> None:
    a = await nodes.add("a")
    headers = (("Connection", "Upgrade"), ("Upgrade", "websocket"))
    assert (await get(a.port, "/v1/realtime", *headers)).status == 501


async def test_an_offer_of_http_2_is_no_error(nodes: Cluster) -> None:
    """Java's client and `curl --http2` send it with every first request; HTTP/1.1 is the answer."""
    a = await nodes.add("a")
    offer = (("Connection", "Upgrade, HTTP2-Settings"), ("Upgrade", "h2c"), ("HTTP2-Settings", "AAMAAABkAAQAAP__"))
    answer = await ask(a.port, "POST", CHAT, offer, chat())
    assert answer.status == 200
    assert not {"upgrade", "http2-settings"} & {name.lower() for name, _ in a.fake.received[0].headers}


# --- admin


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
    done = await told()
    assert (done["phase"], done["running"], done["running_at_begin"]) == ("drained", 0, 1)


# --- credentials


async def test_client_keys_guard_the_api_and_stay_here(nodes: Cluster) -> None:
    a, b = await nodes.add("a", api_key=("k1", "k2")), await nodes.add("b", api_key=("k1", "k2"))
    await nodes.agree()
    assert (await ask(a.port, "POST", CHAT, (), chat())).status == 401
    wrong = await ask(a.port, "POST", CHAT, (bearer("k3"),), chat())
    assert wrong.status == 401 and json.loads(wrong.body)["error"]["code"] == "invalid_api_key"
    assert (await get(a.port, "/v1/models")).status == 401
    assert (await ask(a.port, "POST", "/route/explain", (), chat())).status == 401
    assert (await ask(a.port, "GET", "/route/recent", (), b"")).status == 401
    for target in (a, b):
        forced = (bearer("k2"), ("x-grapevine-force-target", target.name))
        assert (await ask(a.port, "POST", CHAT, forced, chat())).status == 200
        assert not target.fake.received[-1].header("Authorization")
    assert (await get(a.port, "/healthz")).status == 200


async def test_without_client_keys_the_authorization_goes_to_the_engine(nodes: Cluster) -> None:
    a, b = await nodes.add("a"), await nodes.add("b")
    await nodes.agree()
    for target in (a, b):
        forced = (bearer("theirs"), ("x-grapevine-force-target", target.name))
        await ask(a.port, "POST", CHAT, forced, chat())
        assert target.fake.received[-1].header("Authorization") == ["Bearer theirs"]


def plan_for(target: str) -> tuple[str, str]:
    return (PLAN_HEADER, Plan(rid="r", model="m", entry="a", target=target, hops=1).header())


def signer(text: str) -> PeerSigner:
    return PeerSigner(Keyring([ClusterKey.from_text(text, "default")]))


async def test_with_a_cluster_key_only_its_holders_may_call_peer_routes(nodes: Cluster) -> None:
    a, b = await nodes.add("a", cluster_key="k" * 20), await nodes.add("b", cluster_key="k" * 20)
    await nodes.agree()
    assert (await ask(a.port, "POST", CHAT, (("x-grapevine-force-target", "b"),), chat())).status == 200
    path, plan, rid = "/peer" + CHAT, plan_for("b"), ("X-Request-Id", "r1")

    def signed(text: str, header: str) -> tuple[str, str]:
        call = PeerCall("POST", path, "r1", {PLAN_HEADER: header})
        return (AUTH_HEADER, signer(text).sign(call, chat(), receiver=b.node.signer.boot))

    assert (await ask(b.port, "POST", path, (plan, rid), chat())).status == 403
    assert (await ask(b.port, "POST", path, (plan, rid, signed("another key", plan[1])), chat())).status == 403
    assert (await ask(b.port, "POST", path, (plan, rid, signed("k" * 20, "x")), chat())).status == 403
    assert (await ask(b.port, "POST", path, (plan, rid, signed("k" * 20, plan[1])), chat())).status == 200


async def test_without_a_key_only_addresses_of_members_may_call_peer_routes(nodes: Cluster) -> None:
    a = await nodes.add("a")
    path, plan = "/peer" + CHAT, plan_for("a")
    assert (await ask(a.port, "POST", path, (plan,), chat())).status == 200
    a.node.registry._up = frozenset({"192.0.2.7"})
    answer = await ask(a.port, "POST", path, (plan,), chat())
    assert answer.status == 403 and answer.one("x-grapevine-refused")


@pytest.mark.parametrize("plan", ["", "!", "AAAA", "A" * 5000])
async def test_a_plan_that_makes_no_sense_is_refused(nodes: Cluster, plan: str) -> None:
    a = await nodes.add("a")
    answer = await ask(a.port, "POST", "/peer" + CHAT, ((PLAN_HEADER, plan),), chat())
    assert answer.status == 400 and not a.fake.received


# --- start and stop


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


async def test_cluster_keys_are_rotated_while_the_cluster_serves_and_never_shown(nodes: Cluster) -> None:
    more = {"cluster_key": "first secret", "admin_token": "secret"}
    a, b = await nodes.add("a", **more), await nodes.add("b", **more)
    await nodes.agree()
    admin = bearer("secret")

    async def step(**what: str) -> list[str]:
        for member in (a, b):
            answer = await ask(member.port, "POST", "/admin/keys", (admin,), json.dumps(what).encode())
            assert answer.status == 200, answer.body
            assert b"secret" not in answer.body
        return [key["id"] for key in json.loads(answer.body)["keys"]]

    async def served() -> int:
        return (await ask(a.port, "POST", CHAT, (("x-grapevine-force-target", "b"),), chat())).status

    (old,) = [key["id"] for key in json.loads((await get(a.port, "/admin/keys", admin)).body)["keys"]]
    _, new = await step(add="second secret")
    assert await served() == 200
    assert await step(use=new) == [new, old]
    assert await served() == 200
    assert await step(remove=old) == [new]
    assert await served() == 200
    path, plan, rid = "/peer" + CHAT, plan_for("b"), ("X-Request-Id", "r1")
    for text, status in (("first secret", 403), ("second secret", 200)):
        call = PeerCall("POST", path, "r1", {PLAN_HEADER: plan[1]})
        signed = (AUTH_HEADER, signer(text).sign(call, chat(), receiver=b.node.signer.boot))
        assert (await ask(b.port, "POST", path, (plan, rid, signed), chat())).status == status


async def test_a_wrong_step_of_a_key_rotation_is_refused(nodes: Cluster) -> None:
    a = await nodes.add("a", cluster_key="first secret", admin_token="secret")
    assert (await get(a.port, "/admin/keys")).status == 401
    for body, status in (
        (b"{}", 400),
        (b"x", 400),
        (b'{"add": 5}', 400),
        (b'{"use": "00"}', 409),
        (b'{"add": "x"}', 409),
    ):
        assert (await ask(a.port, "POST", "/admin/keys", (bearer("secret"),), body)).status == status
