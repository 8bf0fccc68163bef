"""A node that is drained leaves to its peers what it alone holds: all is real but the engines."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from click.testing import CliRunner

from kvmigrate.pool_types import Room
from kvmigrate.pull_types import Reason
from node.cli import main
from node.kv_offer import STEP_S, TAKE_PATH, Offer, Taken
from node.metrics import REMOTE_ERRORS
from node.peers import PEER_PREFIX, PLAN_HEADER
from node.plan import Plan
from tests.node.fakes import connector as kv
from tests.node.fakes import engine as fake
from tests.node.fakes.client import ask
from tests.node.fakes.cluster import Member
from tests.node.http.bodies import chat
from tests.node.http.kv_pair import ADMIN_TOKEN, BLOCKS, LONG, Pair, force, published, send, warmed
from tests.waiting import PATIENCE_S

TOKEN = [("authorization", f"Bearer {ADMIN_TOKEN}")]
LEAVES = {"stop_grace_s": 20}


async def alone(pair: Pair, *, times: int = 1) -> tuple[Member, Member, Member]:
    """Three nodes; only the first has served the long prompt, and all have heard of that."""
    a, b, c = [await pair.add(name, settings=LEAVES) for name in "abc"]
    await pair.nodes.agree()
    for _ in range(times):
        await send(a, *force("a"))
    for other in (b, c):
        await other.until(lambda other=other: published(other, "a") == published(a, "a") > 0)  # type: ignore[misc]
        await other.until(lambda other=other: not other.node.registry.roster.prefixes.promised)  # type: ignore[misc]
    return a, b, c


async def drained(member: Member, timeout_s: float = 20) -> dict[str, object]:
    """Drain it and wait for the end; what came of its KV."""
    began = await ask(member.port, "POST", "/admin/drain", TOKEN, json.dumps({"timeout_s": timeout_s}).encode())
    assert began.status == 202
    async with asyncio.timeout(PATIENCE_S):
        await member.node.drainer.over()
    told = json.loads((await ask(member.port, "GET", "/admin/drain", TOKEN)).body)
    assert told["phase"] == "drained" and not told["copying"]
    found: dict[str, object] = told["kv"]
    return found


def blocks_of(told: dict[str, object]) -> dict[str, int]:
    copied = told["copied"]
    assert isinstance(copied, dict)
    return {name: one["blocks"] for name, one in copied.items()}


def at_rest(*members: Member) -> None:
    for member in members:
        assert member.node.kv.pool is not None
        assert member.node.kv.pool.stats().leases == 0
        assert not [writer for writer in member.node.kv.pool._table._by_writer if writer.startswith("pull")]


async def test_what_only_it_held_is_at_a_peer_afterwards_and_requests_for_it_go_there(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "grapevine.kv")
    a, b, c = await alone(pair)
    told = await drained(a)
    ((heir, copied),) = blocks_of(told).items()
    assert BLOCKS - 8 <= copied <= BLOCKS and (told["left"], told["refused"]) == ({}, {})
    holder = {"b": b, "c": c}[heir]
    assert a.node.metrics.rescued._value.get() == holder.node.metrics.taken._value.get() == copied
    assert a.node.registry.describe(heir).digest_size == published(a, "a"), "it waited until that was announced"
    holder.node.kv.digest._digest.validate()
    (line,) = [record.message for record in caplog.records if "only this node held" in record.message]
    assert f"{copied} (" in line and f"to {heir}" in line
    for entry in (a, b, c):
        await entry.until(lambda entry=entry: published(entry, heir) == published(a, "a"))  # type: ignore[misc]
    found = holder.node.metrics.actual._value.get()
    answer = await send(a, ("x-grapevine-no-pull", "1"))
    assert answer.one("x-grapevine-target") == heir
    assert holder.node.metrics.actual._value.get() == found + copied * kv.BLOCK_TOKENS
    shown = json.loads((await ask(a.port, "GET", "/gossip/state")).body)["drain"]
    assert blocks_of(shown["kv"]) == {heir: copied}
    at_rest(a, b, c)


async def test_a_node_that_leaves_does_it_too(pair: Pair) -> None:
    a, b, c = await alone(pair)
    async with asyncio.timeout(PATIENCE_S):
        await a.node.stop()
    ((holder, copied),) = [
        (member, int(taken)) for member in (b, c) if (taken := member.node.metrics.taken._value.get())
    ]
    await b.until(lambda: b.sees(["b", "c"]))
    answer = await send(b, ("x-grapevine-no-pull", "1"))
    assert answer.one("x-grapevine-target") == holder.name
    assert holder.node.metrics.actual._value.get() == copied * kv.BLOCK_TOKENS
    at_rest(b, c)


async def test_what_another_holds_is_not_copied(pair: Pair) -> None:
    a, b, _ = await alone(pair)
    await send(b, *force("b", "a"))
    await a.until(lambda: published(a, "b") == published(a, "a") and not a.node.registry.roster.prefixes.promised)
    told = await drained(a)
    assert (told["copied"], told["left"]) == ({}, {})


async def test_what_only_a_node_that_is_drained_too_holds_is_copied(pair: Pair) -> None:
    a, b, _ = await alone(pair)
    await send(b, *force("b", "a"))
    await a.until(lambda: published(a, "b") == published(a, "a") and not a.node.registry.roster.prefixes.promised)
    b.node.admission.drain(True)
    await a.until(lambda: a.sees(["a", "c"]))
    assert set(blocks_of(await drained(a))) == {"c"}


async def test_a_second_drain_copies_only_what_is_new(pair: Pair) -> None:
    a, _, _ = await alone(pair)
    first = await drained(a)
    assert sum(blocks_of(first).values()) > 0
    assert await drained(a) == first | {"seconds": pytest.approx(first["seconds"], abs=PATIENCE_S)}
    assert (await ask(a.port, "POST", "/admin/undrain", TOKEN)).status == 200
    await a.until(lambda: a.sees(["a", "b", "c"]))
    other = chat(messages=[{"role": "user", "content": "Every unhappy family is unhappy in its own way. " * 120}])
    await send(a, *force("a"), body=other)
    again = await drained(a)
    assert 0 < sum(blocks_of(again).values()) <= BLOCKS


async def test_pools_without_room_say_no_and_the_drain_says_why(pair: Pair) -> None:
    a, b, c = await alone(pair)
    for member in (b, c):
        pool = member.node.kv.pool
        assert pool is not None
        kv.store(pool, kv.hashes_of(member.name.encode(), pool.stats().free))
    told = await drained(a)
    assert told["copied"] == {} and list(told["left"]) == ["no peer has room for them"]  # type: ignore[call-overload]
    at_rest(a, b, c)


async def test_a_prefix_that_somebody_came_back_for_takes_the_place_of_what_nobody_did(pair: Pair) -> None:
    a, b, c = await alone(pair, times=2)
    for member in (b, c):
        pool = member.node.kv.pool
        assert pool is not None
        kv.store(pool, kv.hashes_of(member.name.encode(), pool.stats().free))
    told = await drained(a)
    assert sum(blocks_of(told).values()) >= BLOCKS - 8 and told["left"] == {}


async def test_where_nobody_can_use_the_blocks_the_drain_says_so(pair: Pair) -> None:
    a = await pair.add("a", settings=LEAVES)
    await pair.add("other", b"g" * 16)
    await pair.nodes.agree()
    await send(a, *force("a"))
    told = await drained(a)
    assert told["copied"] == {} and list(told["left"]) == ["no peer can take them"]  # type: ignore[call-overload]
    assert told["refused"] == {}, "and asks nobody for nothing"


async def test_a_peer_that_fails_is_told_and_another_one_takes_it(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = await alone(pair)
    asked = []

    async def broken(source: str, offer: Offer) -> Taken:
        asked.append(source)
        raise OSError("no such disk")

    monkeypatch.setattr(b.node.kv, "take", broken)
    told = await drained(a)
    assert asked == ["a"] and set(blocks_of(told)) == {"c"}
    assert told["refused"] == {"b": "it answers with status 500"}
    at_rest(a, b, c)


async def test_a_peer_that_hangs_costs_the_copies_their_time_and_the_drain_no_more(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c = await alone(pair)
    hung, take = asyncio.Event(), c.node.kv.take

    async def hangs(source: str, offer: Offer) -> Taken:
        if not offer.chains:
            return await take(source, offer)
        hung.set()
        await asyncio.Event().wait()
        raise AssertionError

    for member in (b, c):
        monkeypatch.setattr(member.node.kv, "take", hangs)
    told = await drained(a, timeout_s=2)
    assert hung.is_set() and told["copied"] == {}
    assert list(told["left"]) == ["there is not enough time"] or told["refused"]  # type: ignore[call-overload]
    at_rest(a, b, c)


async def test_a_stop_in_a_hurry_waits_for_no_copy(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = await alone(pair)
    begun = asyncio.Event()

    async def hangs(source: str, offer: Offer) -> Taken:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    for member in (b, c):
        monkeypatch.setattr(member.node.kv, "take", hangs)
    stopping = asyncio.create_task(a.node.stop())
    async with asyncio.timeout(PATIENCE_S):
        await begun.wait()
        assert not stopping.done()
        a.node.hurry()
        await stopping
    assert not [task for task in asyncio.all_tasks() if task.get_name() in {"grapevine-drain", "grapevine-copies"}]
    at_rest(b, c)


async def test_who_takes_work_again_copies_no_more(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = await alone(pair)
    begun = asyncio.Event()

    async def hangs(source: str, offer: Offer) -> Taken:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    for member in (b, c):
        monkeypatch.setattr(member.node.kv, "take", hangs)
    assert (await ask(a.port, "POST", "/admin/drain", TOKEN)).status == 202
    async with asyncio.timeout(PATIENCE_S):
        await begun.wait()
    undrained = json.loads((await ask(a.port, "POST", "/admin/undrain", TOKEN)).body)
    assert (undrained["phase"], undrained["copying"]) == ("serving", False)
    assert not [task for task in asyncio.all_tasks() if task.get_name() in {"grapevine-drain", "grapevine-copies"}]


async def test_copies_wait_for_no_request_and_what_those_computed_is_copied_at_the_end(pair: Pair) -> None:
    a, _, _ = await alone(pair)
    gate, answers = fake.Gate(), a.fake.script
    other = chat(messages=[{"role": "user", "content": "Every unhappy family is unhappy in its own way. " * 120}])

    async def late(exchange: fake.Exchange) -> None:
        await gate.passed()
        await answers(exchange)

    a.fake.script = late
    running = asyncio.create_task(send(a, *force("a"), body=other))
    await a.fake.until(lambda: a.fake.active == 1)
    assert (await ask(a.port, "POST", "/admin/drain", TOKEN, b'{"timeout_s": 40}')).status == 202
    await a.until(lambda: a.node.metrics.rescued._value.get() > 0)
    told = json.loads((await ask(a.port, "GET", "/admin/drain", TOKEN)).body)
    assert (told["phase"], told["running"]) == ("draining", 1)
    before = a.node.metrics.rescued._value.get()
    gate.open()
    async with asyncio.timeout(PATIENCE_S):
        await a.node.drainer.over()
    assert (await running).one("x-grapevine-target") == "a"
    assert a.node.metrics.rescued._value.get() >= before + BLOCKS - 8


async def test_the_command_says_how_much_went_to_whom_and_what_was_left(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c = await alone(pair)
    words = ["drain", "a", "--node", b.url, "--admin-token", ADMIN_TOKEN]
    done = await asyncio.to_thread(CliRunner().invoke, main, words)
    ((heir, copied),) = blocks_of(a.node.rescue.status()).items()
    lines = done.stdout.splitlines()
    assert done.exit_code == 0 and lines[0].startswith("a is drained after")
    assert lines[1:] == [
        f"{copied} KV blocks ({copied * kv.BLOCK_BYTES / 1e6:.1f} MB) that nobody else held are at {heir} now"
    ]
    assert (await ask(a.port, "POST", "/admin/undrain", TOKEN)).status == 200

    async def full(source: str, offer: Offer) -> Taken:
        return Taken(Reason.FULL if offer.chains else Reason.NOTHING, room=Room(99, 0))

    for member in (b, c):
        monkeypatch.setattr(member.node.kv, "take", full)
    await a.until(lambda: a.sees(["a", "b", "c"]))
    await send(a, *force("a"), body=chat(messages=[{"role": "user", "content": "Another family. " * 300}]))
    done = await asyncio.to_thread(CliRunner().invoke, main, words)
    assert "KV blocks that nobody else holds were not copied: no peer can take them" in done.stdout
    assert "b took none more: it has no room" in done.stdout
    told = json.loads((await asyncio.to_thread(CliRunner().invoke, main, [*words, "--json"])).stdout)
    assert told["kv"]["copied"] == {} and set(told["kv"]["refused"]) == {"b", "c"}


def offer_headers(target: str, entry: str = "a") -> list[tuple[str, str]]:
    return [("x-request-id", "r"), (PLAN_HEADER, Plan(rid="r", model="", entry=entry, target=target).header())]


async def test_offers_that_are_no_offers_or_of_nobody_are_refused(pair: Pair) -> None:
    _, b, _ = await alone(pair)
    path = PEER_PREFIX + TAKE_PATH
    nonsense = await ask(b.port, "POST", path, offer_headers("b"), b"nonsense")
    assert nonsense.status == 400 and b.node.metrics.remote_errors.labels("offer")._value.get() == 1
    assert "offer" in REMOTE_ERRORS
    assert (await ask(b.port, "POST", path, offer_headers("c"), Offer().encode())).status == 421
    assert (await ask(b.port, "GET", path)).status == 405
    stranger = await ask(b.port, "POST", path, offer_headers("b", "stranger"), Offer().encode())
    assert stranger.status == 200 and b"knows no live node stranger" in stranger.body
    itself = await ask(b.port, "POST", path, offer_headers("b", "b"), Offer().encode())
    assert b"knows no live node b" in itself.body


async def test_an_offer_that_is_not_signed_is_refused(pair: Pair) -> None:
    b = await pair.add("b", settings={"cluster_key": "a long enough key"})
    answer = await ask(b.port, "POST", PEER_PREFIX + TAKE_PATH, offer_headers("b"), Offer().encode())
    assert answer.status == 403


async def test_a_node_that_is_drained_itself_takes_nothing(pair: Pair) -> None:
    a, b, _ = await alone(pair)
    b.node.admission.drain(True)
    taken = await a.node.rescue._offer("b", Offer(seconds=STEP_S))
    assert (taken.reason, taken.detail) == (Reason.BUSY, "it is drained itself")


async def test_nothing_is_copied_where_that_is_not_wanted(pair: Pair) -> None:
    a, _ = await warmed(pair)
    assert a.node.settings.drain_copy_s == 10
    quiet = await pair.add("quiet", settings={"drain_copy_s": 0, **LEAVES})
    await pair.nodes.agree()
    await send(quiet, *force("quiet"), body=LONG.replace(b"happy", b"sleepy"))
    told = await drained(quiet)
    assert (told["copied"], told["left"], told["seconds"]) == ({}, {}, 0.0)
