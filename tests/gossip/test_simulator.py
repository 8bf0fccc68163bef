"""The simulator's own tests: its faults are real, it is deterministic, and every checker bites."""

from __future__ import annotations

import pytest

from gossip import GossipConfig, MemberState
from gossip import actions as io
from gossip.addresses import AddressBook
from gossip.broadcast import BroadcastQueue
from gossip.endpoint import Endpoint
from gossip.membership import Membership
from gossip.messages import Alive, Dead, Rumour
from gossip.rows import LoadRows
from gossip.simulator import Clock, Simulator, VacuousRunError, Violation
from gossip.slow_map import SlowMap
from gossip.timers import Timer, Timers
from tests.gossip.lone import quick

# Here simulators are made by hand: those of the fixture are validated at teardown, and these are broken on purpose.


def started(size: int = 4, config: GossipConfig | None = None, seed: int = 1) -> Simulator:
    sim = Simulator(seed, config)
    sim.cluster(size)
    sim.run_until(sim.agreed, 3)
    return sim


# --- faults are real --------------------------------------------------------------------------------------------------


def test_a_clock_runs_at_its_pace_and_only_forward() -> None:
    clock = Clock(100.0)
    clock.set_rate(2.0, now=10.0)
    assert clock.read(10.0) == 110.0
    assert clock.read(11.0) == 112.0
    clock.step(5.0)
    assert clock.read(11.0) == 117.0
    assert clock.moment(117.0) == 11.0
    with pytest.raises(ValueError, match="never goes back"):
        clock.step(-1.0)


def test_clocks_of_different_pace_kill_nobody() -> None:
    sim = started(6)
    for i, rate in enumerate((0.9, 0.95, 1.0, 1.02, 1.05, 1.1)):
        sim.skew_clock(f"n{i}", rate)
    sim.run(60)
    assert sim.agreed()
    assert sim.false_deaths() == 0
    sim.report.require(clock_steps=6)


def test_a_clock_that_jumps_ahead_blames_nobody() -> None:
    sim = started(6)
    sim.step_clock("n3", 300.0)
    sim.run(30)
    assert sim.agreed()
    assert sim.false_deaths() == 0
    assert sim.nodes["n3"].endpoint.counters["stalls"] == 1


def test_loss_in_one_direction_is_only_there() -> None:
    sim = started(3)
    sim.network.set_loss("n0", "n1", 1.0)
    sim.run(5)
    assert sim.report["lost"] > 10
    lost = sim.report["lost"]
    sim.heal()
    sim.run(5)
    assert sim.report["lost"] == lost


def test_what_is_sent_at_one_moment_arrives_in_order_unless_it_is_reordered() -> None:
    sim = started(2)
    n0, n1 = sim.nodes["n0"], sim.nodes["n1"]
    burst = [io.SendDatagram(n1.address, bytes([number])) for number in range(50)]
    for reordering, in_order in ((0.0, True), (0.5, False)):
        sim.network.reordering = reordering
        n1.recording = []
        sim._perform(n0, list(burst))
        sim.run(1)
        arrived = [data[0] for _, _, data in n1.recording if len(data) == 1]
        assert sorted(arrived) == list(range(50))
        assert (arrived == sorted(arrived)) is in_order


def test_a_paused_socket_overflows() -> None:
    sim = started(12, GossipConfig.lan(fanout=11))
    sim.network.duplication = 1.0
    sim.pause("n1", 15)
    sim.run(14)
    sim.report.require(inbox_lost=1, pauses=1)


def test_a_pause_within_a_pause_does_not_end_it() -> None:
    sim = started(3)
    sim.pause("n1", 4)
    sim.pause("n1", 1)
    sent = sim.nodes["n1"].datagrams_out
    sim.run(3)
    assert sim.nodes["n1"].datagrams_out == sent
    sim.run(2)
    assert sim.nodes["n1"].datagrams_out > sent


def test_a_stream_to_a_process_that_stands_still_fails_after_its_timeout() -> None:
    sim = started(3)
    sim.pause("n1", 30)
    sim.do("n0", io.SeedsAdded((("10.9.9.9", 1), sim.nodes["n1"].address)))
    sim.run(20)
    assert all(len(n.endpoint.sessions) <= 2 for n in sim.running())


def test_a_death_is_false_only_of_somebody_who_is_well() -> None:
    sim = started(4)
    sim.partition(["n0", "n1"], ["n2", "n3"])
    sim.pause("n1", 20)
    sim.run_until(lambda: sim.state("n0", "n1") is MemberState.DEAD, 15)
    sim.run_until(lambda: sim.state("n0", "n2") is MemberState.DEAD, 15)
    assert sim.false_deaths() == 0
    sim.heal()
    sim.run_until(lambda: sim.state("n0", "n2") is MemberState.ALIVE, 12)
    before = dict(sim.report)
    member = sim.nodes["n0"].endpoint.membership.get("n2")
    assert member is not None
    sim.nodes["n0"].endpoint.membership.bury(member, sim.clock(sim.nodes["n0"]))
    sim.do("n0", io.RowSet(b"any event, to carry the actions out"))
    assert sim.false_deaths() == before.get("false_deaths", 0) + 1
    assert sim.report["false_incidents"] == before.get("false_incidents", 0) + 1


def test_a_run_without_its_faults_proves_nothing() -> None:
    sim = started(3)
    with pytest.raises(VacuousRunError, match="'lost': 0"):
        sim.report.require(lost=1, delivered=1)


# --- every checker bites: break the rule, and see it found ------------------------------------------------------------


@pytest.mark.plain
def test_an_incarnation_that_falls_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def believe_anything(self: Membership, rumour: Alive, now: float) -> None:
        member = self._members.get(rumour.name)
        if member is None:
            self._admit(rumour, now)
        else:
            self._accept(member, rumour, now)

    sim = started(4)
    sim.restart("n2", incarnation=2, seeds=["n0"])
    sim.run(3)
    monkeypatch.setattr(Membership, "_alive", believe_anything)
    with pytest.raises(Violation, match="incarnation of n2 fell"):
        for node in sim.running():
            sim.nodes[node.name].endpoint.membership.apply(
                Alive("n2", 1 << 16, *sim.nodes["n2"].address, b"changed"), sim.clock(node)
            )
            sim.do(node.name, io.RowSet(b"row"))


@pytest.mark.plain
def test_a_return_from_the_dead_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Membership._alive

    def rise(self: Membership, rumour: Alive, now: float) -> None:
        member = self._members.get(rumour.name)
        if member is not None and not member.state.is_up:
            self._accept(member, rumour, now)
        else:
            known(self, rumour, now)

    sim = started(3)
    sim.crash("n1")
    sim.run_until(lambda: sim.all_say("n1", MemberState.DEAD), 10)
    monkeypatch.setattr(Membership, "_alive", rise)
    node = sim.nodes["n0"]
    member = node.endpoint.membership.get("n1")
    assert member is not None
    again = Alive("n1", member.incarnation, member.host, member.port, member.meta)
    node.endpoint.membership.apply(again, sim.clock(node))
    with pytest.raises(Violation, match="rose from the dead"):
        sim.do("n0", io.RowSet(b"row"))


@pytest.mark.plain
def test_forgetting_the_dead_too_soon_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = started(4)
    sim.crash("n1")
    sim.run_until(lambda: sim.all_say("n1", MemberState.DEAD), 10)
    member = sim.nodes["n0"].endpoint.membership.get("n1")
    assert member is not None
    echo = Alive("n1", member.incarnation, member.host, member.port, member.meta)
    reap = Membership.reap
    monkeypatch.setattr(Membership, "reap", lambda self, now: reap(self, now + 1000))
    with pytest.raises(Violation, match="rose from the dead"):
        for _ in range(50):
            sim.run(0.2)
            node = sim.nodes["n0"]
            node.endpoint.membership.apply(echo, sim.clock(node))


@pytest.mark.plain
def test_a_node_in_its_own_table_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Membership.apply

    def apply(self: Membership, rumour: Rumour, now: float) -> None:
        if isinstance(rumour, Alive) and rumour.name == self._hub.name:
            self._admit(rumour, now)
        else:
            known(self, rumour, now)

    monkeypatch.setattr(Membership, "apply", apply)
    with pytest.raises(Violation, match="was told that it is alive"):
        started(3)


@pytest.mark.plain
def test_a_running_node_that_holds_itself_for_departed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(self: Membership, rumour: Dead, now: float) -> None:
        if rumour.name == self._hub.name:
            self._hub.leaving = True

    sim = started(4)
    monkeypatch.setattr(Membership, "_dead", give_up)
    monkeypatch.setattr(Endpoint, "leaving", property(lambda self: False))
    node = sim.nodes["n1"]
    node.endpoint.membership.apply(Dead("n1", 1 << 16, "n0"), sim.clock(node))
    with pytest.raises(Violation, match="n1 runs and holds itself for left"):
        sim.run(2)


@pytest.mark.plain
def test_a_queue_that_outgrows_its_bound_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = started(3)
    put = BroadcastQueue.put

    def hoard(self: BroadcastQueue, rumour: Rumour) -> None:
        put(self, rumour)
        for i in range(50):
            put(self, Dead(f"ghost{i}", 1 << 16, "nobody"))

    monkeypatch.setattr(BroadcastQueue, "put", hoard)
    sim.crash("n1")
    with pytest.raises(Violation, match="more rumours than members"):
        sim.run(10)


@pytest.mark.plain
def test_a_timer_that_nobody_cancels_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cancel = Timers.cancel
    monkeypatch.setattr(Timers, "cancel", lambda self, key: None if key[0] is Timer.SESSION else cancel(self, key))
    sim = started(4, GossipConfig.lan(push_pull_interval_s=1.0, session_timeout_s=60.0))
    with pytest.raises(Violation, match=r"timers, \d+ are explained"):
        sim.run(30)


def test_a_row_of_the_dead_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = started(3)
    sim.load_rows()
    sim.run(1)
    monkeypatch.setattr(LoadRows, "member_down", lambda self, member, now: None)
    sim.crash("n1")
    with pytest.raises(Violation, match="a row without a living owner"):
        sim.run(10)


@pytest.mark.plain
def test_a_change_of_slow_state_that_is_not_told_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    take = SlowMap._take
    monkeypatch.setattr(SlowMap, "_take", lambda self, delta: take(self, delta)[1:])
    sim = started(3)
    with pytest.raises(Violation, match="do not add up to the slow state of n1"):
        sim.do("n1", io.KeyPut(b"first", b"1"))
        sim.do("n1", io.KeyPut(b"second", b"2"))
        sim.run(3)


def test_a_member_that_vanishes_without_an_event_is_found() -> None:
    sim = started(3)
    del sim.nodes["n0"].endpoint.membership._members["n1"]
    with pytest.raises(Violation):
        sim.validate()


@pytest.mark.plain
def test_a_cluster_that_does_not_find_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = started(6, quick())
    sim.partition(["n0", "n1", "n2"], ["n3", "n4", "n5"])
    monkeypatch.setattr(AddressBook, "due", lambda self, now, most, settled: [])
    sim.run(45)
    with pytest.raises(AssertionError, match="not within 15"):
        sim.calm(15)


def test_the_same_run_with_the_rule_in_force_passes() -> None:
    sim = started(6, quick())
    sim.partition(["n0", "n1", "n2"], ["n3", "n4", "n5"])
    sim.run(45)
    assert sim.calm(15) > 0
    sim.report.require(cut=100, true_deaths=18)
