"""What is beside the relayed API: models, state, metrics, page, explain, paths that lead nowhere."""

from __future__ import annotations

import json
import re
import socket

import pytest

from node.meta import NodeMeta
from tests.node.fakes.client import ask, connect, get
from tests.node.fakes.cluster import Cluster
from tests.node.http.bodies import CHAT, chat


def _has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            return False
    return True


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
