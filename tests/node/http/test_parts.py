"""The small parts, each alone: headers, admission, circuits, publisher, meta, registry, signatures, deadlines."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip import (
    MemberChanged,
    MemberState,
    MemberView,
    RowReceived,
    RowView,
    SlowChanged,
    SlowReset,
)
from node.admission import Admission, Place
from node.circuits import CONFIRMED, OPEN_FIRST_S
from node.digest import Changes
from node.errors import RemoteError
from node.load import LoadVector
from node.meta import NodeMeta, decode_meta
from node.metrics import Metrics
from node.models import ModelInfo
from node.plan import Plan
from node.policy import CandidateCost
from node.prefill import PrefillTime
from node.prompt import ParsedRequest
from node.publisher import CHUNKS_PER_TICK, Publisher
from node.registry import FRESH_S, HELD, PROMISED, Registry, chunk_key
from node.relay.deadlines import Deadlines
from node.relay.downs import Downs
from node.relay.forward import read_load, write_load
from node.relay.headers import HOP_BY_HOP, for_downstream, for_upstream, valid_request_id
from node.room import WaitingRoom
from node.view import NodeState
from node.wire import pack

# --- headers

_NAME = st.one_of(
    st.sampled_from(["Connection", "TE", "Upgrade", "X-Grapevine-Plan", "Host", "Set-Cookie", "Keep-Alive"]),
    st.text("abcXYZ-", min_size=1, max_size=8),
)
_HEADERS = st.lists(st.tuples(_NAME, st.text("abc, -XYZ", max_size=12)), max_size=12)


@given(_HEADERS)
def test_no_hop_by_hop_or_internal_header_goes_on_and_all_else_keeps_its_order(headers: list[tuple[str, str]]) -> None:
    listed = {t.strip().lower() for n, v in headers if n.lower() == "connection" for t in v.split(",")}
    for keep, remade in (
        (for_upstream, {"host", "content-length", "expect", "x-request-id"}),
        (for_downstream, {"x-request-id"}),
    ):
        kept = keep(headers)
        wanted = [
            (name.lower(), value)
            for name, value in headers
            if name.lower() not in HOP_BY_HOP | listed | remade and not name.lower().startswith("x-grapevine-")
        ]
        assert [(name.lower(), value) for name, value in kept] == wanted


@pytest.mark.parametrize(
    ("value", "good"),
    [("a", True), ("A.b-1:2_~+/=", True), ("", False), ("a b", False), ("x" * 129, False), ("a\n", False)],
)
def test_a_request_id_is_kept_only_when_it_is_harmless(value: str, good: bool) -> None:
    assert valid_request_id(value) is good


# --- admission


async def test_places_never_exceed_the_limit_whatever_comes_and_goes() -> None:
    rng = random.Random(7)
    admission = Admission(3, WaitingRoom(4, lambda: 0.0))
    held: list[Place] = []
    for _ in range(2000):
        if rng.random() < 0.5:
            place = admission.enter()
            assert (place is None) == (len(held) == 3 or admission.draining)
            if place is not None:
                held.append(place)
        elif held:
            place = held.pop(rng.randrange(len(held)))
            place.leave()
            place.leave()
        elif rng.random() < 0.1:
            admission.drain(not admission.draining)
        assert admission.active == len(held)
        admission.validate()


async def test_those_that_rest_keep_their_places_and_leave_room_for_as_many_others() -> None:
    admission = Admission(2, WaitingRoom(0, lambda: 0.0))
    resting = [place for place in (admission.enter(), admission.enter()) if place is not None]
    assert len(resting) == 2 and admission.enter() is None
    for place in resting:
        place.rest()
        place.rest()
    others = [place for place in (admission.enter(), admission.enter()) if place is not None]
    assert len(others) == 2 and (admission.active, admission.resting) == (4, 2)
    admission.validate()
    others[0].rest()
    assert admission.enter() is None, "twice as many at most"
    resting[0].wake()
    resting[0].wake()
    resting[1].leave()
    assert (admission.active, admission.resting) == (3, 1)
    for place in (*resting, *others):
        place.leave()
        place.rest()
    assert (admission.active, admission.resting) == (0, 0)
    admission.validate()


async def test_idle_waits_for_the_last_place() -> None:
    admission = Admission(1, WaitingRoom(0, lambda: 0.0))
    place = admission.enter()
    assert place is not None and not await admission.idle(0)
    place.leave()
    assert await admission.idle(0)


# --- publisher


class Wire:
    def __init__(self) -> None:
        self.keys: dict[bytes, bytes] = {}
        self.calls = 0

    def set_row(self, payload: bytes) -> None:
        self.row = payload

    def put(self, key: bytes, value: bytes) -> None:
        self.calls += 1
        self.keys[key] = value

    def delete(self, key: bytes) -> None:
        self.calls += 1
        del self.keys[key]


def test_chunks_go_out_a_few_at_a_time_and_end_as_the_last_change_said() -> None:
    wire, rng, held = Wire(), random.Random(3), set[int]()
    publisher = Publisher(wire)
    for _ in range(200):
        added = tuple({rng.randrange(500) for _ in range(40)} - held)
        held |= set(added)
        withdrawn = tuple(rng.sample(sorted(held), min(len(held), 30)))
        held -= set(withdrawn)
        publisher.chunks(Changes(added, withdrawn))
        before = wire.calls
        publisher.tick(b"row")
        assert wire.calls - before <= CHUNKS_PER_TICK
    for _ in range(4):
        publisher.tick(b"row")
    assert wire.keys.keys() == {chunk_key(chunk) for chunk in held}


def test_a_promise_is_told_apart_until_it_is_kept_or_withdrawn() -> None:
    wire = Wire()
    publisher = Publisher(wire)
    publisher.chunks(Changes(promised=(1, 2)))
    publisher.tick(b"row")
    assert wire.keys == {chunk_key(1): PROMISED, chunk_key(2): PROMISED}
    publisher.chunks(Changes(added=(1,), withdrawn=(2,)))
    publisher.tick(b"row")
    assert wire.keys == {chunk_key(1): HELD}
    publisher.chunks(Changes(promised=(3,)))
    publisher.chunks(Changes(withdrawn=(3,)))
    calls = wire.calls
    publisher.tick(b"row")
    assert wire.calls == calls


def test_models_are_published_when_they_change_and_withdrawn_when_they_go() -> None:
    wire = Wire()
    publisher = Publisher(wire)
    one, two = ModelInfo("one"), ModelInfo("two", max_model_len=5)
    publisher.models({"one": one, "two": two})
    publisher.models({"one": one, "two": two})
    assert wire.calls == 2 and wire.keys.keys() == {one.key, two.key}
    publisher.models({"two": ModelInfo("two", max_model_len=6)})
    assert wire.keys == {two.key: ModelInfo("two", max_model_len=6).encode()}


# --- what peers wrote


@given(st.binary(max_size=600))
def test_a_meta_from_the_wire_is_good_or_a_remote_error(data: bytes) -> None:
    try:
        meta = decode_meta(data)
    except RemoteError:
        return
    assert decode_meta(meta.encode()) == meta


@pytest.mark.parametrize(
    "address",
    ["host", "host:", "host:x", "a/b:1", "u@h:1", "h?:1", "h:0", "h:65536", "h:\u00b2", "[::1:1", "[z]:1", "h\\:1"],
)
def test_a_meta_with_a_strange_address_is_refused(address: str) -> None:
    for meta in (NodeMeta(address), NodeMeta("host:1", address)):
        with pytest.raises(RemoteError):
            decode_meta(meta.encode())
    with pytest.raises(RemoteError):
        decode_meta(NodeMeta("").encode())


@pytest.mark.parametrize("address", ["10.0.0.1:8100", "[::1]:8100", "host-a.example:1"])
def test_a_meta_with_a_usual_address_is_taken(address: str) -> None:
    assert decode_meta(NodeMeta(address, address).encode()) == NodeMeta(address, address)
    for kv_tls in (True, False):
        assert decode_meta(NodeMeta(address, address, kv_tls=kv_tls).encode()).kv_tls is kv_tls
    with pytest.raises(RemoteError, match="TLS for KV"):
        decode_meta(pack({"h": address, "e": "yes"}))


@given(st.one_of(st.none(), st.text(max_size=3000)))
def test_a_load_header_is_a_vector_or_nothing(header: str | None) -> None:
    assert read_load(header) is None or isinstance(read_load(header), LoadVector)


def test_a_load_vector_survives_its_header() -> None:
    load = LoadVector(ready=True, running=3, slots=8, rtts={"b": 1.5})
    assert read_load(write_load(load)) == load


# --- registry


class World:
    """A registry with one peer, and the clock in hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.metrics = Metrics(lambda: self.now)
        self.downs = Downs()
        self.raised: list[int] = []
        self.registry = Registry(
            "me",
            metrics=self.metrics,
            downs=self.downs,
            own_load=lambda: LoadVector(ready=True),
            on_raised=self.raised.append,
            clock=lambda: self.now,
        )
        self.registry.begin(1, NodeMeta("127.0.0.1:1"), "127.0.0.1")
        self.member(MemberState.ALIVE)

    def member(self, state: MemberState, incarnation: int = 1, meta: bytes | None = None) -> None:
        data = NodeMeta("127.0.0.1:2", "127.0.0.1:3").encode() if meta is None else meta
        view = MemberView("b", incarnation, "127.0.0.9", 9, data, state, 0.0, 0.002, False, ())
        self.registry.on_gossip(MemberChanged(view, None))

    def row(self, payload: bytes, seq: int = 1) -> None:
        self.registry.on_gossip(RowReceived(RowView("b", 1, seq, payload, 0.5)))

    def slow(self, *changes: tuple[bytes, bytes | None]) -> None:
        self.registry.on_gossip(SlowChanged("b", changes))

    def errors(self, what: str) -> float:
        return float(self.metrics.remote_errors.labels(what)._value.get())


def test_the_registry_follows_a_peer_from_birth_to_death() -> None:
    world = World()
    registry = world.registry
    info = ModelInfo("m")
    world.row(LoadVector(ready=True, running=2).encode())
    world.slow((info.key, info.encode()), (chunk_key(7), b""), (chunk_key(8), b""))
    peer = registry.describe("b")
    assert (peer.http, peer.kv, peer.load_age_s, set(peer.models), peer.digest_size) == (
        "127.0.0.1:2",
        "127.0.0.1:3",
        0.5,
        {"m"},
        2,
    )
    assert registry.serving() == ["b"] and registry.kv_address("b") == "127.0.0.1:3"
    assert registry.member_hosts() == {"127.0.0.1", "127.0.0.9"}
    view = registry.view(ParsedRequest("/v1/x", "m", chunks=(7, 8, 9)))
    assert dict(view.matched) == {"b": 2}
    told: list[str] = []
    with world.downs.watch("b", lambda: told.append("down")):
        registry.on_gossip(SlowReset("b"))
        world.member(MemberState.DEAD)
    assert told == ["down"]
    assert registry.serving() == [] and registry.kv_address("b") is None
    assert registry.member_hosts() == {"127.0.0.1"}
    assert set(registry.describe("b").models) == {"m"}, "an error can still name what it served"
    assert registry.describe("b").digest_size == 0


def test_what_peers_wrote_wrongly_is_counted_and_changes_nothing() -> None:
    world = World()
    world.row(LoadVector(ready=True, running=2).encode())
    world.row(b"\xff garbage", seq=2)
    world.slow((b"model/x", b"\x00"), (b"p123", b""), (b"unknown", b"x"))
    world.slow((ModelInfo("y").key, ModelInfo("z").encode()))
    world.member(MemberState.ALIVE, meta=b"nonsense")
    assert (world.errors("row"), world.errors("model"), world.errors("meta")) == (1, 1, 1)
    peer = world.registry.describe("b")
    assert peer.load is not None and peer.load.running == 2 and not peer.models and peer.http == "127.0.0.1:2"


@given(st.lists(st.tuples(st.binary(max_size=70), st.one_of(st.none(), st.binary(max_size=80))), max_size=8))
def test_no_slow_state_breaks_the_registry(changes: list[tuple[bytes, bytes | None]]) -> None:
    world = World()
    world.slow(*changes)
    world.registry.roster.prefixes.validate()


def test_a_restart_tells_those_who_wait_and_a_departure_does_not() -> None:
    world, told = World(), list[str]()
    with world.downs.watch("b", lambda: told.append("b")):
        world.member(MemberState.LEFT)
        assert told == []
        world.member(MemberState.ALIVE, incarnation=2)
        assert told == ["b"]


def test_a_failing_peer_counts_as_suspect_until_its_time_is_over() -> None:
    world = World()
    parsed = ParsedRequest("/v1/x", "m")
    for _ in range(CONFIRMED):
        found = world.registry.view(parsed).get("b")
        assert found is not None and found.state is NodeState.ALIVE, "one failure ejects nobody"
        world.registry.failed("b", "refused")
    found = world.registry.view(parsed).get("b")
    assert found is not None and found.state is NodeState.SUSPECT
    circuit = world.registry.describe("b").circuit
    assert circuit is not None and (circuit["state"], circuit["reason"]) == ("open", "refused")
    world.now += OPEN_FIRST_S + 0.1
    found = world.registry.view(parsed).get("b")
    assert found is not None and found.state is NodeState.ALIVE


def test_signs_of_life_are_those_of_a_live_peer_with_a_fresh_row() -> None:
    world = World()
    assert world.registry.moves("b") is None and world.registry.moves("nobody") is None
    world.row(LoadVector(ready=True, moves=7).encode())
    assert world.registry.moves("b") == 7
    world.now += FRESH_S
    assert world.registry.moves("b") is None, "nothing is heard of it any more"
    world.row(LoadVector(ready=True, moves=9).encode(), seq=2)
    assert world.registry.moves("b") == 9
    world.member(MemberState.SUSPECT)
    assert world.registry.moves("b") is None


def test_a_peer_in_doubt_is_tried_by_one_request_at_a_time() -> None:
    world = World()
    plan, parsed = Plan(rid="r", model="m", entry="me", target="b"), ParsedRequest("/v1/x", "m")

    def state() -> NodeState | None:
        found = world.registry.view(parsed).get("b")
        return found.state if found is not None else None

    for _ in range(CONFIRMED):
        world.registry.failed("b", "refused")
    world.now += OPEN_FIRST_S
    assert state() is NodeState.ALIVE
    end = world.registry.sent(plan)
    assert state() is NodeState.SUSPECT, "its trial is on the way"
    end(False)
    assert state() is NodeState.ALIVE, "it was neither answered nor failed"
    world.registry.sent(plan)
    world.registry.busy("b", None)
    assert state() is NodeState.ALIVE, "a full peer answers"


def test_a_peer_that_was_restarted_starts_clean() -> None:
    world = World()
    for _ in range(8):
        world.registry.failed("b", "refused")
    world.member(MemberState.ALIVE, incarnation=2)
    found = world.registry.view(ParsedRequest("/v1/x", "m")).get("b")
    assert found is not None and found.state is NodeState.ALIVE


def test_what_was_sent_is_unseen_until_it_ends() -> None:
    world = World()
    cost = CandidateCost("b", 40.0, prefill_ms=30.0)
    plan = Plan(rid="r", model="m", entry="me", target="b", costs=(cost,))
    ends = [world.registry.sent(plan) for _ in range(2)]
    since = world.registry.view(ParsedRequest("/v1/x", "m")).unseen["b"]
    assert (since.sent, since.sent_ms) == (2, 60.0)
    for end in ends:
        end(True)
    assert "b" not in world.registry.view(ParsedRequest("/v1/x", "m")).unseen


def test_a_refusal_brings_the_fresh_load_into_the_view() -> None:
    world = World()
    world.row(LoadVector(ready=True).encode())
    world.registry.busy("b", LoadVector(ready=True, running=9))
    found = world.registry.view(ParsedRequest("/v1/x", "m")).get("b")
    assert found is not None and found.load.running == 9 and found.age_s(world.now) == 0


# --- deadlines


def test_the_first_byte_is_waited_for_as_long_as_the_target_may_need() -> None:
    deadlines = Deadlines()
    stream, whole = ParsedRequest("/v1/x", "m", stream=True), ParsedRequest("/v1/x", "m", est_prompt_tokens=9)
    warm = LoadVector(prefill=PrefillTime.of_rate(1000.0), ttft_p95_ms=200.0, itl_p95_ms=20.0)
    factor = deadlines.first_byte_factor

    def granted(parsed: ParsedRequest, load: LoadVector, predicted_ms: float = 0, prompt_tokens: int = 0) -> float:
        return deadlines.first_byte(parsed, load, predicted_ms=predicted_ms, prompt_tokens=prompt_tokens)

    assert granted(stream, LoadVector()) == deadlines.cold_s, "nothing is known: it may be compiling"
    assert granted(stream, warm) == deadlines.first_byte_s, "seconds, not minutes"
    assert granted(stream, warm, 60_000) == pytest.approx(factor * 60.2), "its queue is long"
    assert granted(stream, warm, 0, 11_000) == pytest.approx(factor * 11.2), "so is the prompt"
    assert granted(stream, warm, 1e12) == deadlines.first_byte_max_s
    assert granted(whole, warm) > 60, "without a limit the answer may be long"
    assert granted(replace(whole, max_tokens=100), warm) == pytest.approx(factor * 0.2 + deadlines.answer_factor * 2)


async def test_downs_forgets_those_who_no_longer_wait() -> None:
    downs, told = Downs(), asyncio.Event()
    with downs.watch("b", told.set):
        downs.down("c")
        assert not told.is_set()
    downs.down("b")
    assert not told.is_set() and not downs._callbacks
