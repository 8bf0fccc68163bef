"""The small parts: timers, suspicion, broadcast queue, address book, identity, config, and the purity of the core."""

from __future__ import annotations

import ast
import itertools
import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gossip
from gossip import GossipConfig, Identity, InvariantError, LocalError, MemberState
from gossip import actions as io
from gossip.addresses import AddressBook
from gossip.broadcast import BroadcastQueue, retransmits
from gossip.build import is_compiled
from gossip.encode import PacketBuilder
from gossip.incarnation import first
from gossip.messages import Dead, Left, Suspect
from gossip.simulator import Simulator
from gossip.suspicion import Suspicion, confirmations_wanted, suspicion_min_s
from gossip.timers import Timer, Timers
from tests.gossip.conftest import Lone

#: The shell: what may know about loops, sockets, clocks and files.
SHELL = {"agent", "framing", "sockets", "boot", "discovery", "seeds", "streams", "joinwatch", "__init__"}
BANNED = {"asyncio", "socket", "time", "logging", "threading", "os", "uvloop", "selectors", "datetime"}


def test_the_core_imports_no_loop_socket_clock_or_log_and_calls_no_global_randomness() -> None:
    modules = {p.stem: ast.parse(p.read_text()) for p in Path(gossip.__file__).parent.glob("*.py")}
    core = {name: tree for name, tree in modules.items() if name not in SHELL}
    assert {
        "endpoint",
        "membership",
        "prober",
        "rows",
        "slow_map",
        "slow_state",
        "encode",
        "decode",
        "exchange",
    } <= core.keys()
    for name, tree in core.items():
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not {n.split(".")[0] for n in names} & BANNED, f"{name} imports {names}"
            assert not any(n.split(".")[-1] in SHELL and n.startswith("gossip") for n in names), f"{name}: {names}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random":
                assert node.attr == "Random", f"{name} uses random.{node.attr}"


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), st.integers(0, 50)))))
def test_timers_fire_in_order_and_only_by_their_latest_setting(story: list[tuple[int, int | None]]) -> None:
    timers, truth = Timers(), {}
    for key, at in story:
        if at is None:
            timers.cancel((Timer.SUSPICION, key))
            truth.pop(key, None)
        else:
            timers.set((Timer.SUSPICION, key), at)
            truth[key] = at
        assert timers.next_deadline() == min(truth.values(), default=None)
        assert len(timers) == len(truth)
    fired = []
    while key_ := timers.pop_due(100):
        fired.append(truth[int(key_[1])])
    assert fired == sorted(truth.values())


def test_shifted_timers_keep_their_distances() -> None:
    timers = Timers()
    timers.set((Timer.PROBE, 0), 1.0)
    timers.set((Timer.GOSSIP, 0), 2.0)
    timers.shift(10)
    assert timers.pop_due(10.9) is None
    assert timers.pop_due(11.0) == (Timer.PROBE, 0)
    assert timers.next_deadline() == 12.0


def test_suspicion_times_follow_the_formula() -> None:
    assert suspicion_min_s(4, 3, 1.0) == 4.0
    assert suspicion_min_s(4, 100, 1.0) == 4.0
    assert suspicion_min_s(4, 1000, 1.0) == pytest.approx(6.0)
    assert [confirmations_wanted(2, n) for n in (2, 3, 4, 100)] == [0, 0, 2, 2]
    running = Suspicion(100.0, 4.0, 24.0, 3, "a")
    assert running.deadline() == 124.0
    assert running.confirm("b")
    assert running.deadline() == pytest.approx(100 + 24 - math.log(2) / math.log(4) * 20)
    assert not running.confirm("a")
    assert not running.confirm("b")
    assert running.confirm("c")
    assert running.confirm("d")
    assert running.deadline() == pytest.approx(104.0)
    assert not running.confirm("e"), "no more are wanted"
    assert Suspicion(100.0, 4.0, 24.0, 0, "a").deadline() == 104.0


def test_a_rumour_is_sent_its_number_of_times_and_a_newer_one_replaces_it() -> None:
    assert [retransmits(4, n) for n in (3, 9, 10, 100, 1000)] == [8, 8, 8, 12, 16]
    queue = BroadcastQueue()
    queue.put(Suspect("x", first(1), "a"))
    queue.put(Dead("x", first(1), "a"))
    queue.put(Left("y", first(1)))
    assert len(queue) == 2
    for _ in range(3):
        packet = PacketBuilder("c", "n", 1, 1400)
        queue.fill(packet, 3)
        assert len(packet) == 2
    assert len(queue) == 0


def test_the_least_sent_rumour_goes_first_when_room_is_short() -> None:
    queue = BroadcastQueue()
    queue.put(Left("old" * 10, first(1)))
    queue.fill(PacketBuilder("c", "n", 1, 1400), 9)
    queue.put(Left("new" * 10, first(1)))
    packet = PacketBuilder("c", "n", 1, 65)
    queue.fill(packet, 9)
    assert b"newnew" in packet.build()
    assert b"oldold" not in packet.build()


def test_the_address_book_backs_off_for_ever_and_settles() -> None:
    book = AddressBook(8, 1.0, 4.0, random.Random(1))
    book.add_seed(("s", 1), 0.0)
    dials, now = [], 0.0
    while now < 60:
        for contact in book.due(now, 8, lambda _c: False):
            dials.append(now)
            book.dialling(contact, now)
            book.answered(contact.address, None)
        now += 0.25
    pauses = [b - a for a, b in itertools.pairwise(dials)]
    assert len(dials) > 12
    assert max(pauses) <= 5.25
    assert book.due(1000, 8, lambda _c: True) == []
    assert len(book.due(1000, 8, lambda _c: False)) == 1


def test_the_address_book_is_bounded_and_gives_up_the_dead_before_seeds() -> None:
    book = AddressBook(8, 1.0, 4.0, random.Random(1))
    book.add_seed(("seed", 1), 0.0)
    for i in range(20):
        book.add_dead(("dead", i + 1), f"d{i}", 0.0)
    assert len(book) == 8
    assert book.get(("seed", 1)) is not None
    assert len(book.due(10.0, 8, lambda _c: False)) == 2, "one of the dead at a time"
    book.due(10.0, 8, lambda c: not c.is_seed)
    assert len(book) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"name": "with space"},
        {"name": "n" * 65},
        {"name": "new\n"},
        {"cluster": "c/d"},
        {"incarnation": 0},
        {"port": 65536},
        {"meta": b"x" * 513},
    ],
)
def test_an_identity_out_of_range_is_refused(wrong: dict[str, object]) -> None:
    right: dict[str, object] = {"name": "n", "cluster": "c", "incarnation": 1, "host": "10.0.0.1", "port": 1}
    Identity(**right)  # type: ignore[arg-type]
    with pytest.raises(LocalError):
        Identity(**{**right, **wrong})  # type: ignore[arg-type]


def test_presets_are_valid_and_changes_are_checked() -> None:
    for preset in (GossipConfig.loopback, GossipConfig.lan, GossipConfig.wan):
        assert preset(fanout=5).fanout == 5
        with pytest.raises(LocalError, match="fanout = 0"):
            preset(fanout=0)
    with pytest.raises(LocalError, match="below probe_interval_s"):
        GossipConfig(probe_timeout_s=0.5, probe_interval_s=0.5)
    with pytest.raises(LocalError, match="dead_keep_s"):
        GossipConfig(gossip_to_dead_s=100, dead_keep_s=50)
    with pytest.raises(LocalError, match="redial_max_s"):
        GossipConfig(redial_min_s=100, redial_max_s=50)


def test_presets_take_the_clusters_size_and_leave_room_to_grow() -> None:
    small, large = GossipConfig.lan(nodes=10), GossipConfig.wan(nodes=2000)
    assert (small.max_members, large.max_members) == (64, 4096)
    assert small.max_slow_entries < large.max_slow_entries
    assert GossipConfig.loopback(nodes=10, max_members=9).max_members == 9
    for wrong in (0, 5000):
        with pytest.raises(LocalError, match="nodes"):
            GossipConfig.lan(nodes=wrong)


def test_every_field_of_the_config_is_explained() -> None:
    lines = (Path(gossip.__file__).parent / "config.py").read_text().splitlines()
    body = lines[: next(i for i, line in enumerate(lines) if "def __post_init__" in line)]
    explained = False
    for line in body:
        if line.strip().startswith("#:"):
            explained = True
        elif ": " in line and "=" in line and not line.strip().startswith("#"):
            assert explained, line
        elif not line.strip():
            explained = False


def test_a_snapshot_is_plain_json_and_holds_what_the_state_page_shows() -> None:
    sim = Simulator()
    sim.cluster(3)
    sim.do("n1", io.RowSet(b"load"))
    sim.do("n1", io.KeyPut(b"k", b"v"))
    sim.run(3)
    sim.do("n1", io.RowSet(b"load"))
    sim.run(0.5)
    node = sim.nodes["n0"]
    shown = json.loads(json.dumps(node.endpoint.snapshot(sim.clock(node))))
    assert shown["compiled"] is is_compiled()
    one = next(m for m in shown["members"] if m["name"] == "n1")
    assert one["state"] == "alive"
    assert one["address"].endswith(":7946")
    assert (one["incarnation"], one["row_seq"], one["slow_version"], one["slow_keys"]) == (1, 2, 1, 1)
    assert 0 < one["rtt_ms"] < 10
    assert 0 <= one["row_age_s"] < 1
    assert one["suspected_by"] == []
    assert one["meta"] == b"n1".hex()
    assert shown["members"][0]["is_self"]


def test_validation_notices_each_kind_of_broken_state() -> None:
    def broken(breaks: object) -> None:
        one = Lone().start()
        one.meet()
        one.endpoint.validate()
        breaks(one)  # type: ignore[operator]
        with pytest.raises(InvariantError):
            one.endpoint.validate()

    def member(one: Lone) -> object:
        return one.endpoint.membership.get("peer")

    broken(lambda one: setattr(member(one), "state", MemberState.SUSPECT))
    broken(lambda one: one.endpoint.rtts.add("ghost", 1.0))
    broken(lambda one: one.endpoint.rows._table._slots.update(ghost=0))
    broken(lambda one: one.endpoint.slow._copies.update(ghost=one.endpoint.slow._own))
    broken(lambda one: one.endpoint.membership._members.update(me=member(one)))
    broken(lambda one: one.endpoint.slow._own._log.update({b"k": 5}))
    broken(lambda one: [one.endpoint.membership.broadcasts.put(Left(f"g{i}", first(1))) for i in range(5)])
