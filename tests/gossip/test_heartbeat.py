"""The load plane as a heartbeat: what an old row starts, what it must not start, and what a fresh one prevents."""

from __future__ import annotations

from collections.abc import Callable

from gossip import GossipConfig, MemberState
from gossip import actions as io
from gossip.heartbeat import MAX_SCORE
from gossip.incarnation import first
from gossip.messages import Dead, Ping, Suspect
from gossip.simulator import Simulator
from tests.gossip.lone import OTHER, PEER, Lone, row

MakeLone, MakeSim = Callable[..., Lone], Callable[..., Simulator]
#: No round-robin probe and no exchange interferes within a test.
QUIET = GossipConfig.lan(probe_interval_s=30.0, push_pull_interval_s=600.0)


def renewing(one: Lone, seconds: float, name: str = "peer", start: int = 1) -> int:
    """Let a peer renew its row every 0.2 s; gives its next sequence number. Pings are answered meanwhile."""
    seq = start
    for _ in range(round(seconds / 0.2)):
        one.hear(name, row(name, 1, seq, 10, b"load"))
        seq += 1
        one.wait(0.2)
        one.answer(name)
    return seq


def pinged(one: Lone, name: str = "peer") -> int:
    return sum(1 for _, ping in one.pings if ping.target == name)


def test_a_row_that_stays_old_has_its_owner_probed_at_once(lone: MakeLone) -> None:
    one = lone(QUIET)
    one.meet()
    renewing(one, 3)
    assert not one.endpoint.counters["doubts"]
    one.wait(0.6)
    assert pinged(one) == 0
    one.wait(0.7)
    assert (pinged(one), one.endpoint.counters["doubts"]) == (1, 1)
    one.answer("peer")
    one.wait(5)
    assert pinged(one) == 0, "one old row is one doubt"
    assert one.state() is MemberState.ALIVE


def test_a_row_that_is_not_renewed_regularly_is_no_heartbeat(lone: MakeLone) -> None:
    one = lone(QUIET)
    one.meet()
    one.answer("peer")
    for seq in (1, 2, 3, 4, 5):
        one.hear("peer", row("peer", 1, seq, 10, b"load"))
        one.wait(0.9)
        one.answer("peer")
    one.wait(4)
    assert not one.endpoint.counters["doubts"]


def test_whoever_was_stopped_itself_lets_rows_arrive_before_it_doubts(lone: MakeLone) -> None:
    one = lone(QUIET)
    one.meet()
    seq = renewing(one, 3)
    one.now += 3.0  # stopped: nothing was read, no timer ran
    one.wait(0.1)
    renewing(one, 2, start=seq)
    assert not one.endpoint.counters["doubts"]


def test_whoever_is_unwell_itself_doubts_nobody(lone: MakeLone) -> None:
    one = lone(QUIET)
    one.meet()
    renewing(one, 3)
    one.endpoint.health.add(MAX_SCORE + 1)
    one.wait(3)
    assert not one.endpoint.counters["doubts"]
    one.endpoint.health.add(-1)
    one.wait(0.5)
    assert one.endpoint.counters["doubts"] == 1


def test_the_bound_follows_what_is_usual_here(lone: MakeLone) -> None:
    one = lone(QUIET)
    one.meet()
    one.meet("other", OTHER)
    least = one.endpoint.heartbeat.bound_s
    for seq in range(1, 60):
        for name in ("peer", "other"):
            one.hear(name, row(name, 1, seq, 2000, b"load"))
        one.wait(0.2)
        one.answer("peer")
        one.answer("other")
    assert least == 1.0
    assert 2.4 < one.endpoint.heartbeat.bound_s < 3.0


def test_a_crash_in_a_cluster_of_thirty_is_known_to_all_within_four_seconds(simulator: MakeSim) -> None:
    sim = simulator(seed=5)
    sim.cluster(30)
    sim.run(4)
    sim.load_rows()
    sim.run(4)
    for victim in ("n7", "n20"):
        sim.crash(victim)
        assert sim.run_until(lambda victim=victim: sim.all_say(victim, MemberState.DEAD), 4.0) > 1  # type: ignore[misc]
    assert sim.false_deaths() == 0


def test_a_live_node_whose_row_is_no_longer_renewed_is_doubted_and_never_suspected(simulator: MakeSim) -> None:
    sim = simulator(seed=6)
    sim.cluster(8)
    sim.run(2)
    for _ in range(20):
        for name in sim.nodes:
            sim.do(name, io.RowSet(b"load"))
        sim.run(0.2)
    for _ in range(50):
        for name in list(sim.nodes)[1:]:
            sim.do(name, io.RowSet(b"load"))
        sim.run(0.2)
    assert sum(n.endpoint.counters["doubts"] for n in sim.running()) >= 7
    assert sim.report["suspicions_seen"] == 0


def test_one_sick_node_that_hears_nobody_does_not_suspect_hundreds(simulator: MakeSim) -> None:
    sim = simulator(seed=7)
    sim.cluster(40)
    sim.run(4)
    sim.load_rows()
    sim.run(4)
    for name in sim.nodes:
        sim.cut(name, "n3")
    sim.run(10)
    sick = sim.nodes["n3"].endpoint
    assert sick.counters["probes_failed"] < 12, "its own health has to slow it down"
    assert sim.false_deaths() == 0 or all(n.name == "n3" or not n.suspects - {"n3"} for n in sim.running())


# --- signs of life


def test_a_suspect_that_renews_its_row_is_not_buried_whoever_says_so(lone: MakeLone) -> None:
    one = lone(GossipConfig.lan(probe_interval_s=5.0, push_pull_interval_s=600.0))
    one.meet()
    seq = renewing(one, 2)
    one.hear("other", Suspect("peer", first(1), "other"), source=OTHER)
    assert one.state() is MemberState.SUSPECT
    seq = renewing(one, 1, start=seq)
    one.hear("other", Dead("peer", first(1), "other"), source=OTHER)
    assert (one.state(), one.endpoint.counters["deaths_doubted"]) == (MemberState.SUSPECT, 1)
    renewing(one, 25, start=seq)
    assert one.state() is MemberState.SUSPECT
    assert one.endpoint.counters["suspicions_held"] > 0


def test_a_suspect_that_speaks_but_never_hears_is_buried_in_the_end(lone: MakeLone) -> None:
    one = lone(GossipConfig.lan(push_pull_interval_s=600.0))
    one.meet()
    seq = renewing(one, 2)
    one.hear("other", Suspect("peer", first(1), "other"), source=OTHER)
    for _ in range(60 * 5):
        one.hear("peer", row("peer", 1, seq, 10, b"load"))
        seq += 1
        one.wait(0.2)
        if one.state() is MemberState.DEAD:
            return
    raise AssertionError("held for ever")


def test_a_suspect_is_probed_again_when_its_end_is_put_off(lone: MakeLone) -> None:
    one = lone(GossipConfig.lan(probe_interval_s=2.0, push_pull_interval_s=600.0))
    one.meet()
    seq = renewing(one, 1)
    one.hear("other", Suspect("peer", first(1), "other"), source=OTHER)
    one.hear("peer", row("peer", 1, seq, 0, b"load"))
    one.wait(0.01)
    one.hear("peer", row("peer", 1, seq + 1, 0, b"load"))
    one.pings.clear()
    one.wait(33)
    assert any(isinstance(part, Ping) for part in one.parts(Ping, PEER))
    assert one.endpoint.counters["suspicions_held"] >= 1
