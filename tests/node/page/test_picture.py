"""What the page is told: bounded, of the right shape, and nothing that is secret."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip import MemberState
from kvmigrate.pull import MAX_SOURCES
from node import flows, history
from node.flows import Flows, pulled_in
from node.history import History
from node.plan import Plan, RouteOptions
from node.policy.base import CandidateCost
from node.prompt import ParsedRequest
from node.relay.call import Call
from node.relay.forward import CACHED_HEADER, PULLED_HEADER
from node.wire import NAME
from tests.node.fakes.client import ask, connect
from tests.node.fakes.cluster import cluster
from tests.node.http.bodies import CHAT, chat
from tests.node.page.stage import Stage
from tests.waiting import PATIENCE_S


def call(rid: str = "r") -> Call:
    parsed = ParsedRequest(path=CHAT, model="m", est_prompt_tokens=7)
    return Call("POST", CHAT, [], parsed, rid, RouteOptions(), 0.0)


def plan(target: str = "b", **more: object) -> Plan:
    return Plan(rid="r", model="m", entry="a", target=target, reason="least cost", prompt_tokens=9, hops=1, **more)  # type: ignore[arg-type]


def test_a_request_tells_why_and_what_the_others_would_have_cost() -> None:
    stage = Stage(["a", "b"])
    given = (("c", 30.0), ("b", 10.0), ("a", 20.0), ("d", 40.0), ("e", 50.0))
    costs = tuple(CandidateCost(name, ms) for name, ms in given)
    told = {PULLED_HEADER: "12", CACHED_HEADER: "7"}
    chosen = plan(costs=costs, source="c", visited=("x",))
    stage.log.note(call(), chosen, 200, stage.now, first_byte_s=0.25, told=told)
    row = json.loads(stage.picture().first())["requests"][0]
    assert (row["target"], row["reason"], row["first_byte_ms"]) == ("b", "least cost", 250.0)
    assert (row["pulled_blocks"], row["cached_tokens"], row["cost_ms"], row["refused_by"]) == (12, 7, 10.0, ["x"])
    assert row["others"] == [["a", 20.0], ["c", 30.0], ["d", 40.0]]


def test_a_tick_has_what_is_new_and_what_broke_off_since() -> None:
    stage = Stage(["a", "b"])
    picture = stage.picture()
    picture.tick()
    stage.log.note(call("mine"), plan(), 200, stage.now, first_byte_s=0.1, told={})
    stage.log.note(call("refused"), None, 503, stage.now, first_byte_s=None, told={})
    assert [row["rid"] for row in json.loads(picture.tick())["requests"]] == ["refused", "mine"]
    assert json.loads(picture.tick())["requests"] == []
    stage.log.broke(call("mine"), "client gone")
    (row,) = json.loads(picture.tick())["requests"]
    assert (row["rid"], row["broke"]) == ("mine", "client gone")


def test_history_keeps_steps_with_events_only_and_forgets_the_old() -> None:
    now = 100.0
    past = History(lambda: now)
    past.answered("local", 0.2)
    past.answered("forwarded", 0.4)
    past.started(100, 40)
    past.pulled(3)
    now = 103.0
    past.answered("refused", None)
    assert past.points() == [[50, 1, 1, 0, 200.0, 200.0, 100, 40, 3], [51, 0, 0, 1, 0.0, 0.0, 0, 0, 0]]
    assert past.points(51) == past.points()[1:]
    now += history.POINTS * history.STEP_S
    assert past.points() == []


def test_history_is_bounded_in_steps_and_in_times() -> None:
    now = 0.0
    past = History(lambda: now)
    for _ in range(history.POINTS + 10):
        now += history.STEP_S
        for _ in range(history.MAX_TIMES // 64):
            past.answered("local", 0.1)
    for _ in range(history.MAX_TIMES + 5):
        past.answered("local", 0.1)
    assert past._running is not None and len(past._running.times) == history.MAX_TIMES
    assert len(past._past) == history.POINTS and all(len(row) == len(history.COLUMNS) for row in past._past)
    assert len(past.points()) == history.POINTS


def test_flows_count_pairs_and_forget_the_quietest() -> None:
    seen = Flows()
    seen.opened(plan(source="c"), {"c": 5, "d": 1})
    seen.opened(plan(source="c"), {"c": 2})
    seen.opened(plan(target="a", source=None), {})
    assert seen.forwards() == [("a", "b", 2)] and seen.pulls() == [("d", "b", 1), ("c", "b", 7)]
    for index in range(flows.MAX_PAIRS):
        seen.opened(plan(target=f"n{index}"), {})
    assert len(seen.forwards()) == flows.MAX_PAIRS and ("a", "b", 2) not in seen.forwards()


@given(st.text("ab=, 019é-", max_size=60))
def test_what_a_peer_says_about_blocks_is_numbers_in_range_or_nothing(text: str) -> None:
    told = pulled_in([("X-Grapevine-Pulled-From", text)])
    assert len(told) <= MAX_SOURCES
    assert all(NAME.fullmatch(name) and 0 < blocks <= flows.MAX_BLOCKS for name, blocks in told.items())


def test_blocks_are_told_by_the_node_that_gave_them() -> None:
    assert pulled_in([("x-grapevine-pulled-from", "a=12, gpu-3.x=9")]) == {"a": 12, "gpu-3.x": 9}
    assert pulled_in([("x-grapevine-pulled-blocks", "12")]) == {}


def test_a_hundred_nodes_are_a_small_tick() -> None:
    stage = Stage([f"gpu-{index:03}" for index in range(100)])
    picture = stage.picture()
    picture.first()
    stage.turn()
    tick = picture.tick()
    assert len(tick) < 40_000, len(tick)
    told = json.loads(tick)
    assert {len(column) for column in told["nodes"].values()} == {100}
    assert all(0 <= a < b < 100 for a, b, _ in told["edges"])


def test_states_are_words_that_say_whether_a_node_takes_requests() -> None:
    stage = Stage(["a", "b", "c"])
    stage.states["b"] = MemberState.SUSPECT
    told = json.loads(stage.picture().first())
    assert told["nodes"]["state"] == ["alive", "suspect", "alive"] and told["self"] == "a"


@pytest.mark.parametrize("keys", [(), ("sk-very-secret",)])
async def test_the_page_tells_nothing_secret(keys: tuple[str, ...]) -> None:
    async with cluster() as nodes:
        a = await nodes.add("a", api_key=keys, admin_token="admin-secret", cluster_key="a long enough secret")
        head = tuple(("Authorization", f"Bearer {key}") for key in keys)
        prompt = "the prompt that nobody else may read"
        body = chat(messages=[{"role": "user", "content": prompt}])
        assert (await ask(a.port, "POST", CHAT, (*head, ("X-Request-Id", "my-own-id")), body)).status == 200
        assert a.node._routes is not None
        told = a.node._routes.page.hub._source.first().decode()
        state = (await ask(a.port, "GET", "/gossip/state")).body.decode()
        for shown in (told, state):
            assert '"status":200' in shown
            for secret in ("secret", "nobody else", "Bearer"):
                assert secret not in shown
            assert ("my-own-id" in shown) == (not keys)


async def test_a_node_with_an_open_page_stops_at_once() -> None:
    async with cluster() as nodes:
        a = await nodes.add("a", stop_grace_s=60)
        async with connect("127.0.0.1", a.port) as client:
            await client.send("GET", "/page/events")
            await client.head()
            await client.chunk()
            async with asyncio.timeout(PATIENCE_S):
                await a.node.stop()
