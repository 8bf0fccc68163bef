"""KV from the node's side: what the connector reports spreads, routes, is pulled before the engine sees a request."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kvmigrate import split
from kvmigrate.fingerprint import NO_FINGERPRINT
from kvmigrate.link import Role
from kvmigrate.link import messages as m
from kvmigrate.planner import MIN_RATE_BYTES
from kvmigrate.pool import BlockPool
from kvmigrate.pull_types import PullResult, Reason
from node.flights import Flights
from node.flows import pulled_from
from node.kv import WARM_STEP_S
from node.prompt import parse_request
from tests.node.fakes import connector as kv
from tests.node.fakes import engine as fake
from tests.node.fakes.client import ask, connect
from tests.node.fakes.connector import FakeConnector
from tests.node.http.bodies import CHAT, chat
from tests.node.http.kv_pair import BLOCKS, LONG, PREFILL_S, TOKENS, Pair, force, published, send, warmed
from tests.waiting import until


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
        assert json.loads(told.body)["promised_chunks"] == json.loads(told.body)["matched_chunks"] != {}
        here = await ask(b.port, "POST", "/route/explain", force("b"), LONG)
        assert json.loads(here.body)["plan"]["source"] is None, "nothing can be pulled yet"
    await b.until(lambda: not b.node.registry.roster.prefixes.promised)
    assert published(b, "a") == 0, "the client went away before its prompt was computed"


async def test_a_block_that_the_pool_hears_of_after_the_request_is_over_is_claimed_too(pair: Pair) -> None:
    """The engine's processes report over links of their own, and the last report may be the one that names a block."""
    a = await pair.add("a")
    await pair.connectors["a"].until(m.Role.WORKER, m.Grant)
    late: list[m.StoredItem] = []

    async def script(exchange: fake.Exchange) -> None:
        pool, connector = a.node.kv.pool, pair.connectors["a"]
        assert pool is not None
        rid = exchange.received.json["kv_transfer_params"]["grapevine"]["rid"]
        hashes = kv.hashes_of(b"a prompt", BLOCKS)
        late.append(connector.write_granted(pool, hashes[0]))
        kv.store(pool, hashes[1:])
        connector.send(m.Started(rid, TOKENS, 0, 0))
        connector.send(m.Filled(rid, hashes, TOKENS))
        connector.send(m.Finished(rid))
        await until(lambda: not list(a.node.kv._flights))
        await fake.answer_chat(exchange)

    a.fake.script = script
    await send(a)
    assert published(a, "a") == 0, "a claim without its first block"
    pair.connectors["a"].send(m.Stored(tuple(late)), m.Role.WORKER)
    await until(lambda: published(a, "a") > 0)


async def test_a_prompt_whose_blocks_cannot_be_given_draws_those_who_share_it_until_the_engine_goes(
    pair: Pair,
) -> None:
    """Pictures and adapters: vLLM's own cache has the prompt, and the pool has nothing of it."""
    a, b = await pair.add("a"), await pair.add("b")
    await pair.nodes.agree()

    async def script(exchange: fake.Exchange) -> None:
        params = exchange.received.json["kv_transfer_params"]
        assert isinstance(params, dict)
        rid, connector = params["grapevine"]["rid"], pair.connectors["a"]
        for message in (
            m.Started(rid, TOKENS, 0, 0),
            m.Prefilled(rid, 1.0),
            m.Filled(rid, (), TOKENS),
            m.Finished(rid),
        ):
            connector.send(message)
        await until(lambda: not list(a.node.kv._flights))
        await fake.answer_chat(exchange)

    a.fake.script = script
    await send(a, *force("a"))
    await b.until(lambda: published(b, "a") > 0)
    told = json.loads((await ask(b.port, "POST", "/route/explain", (), LONG)).body)
    assert (told["plan"]["target"], told["plan"]["source"]) == ("a", None)
    assert told["promised_chunks"] == told["matched_chunks"] != {}
    here = await ask(b.port, "POST", "/route/explain", force("b"), LONG)
    assert json.loads(here.body)["plan"]["source"] is None
    a.supervisor.down()
    await b.until(lambda: published(b, "a") == 0)


async def test_a_promise_outlives_the_first_of_those_who_share_it_but_not_the_link(pair: Pair) -> None:
    a, _ = await pair.add("a"), await pair.add("b")  # with two there is always news
    await pair.nodes.agree()
    a.fake.script = fake.gated(fake.Gate(), [fake.sse("one"), fake.DONE])
    body = LONG.replace(b"{", b'{"stream":true,', 1)
    prefixes = a.node.registry.roster.prefixes
    async with connect("127.0.0.1", a.port) as second:
        async with connect("127.0.0.1", a.port) as first:
            await first.send("POST", CHAT, force("a"), body)
            await a.fake.until(lambda: len(a.fake.received) == 1)
            await second.send("POST", CHAT, force("a"), body)
            await a.fake.until(lambda: len(a.fake.received) == 2)
            chunks = prefixes.promised
            assert chunks > 0
        await a.until(lambda: len(a.node.kv._flights) == 1)
        assert prefixes.promised == chunks, "the second one still waits for its prompt to be computed"
        await pair.connectors["a"].close()
        await a.until(lambda: not prefixes.promised)


async def test_a_promise_is_withdrawn_when_its_request_is_forgotten(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _ = await pair.add("a"), await pair.add("b")  # with two there is always news
    await pair.nodes.agree()
    monkeypatch.setattr(a.node.kv, "_flights", Flights(1))
    a.fake.script = fake.gated(fake.Gate(), [fake.sse("one"), fake.DONE])
    prefixes = a.node.registry.roster.prefixes
    async with connect("127.0.0.1", a.port) as first, connect("127.0.0.1", a.port) as second:
        await first.send("POST", CHAT, force("a"), LONG.replace(b"{", b'{"stream":true,', 1))
        await a.fake.until(lambda: len(a.fake.received) == 1)
        before = prefixes.promised
        await second.send(
            "POST", CHAT, force("a"), chat(stream=True, messages=[{"role": "user", "content": "Unlike. " * 100}])
        )
        await a.fake.until(lambda: len(a.fake.received) == 2)
        assert 0 < prefixes.promised < before


async def test_what_the_pool_holds_survives_its_engine(pair: Pair) -> None:
    a = await pair.add("a")
    await send(a)
    size = a.node.registry.describe("a").digest_size
    a.supervisor.down()
    assert a.node.registry.describe("a").digest_size == size > 0


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


async def test_the_vector_tells_how_fast_the_engine_copies_and_every_rank_copies_its_part(pair: Pair) -> None:
    a = await pair.add("a")
    assert a.node.kv.hello is not None and a.node.vector().copy_rate == 0
    a.node.kv.hello = replace(a.node.kv.hello, ranks=2)
    pair.connectors["a"].send(m.Loaded("r", 1, MIN_RATE_BYTES, 0.5), Role.WORKER)
    await until(lambda: a.node.vector().copy_rate == 4 * MIN_RATE_BYTES)
    state = json.loads((await ask(a.port, "GET", "/gossip/state", (), b"")).body)
    assert state["kv"]["copy_bytes_s"] == 4 * MIN_RATE_BYTES


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
    await b.until(lambda: published(b, "a") > 0)
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


async def test_engines_of_which_something_is_unknown_exchange_nothing_and_everybody_is_told_why(pair: Pair) -> None:
    a = await pair.add("a")
    await pair.add("c", b"g" * 16)
    unknown = [await pair.nodes.add(name, kv=True, kv_pool_gib=0.01) for name in ("b", "d")]
    for member in unknown:
        pair.connectors[member.name] = connector = FakeConnector(member.node.settings.link_socket)
        await connector.meet(NO_FINGERPRINT, {"hash_seed": "", "block_size": 16})
        await member.until(lambda member=member: member.node.kv.hello is not None)
    await pair.nodes.agree()
    await send(a, *force("a"))
    for member in unknown:
        state = json.loads((await ask(member.port, "GET", "/gossip/state")).body)["kv"]
        assert "fingerprint is incomplete: hash_seed is unknown" in state["why"]
        assert set(state["unlike"]) == {"a", "b", "c", "d"} - {member.name}, "the other one with an unknown field too"
        await member.until(lambda member=member: published(member, "a") > 0)
        told = json.loads((await ask(member.port, "POST", "/route/explain", force(member.name), LONG)).body)
        assert [item["node"] for item in told["unlike"]] == ["a"] and told["plan"]["source"] is None
    state = json.loads((await ask(a.port, "GET", "/gossip/state")).body)["kv"]
    assert set(state["unlike"]) == {"b", "c", "d"}


async def test_nodes_that_encrypt_blocks_are_not_asked_by_those_that_do_not_and_everybody_is_told_why(
    pair: Pair,
) -> None:
    key = {"cluster_key": "a long enough key"}
    a, b = await pair.add("a", settings={"kv_tls": True, **key}), await pair.add("b", settings=key)
    await pair.nodes.agree()
    await send(a, *force("a"))
    await b.until(lambda: published(b, "a") > 0 and not b.node.registry.roster.prefixes.promised)
    chunks = parse_request(CHAT, LONG).chunks
    assert b.node.registry.roster.prefixes.longest(chunks) and b.node.registry.holders("m", chunks) == {}
    told = json.loads((await ask(b.port, "POST", "/route/explain", force("b"), LONG)).body)
    assert told["plan"]["source"] is None
    why = "its KV blocks travel over TLS and those of b in clear"
    assert told["unlike"] == [{"node": "a", "why": why}]
    state = json.loads((await ask(b.port, "GET", "/gossip/state")).body)["kv"]
    assert state["unlike"] == {"a": "they travel over TLS, ours in clear: start both with --kv-tls or neither"}
    assert not (await send(b, *force("b"))).all("x-grapevine-source")
    assert not state["peers"]


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


async def test_a_pull_that_never_had_its_turn_is_told_and_counted_like_any_other(
    pair: Pair, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, "grapevine.kv")
    _, b = await warmed(pair)

    async def late(*args: object, **more: object) -> PullResult:
        return PullResult(0, 0, 1.25, Reason.DEADLINE)

    assert b.node.kv.puller is not None
    monkeypatch.setattr(b.node.kv.puller, "pull", late)
    assert (await send(b, *force("b", "a"))).one("x-grapevine-pulled-blocks") == "0"
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("pull from a ended early: it took too long; 0 blocks, 0.0 MB in 1.250 s")
    assert b.node.kv.peers.snapshot()["a"]["failures"] == {"deadline": 1}


async def test_where_the_source_fails_another_holder_gives_the_blocks(pair: Pair) -> None:
    a, b = await warmed(pair)
    c = await pair.add("c")
    await pair.nodes.agree()
    await send(c, *force("c", "a"))
    other = await pair.add("other", b"g" * 16)  # holds the prompt in blocks that fit nobody here
    await pair.nodes.agree()
    await send(other, *force("other"))
    await b.until(lambda: published(b, "c") == published(a, "a") and published(b, "other") > 0)
    assert a.node.kv.server is not None
    a.node.kv.server.close()
    answer = await send(b, *force("b", "a"))
    assert int(answer.one("x-grapevine-pulled-blocks") or 0) >= BLOCKS - 8
    shown = b.node.kv.peers.snapshot()
    assert shown["a"]["failures"] == {"unreachable": 1} and shown["c"]["failures"] == {}
    assert list(shown) == ["c", "a"] and shown["c"]["ways"]
    assert b.node.kv.rates.peer("c").samples == 1


async def test_two_holders_give_together_and_everybody_is_told_who_gave_what(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split, "MIN_RUN_BYTES", kv.BLOCK_BYTES)
    a, b = await warmed(pair)
    c = await pair.add("c")
    await pair.nodes.agree()
    await send(c, *force("c", "a"))
    await b.until(lambda: published(b, "c") == published(a, "a") and not b.node.registry.roster.prefixes.promised)
    for member in (a, c):
        b.node.kv.rates.pulled(member.name, 2 << 20, 4.0, 0.0)  # half a MB a second: a second source pays
        pool = member.node.kv.pool
        assert pool is not None
        monkeypatch.setattr(pool, "leased", partial(_slowly, pool.leased))
        monkeypatch.setattr(pool, "lease", partial(_slowly, pool.lease))
    await b.until(lambda: "a" in b.node.vector().rates)
    told = json.loads((await ask(b.port, "POST", "/route/explain", force("b", "a"), LONG)).body)
    assert told["plan"]["source"] == "a" and [item["node"] for item in told["plan"]["sources"]] == ["a", "c"]
    assert {item["node"]: item["helpers"] for item in told["candidates"]}["b"] == ["c"]
    answer = await send(a, *force("b", "a"))
    given = pulled_from(answer.one("x-grapevine-pulled-from") or "")
    assert given.keys() == {"a", "c"} and min(given.values()) > BLOCKS // 8
    assert sum(given.values()) == int(answer.one("x-grapevine-pulled-blocks") or 0) >= BLOCKS - 8
    peers = b.node.kv.peers.snapshot()
    assert {name: peers[name]["blocks"] for name in peers} == given
    (decision,) = json.loads((await ask(a.port, "GET", "/route/recent?limit=1", (), b"")).body)["decisions"]
    assert decision["pulled_from"] == given
    for member in (a, b):  # the entry, and the target
        assert {(source, target): n for source, target, n in member.node.flows.pulls() if target == "b"} == {
            (name, "b"): blocks for name, blocks in given.items()
        }
    state = json.loads((await ask(b.port, "GET", "/gossip/state")).body)["kv"]["pulls"]
    assert state["shared"] == 1


def _slowly(call: Callable[..., object], *args: object, **more: object) -> object:
    time.sleep(0.002)
    return call(*args, **more)


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
    await a.until(lambda: published(a, "b") == published(a, "a"))
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
    await b.until(lambda: published(b, "a") == 0)
    assert published(a, "a") == 0


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
