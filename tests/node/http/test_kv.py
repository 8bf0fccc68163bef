"""KV from the node's side: what the connector reports spreads, routes, is pulled before the engine sees a request."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import pytest

from kvmigrate.link import messages as m
from kvmigrate.pool import BlockPool
from node.kv import WARM_STEP_S
from tests.node.fakes import connector as kv
from tests.node.fakes import engine as fake
from tests.node.fakes.client import RawAnswer, ask, connect
from tests.node.fakes.cluster import Cluster, Member, cluster
from tests.node.fakes.connector import FakeConnector
from tests.node.http.bodies import CHAT, chat

BLOCKS = 64
TOKENS = BLOCKS * kv.BLOCK_TOKENS
ADMIN_TOKEN = "t"
#: About as fast as a node is taken to be before it has measured anything.
PREFILL_S = 1.0
LONG = chat(messages=[{"role": "user", "content": "All happy families are alike. " * 180}])


class Pair:
    """Two nodes with connectors in their engines; the engines report what a real one would."""

    def __init__(self, nodes: Cluster) -> None:
        self.nodes = nodes
        self.connectors: dict[str, FakeConnector] = {}
        #: An answer waits until its node has read the reports, as any real one is long after them.
        self.patient = False

    async def add(
        self,
        name: str,
        fingerprint: bytes = kv.FINGERPRINT,
        fields: Mapping[str, str | int] | None = None,
        *,
        holds: bool = False,
        settings: Mapping[str, object] | None = None,
    ) -> Member:
        member = await self.nodes.add(name, kv=True, kv_pool_gib=0.01, admin_token=ADMIN_TOKEN, **(settings or {}))
        connector = FakeConnector(member.node.settings.link_socket)
        await connector.connect(fingerprint, fields, holds=holds)
        self.connectors[name] = connector
        member.fake.script = self._script(member)
        await member.until(lambda: member.node.kv.connected and member.node.registry.may_pull("m"))
        return member

    def _script(self, member: Member) -> fake.Script:
        async def script(exchange: fake.Exchange) -> None:
            params = exchange.received.json["kv_transfer_params"]
            assert isinstance(params, dict)
            rid = params["grapevine"]["rid"]
            pool = member.node.kv.pool
            assert pool is not None
            hashes = kv.hashes_of(LONG, BLOCKS)
            here = len(pool.lookup(hashes, use=False))
            connector = self.connectors[member.name]
            connector.send(m.Started(rid, TOKENS, 0, here * kv.BLOCK_TOKENS))
            connector.send(m.Prefilled(rid, PREFILL_S))
            kv.store(pool, hashes[here:])
            connector.send(m.Filled(rid, hashes, TOKENS))
            connector.send(m.Finished(rid))
            if self.patient:
                await member.until(lambda: member.node.kv.cached(rid) is not None)
            await fake.answer_chat(exchange)

        return script


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with cluster() as nodes:
        both = Pair(nodes)
        yield both
        for connector in both.connectors.values():
            await connector.close()


async def test_what_only_a_lost_engine_held_is_withdrawn_with_a_pool_too(pair: Pair) -> None:
    """An engine without our connector: the pool is there, and holds nothing of it."""
    a = await pair.nodes.add("a", kv=True, kv_pool_gib=0.01)
    await ask(a.port, "POST", CHAT, (), LONG)
    assert a.node.registry.describe("a").digest_size > 0
    a.supervisor.down()
    assert a.node.registry.describe("a").digest_size == 0


async def test_without_a_connector_a_prompt_is_claimed_as_soon_as_the_engine_has_it(pair: Pair) -> None:
    a, gate = await pair.nodes.add("a", kv=True, kv_pool_gib=0.01), fake.Gate()
    a.fake.script = fake.gated(gate, [fake.sse("one"), fake.DONE])
    async with connect("127.0.0.1", a.port) as client:
        await client.send("POST", CHAT, (), LONG.replace(b"{", b'{"stream":true,', 1))
        await a.fake.until(lambda: bool(a.fake.received))
        assert a.node.registry.describe("a").digest_size > 0
        gate.open(2)
        await client.head()
        assert (await client.chunk()).startswith(fake.sse("one"))


async def test_a_prompt_that_the_engine_has_not_computed_draws_those_who_share_it_and_nobody_pulls_it(
    pair: Pair,
) -> None:
    a, b = await pair.add("a"), await pair.add("b")
    await pair.nodes.agree()
    gate, answers = fake.Gate(), a.fake.script
    a.fake.script = fake.gated(gate, [fake.sse("one"), fake.DONE])
    async with connect("127.0.0.1", a.port) as client:
        await client.send("POST", CHAT, force("a"), LONG.replace(b"{", b'{"stream":true,', 1))
        await a.fake.until(lambda: bool(a.fake.received))
        await b.until(lambda: bool(b.node.registry.roster.prefixes.promised))
        a.fake.script = answers
        told = await ask(b.port, "POST", "/route/explain", (), LONG)
        plan = json.loads(told.body)["plan"]
        assert (plan["target"], plan["source"]) == ("a", None)
        here = await ask(b.port, "POST", "/route/explain", force("b"), LONG)
        assert json.loads(here.body)["plan"]["source"] is None, "nothing can be pulled yet"
    await b.until(lambda: not b.node.registry.roster.prefixes.promised)
    assert _published(b, "a") == 0, "the client went away before its prompt was computed"


async def test_what_the_pool_holds_survives_its_engine(pair: Pair) -> None:
    a = await pair.add("a")
    await send(a)
    size = a.node.registry.describe("a").digest_size
    a.supervisor.down()
    assert a.node.registry.describe("a").digest_size == size > 0


async def send(entry: Member, *headers: tuple[str, str], body: bytes = LONG) -> RawAnswer:
    answer = await ask(entry.port, "POST", CHAT, headers, body)
    assert answer.status == 200, answer.body
    return answer


def force(target: str, source: str | None = None) -> list[tuple[str, str]]:
    headers = [("x-grapevine-force-target", target)]
    return (
        headers
        if source is None
        else [*headers, ("x-grapevine-force-source", source), ("x-grapevine-admin-token", ADMIN_TOKEN)]
    )


async def warmed(pair: Pair, *, holds: bool = False) -> tuple[Member, Member]:
    """Two nodes; the first has served the long prompt and the second has heard of it."""
    a, b = await pair.add("a"), await pair.add("b", holds=holds)
    await pair.nodes.agree()
    await send(a, *force("a"))
    await b.until(lambda: b.node.registry.describe("a").digest_size > 0)
    await b.until(lambda: _published(b, "a") == _published(a, "a"))
    await b.until(lambda: not b.node.registry.roster.prefixes.promised)
    return a, b


def _published(member: Member, name: str) -> int:
    return member.node.registry.describe(name).digest_size


async def test_the_engine_learns_an_id_of_ours_and_the_rest_of_the_body_is_untouched(pair: Pair) -> None:
    a = await pair.add("a")
    await send(a, body=chat(kv_transfer_params={"evil": 1}, temperature=0.25))
    received = a.fake.received[-1].json
    params = received.pop("kv_transfer_params")
    assert isinstance(params, dict) and list(params) == ["grapevine"] and list(params["grapevine"]) == ["rid"]
    assert received == json.loads(chat(temperature=0.25))


async def test_ids_are_unique_even_when_a_client_repeats_its_own(pair: Pair) -> None:
    a = await pair.add("a")
    for _ in range(2):
        await send(a, ("X-Request-Id", "same"))
    rids = [json.dumps(received.json["kv_transfer_params"]) for received in a.fake.received]
    assert len(set(rids)) == 2 and all("same" in rid for rid in rids)


async def test_an_engine_without_connector_gets_no_parameters(pair: Pair) -> None:
    plain = await pair.nodes.add("plain")
    await send(plain)
    assert plain.fake.received[-1].body == LONG


async def test_a_shared_prefix_goes_to_its_holder_from_any_entry(pair: Pair) -> None:
    a, b = await warmed(pair)
    for entry in (a, b):
        answer = await send(entry)
        assert answer.one("x-grapevine-target") == "a", (await ask(entry.port, "GET", "/route/recent", (), b"")).body


async def test_forced_onto_another_node_the_blocks_are_pulled_before_the_engine_sees_it(pair: Pair) -> None:
    a, b = await warmed(pair)
    answer = await send(a, *force("b", "a"))
    assert answer.one("x-grapevine-target") == "b" and answer.one("x-grapevine-source") == "a"
    pulled = int(answer.one("x-grapevine-pulled-blocks") or 0)
    assert pulled >= BLOCKS - 8
    metrics = b.node.metrics
    assert metrics.pulled_blocks._value.get() == pulled
    assert metrics.actual._value.get() == pulled * kv.BLOCK_TOKENS  # the engine found them: they came first
    assert b.node.vector().rates.get("a", 0) >= 0


async def test_requests_that_share_a_pull_count_it_once(pair: Pair) -> None:
    _, b = await warmed(pair)
    answers = await asyncio.gather(*(send(b, *force("b", "a")) for _ in range(3)))
    pulled = {int(answer.one("x-grapevine-pulled-blocks") or 0) for answer in answers}
    assert b.node.kv.puller is not None and b.node.kv.puller.stats().joined == 2
    assert pulled == {int(b.node.metrics.pulled_blocks._value.get())} and max(pulled) > 0
    assert b.node.kv.rates.peer("a").samples == 1


async def test_without_a_pull_everything_is_computed_again(pair: Pair) -> None:
    a, b = await warmed(pair)
    answer = await send(a, *force("b"), ("x-grapevine-no-pull", "1"))
    assert answer.one("x-grapevine-target") == "b" and not answer.all("x-grapevine-source")
    assert b.node.metrics.actual._value.get() == 0


async def test_blocks_of_another_fingerprint_are_not_taken_and_everybody_is_told_why(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "grapevine.kv")
    a, b = await pair.add("a", fields={"block_size": 16}), await pair.add("b", b"g" * 16, {"block_size": 32})
    await pair.nodes.agree()
    await send(a, *force("a"))
    await b.until(lambda: _published(b, "a") > 0)
    answer = await send(b, *force("b", "a"))
    assert answer.one("x-grapevine-pulled-blocks") == "0"
    assert b.node.metrics.pulls.labels("mismatch")._value.get() == 1
    why = "block_size is 16 there and 32 here"
    state = json.loads((await ask(b.port, "GET", "/gossip/state")).body)["kv"]
    assert state["unlike"] == {"a": why} and state["peers"]["a"]["failures"] == {"mismatch": 1}
    assert state["fingerprint"] == {"block_size": 32}
    (line,) = [record.message for record in caplog.records if "ended early" in record.message]
    assert "pull from a ended early" in line and why in line
    told = json.loads((await ask(b.port, "POST", "/route/explain", force("b"), LONG)).body)
    assert [item["node"] for item in told["unlike"]] == ["a"]
    assert (
        json.loads((await ask(a.port, "GET", "/gossip/state")).body)["kv"]["unlike"]["b"] == "another fingerprint of m"
    )


async def test_a_source_that_is_gone_costs_only_speed_and_one_line_of_the_log(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "grapevine.kv")
    a, b = await warmed(pair)
    assert a.node.kv.server is not None
    a.node.kv.server.close()
    answer = await send(b, *force("b", "a"))
    assert answer.status == 200 and answer.one("x-grapevine-pulled-blocks") == "0"
    (line,) = [record.message for record in caplog.records]
    assert "pull from a ended early: it cannot be reached" in line
    assert b.node.metrics.pulls.labels("unreachable")._value.get() == 1


async def test_where_the_source_fails_another_holder_gives_the_blocks(pair: Pair) -> None:
    a, b = await warmed(pair)
    c = await pair.add("c")
    await pair.nodes.agree()
    await send(c, *force("c", "a"))
    other = await pair.add("other", b"g" * 16)  # holds the prompt in blocks that fit nobody here
    await pair.nodes.agree()
    await send(other, *force("other"))
    await b.until(lambda: _published(b, "c") == _published(a, "a") and _published(b, "other") > 0)
    assert a.node.kv.server is not None
    a.node.kv.server.close()
    answer = await send(b, *force("b", "a"))
    assert int(answer.one("x-grapevine-pulled-blocks") or 0) >= BLOCKS - 8
    shown = b.node.kv.peers.snapshot()
    assert shown["a"]["failures"] == {"unreachable": 1} and shown["c"]["failures"] == {}
    assert list(shown) == ["c", "a"] and shown["c"]["ways"]
    assert b.node.kv.rates.peer("c").samples == 1


async def test_a_node_is_warmed_with_what_another_uses_most_and_says_so_to_the_cluster(pair: Pair) -> None:
    a, b = await warmed(pair)
    await send(a, *force("a"))
    token = [("authorization", "Bearer t")]
    body = json.dumps({"from": "a"}).encode()
    steps = [json.loads((await ask(b.port, "POST", "/admin/kv/warm", token, body)).body) for _ in range(2)]
    assert [(step["whole"], step["reason"]) for step in steps] == [(True, "complete")] * 2
    copied = steps[0]["blocks"]  # up to the prompt's last whole chunk
    assert BLOCKS - 8 <= copied <= BLOCKS and steps[1]["blocks"] == 0  # the second time everything is here
    assert b.node.metrics.warmed._value.get() == copied
    await a.until(lambda: _published(a, "b") == _published(a, "a"))
    b.node.kv.digest._digest.validate()
    answer = await send(b, *force("b"), ("x-grapevine-no-pull", "1"))
    assert answer.one("x-grapevine-target") == "b"
    assert b.node.metrics.actual._value.get() == copied * kv.BLOCK_TOKENS  # they were in the pool
    top = json.loads((await ask(a.port, "GET", "/gossip/state")).body)["kv"]["top"]
    assert top and top[0]["uses"] >= 2 and top[0]["blocks"] == copied


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{}", 400),
        (b"[]", 400),
        (b"nonsense", 400),
        (b'{"from": "a", "max_bytes": 0}', 400),
        (b'{"from": "a", "max_bytes": true}', 400),
        (b'{"from": "nobody"}', 409),
        (b'{"from": "a"}', 409),
    ],
)
async def test_warming_that_cannot_be_is_refused_with_a_reason(pair: Pair, body: bytes, status: int) -> None:
    a = await pair.add("a")
    answer = await ask(a.port, "POST", "/admin/kv/warm", [("authorization", "Bearer t")], body)
    assert answer.status == status and json.loads(answer.body)["error"]["message"]
    assert (await ask(a.port, "POST", "/admin/kv/warm", (), body)).status == 401


async def test_warming_from_a_node_that_is_gone_ends_in_time_with_its_reason(pair: Pair) -> None:
    a, b = await warmed(pair)
    assert a.node.kv.server is not None
    a.node.kv.server.close()
    async with asyncio.timeout(WARM_STEP_S + 2):
        body = b'{"from": "a"}'
        step = json.loads((await ask(b.port, "POST", "/admin/kv/warm", [("authorization", "Bearer t")], body)).body)
    assert (step["whole"], step["reason"], step["blocks"]) == (False, "unreachable", 0)


async def test_the_pool_of_a_node_that_was_killed_is_removed_by_the_next_that_starts(pair: Pair) -> None:
    path = (await pair.add("a")).node.settings.pool_path
    killed = BlockPool(path.with_name(f"{path.stem}-killed{path.suffix}"), 1 << 20)
    assert killed.path.exists()
    killed._file.bytes.release()
    killed._file._map.close()
    os.close(killed._file._fd)  # the kernel does that, and gives the lock back, however a process ends
    await pair.add("b")
    assert not killed.path.exists() and path.exists()


async def test_what_the_pool_drops_is_withdrawn_everywhere(pair: Pair) -> None:
    a, b = await warmed(pair)
    assert a.node.kv.pool is not None
    a.node.kv.pool.clear()
    await b.until(lambda: _published(b, "a") == 0)
    assert _published(a, "a") == 0


async def test_the_entry_logs_what_the_targets_engine_found(pair: Pair) -> None:
    _, b = await warmed(pair)
    pair.patient = True
    answers = [await send(b, *force("a")) for _ in range(8)]
    told = [answer.one("x-grapevine-cached-tokens") for answer in answers]
    assert told == [str(TOKENS)] * 8
    log = json.loads((await ask(b.port, "GET", "/route/recent?limit=8", (), b"")).body)["decisions"]
    assert all(entry["cached_tokens"] == TOKENS for entry in log)
    assert all(entry["target"] == "a" and entry["predicted_cached_tokens"] > 0 for entry in log)


async def test_predicted_is_compared_with_actual(pair: Pair) -> None:
    a, _ = await warmed(pair)
    await send(a, *force("a"))
    predicted, actual = a.node.metrics.predicted._value.get(), a.node.metrics.actual._value.get()
    assert predicted > 0 and actual == TOKENS
    load = a.node.vector()
    assert load.prefill_tps == pytest.approx(TOKENS / PREFILL_S, rel=0.01)


async def test_a_connector_that_goes_away_is_noticed(pair: Pair) -> None:
    a = await pair.add("a")
    await pair.connectors["a"].close()
    await a.until(lambda: not a.node.kv.connected and not a.node.registry.may_pull("m"))
    a.fake.script = fake.answer_chat
    await send(a)
    assert "kv_transfer_params" not in a.fake.received[-1].json


async def test_a_request_that_the_engine_refused_is_not_waited_for(pair: Pair) -> None:
    a = await pair.add("a")
    a.fake.script = fake.reply(fake.Reply(400))
    assert (await ask(a.port, "POST", CHAT, (), LONG)).status == 400
    assert len(a.node.kv._flights) == 0
    assert a.node.meter.counts.failed == 1 and a.node.meter.counts.finished == 0


# --- a pull beside the wait in the engine's queue


class Held:
    """An engine that does with its requests what vLLM does: one whose blocks are being pulled waits, others do not."""

    def __init__(self, pair: Pair, member: Member) -> None:
        self._compute = member.fake.script
        self._connector = pair.connectors[member.name]
        self.arrived: list[float] = []
        self.computed: list[float] = []
        self._moved = asyncio.Condition()

    async def script(self, exchange: fake.Exchange) -> None:
        params = exchange.received.json["kv_transfer_params"]
        assert isinstance(params, dict)
        rid, hold_s = params["grapevine"]["rid"], params["grapevine"].get("hold_s", 0.0)
        await self._note(self.arrived, hold_s)
        if hold_s:
            await self._connector.until_got(lambda role, got: got == m.Pulled(rid))
        await self._note(self.computed, hold_s)
        await self._compute(exchange)

    async def until(self, what: Callable[[], bool]) -> None:
        async with self._moved, asyncio.timeout(60):
            await self._moved.wait_for(what)

    async def _note(self, where: list[float], hold_s: float) -> None:
        async with self._moved:
            where.append(hold_s)
            self._moved.notify_all()


async def holding(pair: Pair) -> tuple[Member, Member]:
    """As `warmed`; the engine of the second one computes something else, so that it is given requests to hold."""
    a, b = await warmed(pair, holds=True)
    b.node.meter.dispatched("somebody else's", 0.0, 1)
    return a, b


def slow_source(member: Member, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A source that answers nobody until it is let."""
    go_on = threading.Event()
    resolve = member.node.kv.digest.resolve

    def wait(chunks: Sequence[int]) -> tuple[bytes, ...]:
        go_on.wait(10)
        return resolve(chunks)

    assert member.node.kv.server is not None
    monkeypatch.setattr(member.node.kv.server, "_resolve", wait)
    return go_on


async def test_a_request_waits_in_the_engines_queue_while_its_blocks_are_pulled_and_nobody_waits_for_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await holding(pair)
    go_on, engine = slow_source(a, monkeypatch), Held(pair, b)
    b.fake.script = engine.script
    pulling = asyncio.create_task(send(b, *force("b", "a")))
    await engine.until(lambda: len(engine.arrived) == 1)
    assert engine.arrived[0] > 0, "the engine was asked to hold it"
    other = await send(b, *force("b"), ("x-grapevine-no-pull", "1"))
    assert other.status == 200 and engine.computed == [0.0] and not pulling.done()
    go_on.set()
    answer = await pulling
    assert int(answer.one("x-grapevine-pulled-blocks") or 0) >= 0 and answer.one("x-grapevine-source") == "a"
    assert len(engine.computed) == 2
    b.node.admission.validate()


async def test_an_idle_engine_is_asked_when_the_blocks_are_here(pair: Pair) -> None:
    _, b = await warmed(pair, holds=True)
    engine = Held(pair, b)
    b.fake.script = engine.script
    answer = await send(b, *force("b", "a"))
    assert int(answer.one("x-grapevine-pulled-blocks") or 0) >= BLOCKS - 8
    assert engine.arrived == [0.0], "the engine was asked to hold it"


async def test_the_engine_hears_of_the_blocks_before_it_hears_that_the_pull_is_over(pair: Pair) -> None:
    _, b = await holding(pair)
    b.fake.script = Held(pair, b).script
    answer = await send(b, *force("b", "a"))
    pulled = int(answer.one("x-grapevine-pulled-blocks") or 0)
    assert pulled >= BLOCKS - 8
    assert b.node.metrics.actual._value.get() == pulled * kv.BLOCK_TOKENS
    got = [message for role, message in pair.connectors["b"].got if role is m.Role.SCHEDULER]
    over = next(place for place, message in enumerate(got) if isinstance(message, m.Pulled))
    assert sum(len(message.items) for message in got[:over] if isinstance(message, m.Add)) == pulled


async def test_a_held_request_is_let_go_when_its_source_is_gone(pair: Pair) -> None:
    a, b = await holding(pair)
    assert a.node.kv.server is not None
    a.node.kv.server.close()
    b.fake.script = Held(pair, b).script
    answer = await send(b, *force("b", "a"))
    assert (answer.status, answer.one("x-grapevine-pulled-blocks")) == (200, "0")


async def test_an_engine_that_refuses_a_request_is_not_waited_for(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = await holding(pair)
    go_on = slow_source(a, monkeypatch)
    b.fake.script = fake.reply(fake.Reply(400))
    answer = await ask(b.port, "POST", CHAT, force("b", "a"), LONG)
    assert (answer.status, answer.one("x-grapevine-pulled-blocks")) == (400, "0")
    await pair.connectors["b"].until(m.Role.SCHEDULER, m.Pulled)
    go_on.set()


async def test_a_pull_that_fails_by_a_bug_of_ours_costs_the_request_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, b = await holding(pair)

    async def broken(*args: object) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr(b.node.kv._pulls, "pull", broken)
    b.fake.script = Held(pair, b).script
    answer = await send(b, *force("b", "a"))
    assert answer.one("x-grapevine-pulled-blocks") == "0"
    assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == ["a pull failed"]


async def test_a_client_that_leaves_while_its_request_is_held_ends_the_hold_and_gives_its_place_back(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await holding(pair)
    go_on, engine = slow_source(a, monkeypatch), Held(pair, b)
    b.fake.script = engine.script
    async with connect("127.0.0.1", b.port) as client:
        await client.send("POST", CHAT, force("b", "a"), LONG)
        await engine.until(lambda: len(engine.arrived) == 1)
    await pair.connectors["b"].until(m.Role.SCHEDULER, m.Pulled)
    await b.until(lambda: b.node.admission.active == 0)
    go_on.set()


async def test_what_the_pool_held_is_there_after_a_planned_restart(
    pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "grapevine.kv")
    spill = {"kv_spill_dir": str(tmp_path)}
    a = await pair.add("a", settings=spill)
    await send(a, *force("a"))
    await pair.connectors["a"].close()
    await a.node.stop()
    (file,) = await asyncio.to_thread(lambda: list(tmp_path.iterdir()))
    b = await pair.add("a2", settings=spill)
    assert b.node.kv.pool is not None and not b.node.kv.pool.blocks(), "a node reads back only its own file"
    file.rename(tmp_path / "back.kvspill")
    back = await pair.add("back", settings=spill)
    await back.node.kv.spill.read_back()
    assert back.node.metrics.restored._value.get() == BLOCKS
    await send(back, *force("back"), ("x-grapevine-no-pull", "1"))
    assert back.node.metrics.actual._value.get() == TOKENS
    assert any("kept 64 KV blocks" in record.message for record in caplog.records)
    assert any("read back 64 KV blocks" in record.message for record in caplog.records)
