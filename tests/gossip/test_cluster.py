"""Whole clusters in virtual time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gossip import GossipConfig, MemberChanged, MemberState
from gossip import actions as io
from gossip.simulator import Simulator
from tests.gossip.lone import quick

Make = Callable[..., Simulator]


@pytest.mark.parametrize(("size", "limit"), [(3, 1.0), (30, 2.0), (100, 3.0)])
def test_nodes_that_start_together_agree(simulator: Make, size: int, limit: float) -> None:
    sim = simulator(seed=size)
    sim.cluster(size)
    sim.run_until(sim.agreed, limit)
    assert sim.report["joins_seen"] == size * (size - 1)


@pytest.mark.parametrize("size", [3, 10])
@pytest.mark.parametrize("preset", [GossipConfig.loopback(), GossipConfig.lan()], ids=["loopback", "lan"])
def test_a_crash_is_known_to_all_within_ten_seconds_and_to_few_wrongly(
    simulator: Make, size: int, preset: GossipConfig
) -> None:
    sim = simulator(seed=7, config=preset)
    sim.cluster(size)
    sim.run_until(sim.agreed, 5)
    sim.run(3)
    sim.crash("n1")
    assert sim.run_until(lambda: sim.all_say("n1", MemberState.DEAD), 10) > 1
    assert sim.false_deaths() == 0
    assert sim.report["true_deaths"] == size - 1


def test_a_departure_is_known_at_once_and_as_such(simulator: Make) -> None:
    sim = simulator()
    sim.cluster(5)
    sim.run_until(sim.agreed, 2)
    sim.do("n2", io.LeaveRequested())
    assert sim.run_until(lambda: sim.all_say("n2", MemberState.LEFT), 1) < 0.5
    sim.run(1)
    sim.crash("n2")
    sim.run(8)
    assert sim.all_say("n2", MemberState.LEFT)
    assert sim.report["true_deaths"] == 0


def test_the_dead_are_forgotten_everywhere_and_for_good(simulator: Make) -> None:
    sim = simulator(config=quick())
    sim.cluster(6)
    sim.run_until(sim.agreed, 2)
    sim.crash("n3")
    sim.run_until(lambda: sim.all_say("n3", MemberState.DEAD), 10)
    sim.run_until(lambda: sim.all_say("n3", None), 25)
    sim.run(30)
    assert sim.all_say("n3", None)
    assert all("n3" not in node.endpoint.membership.broadcasts for node in sim.running())


def test_a_restart_with_a_higher_boot_counter_is_back_at_once(simulator: Make) -> None:
    sim = simulator()
    sim.cluster(4)
    sim.run_until(sim.agreed, 2)
    sim.restart("n2", incarnation=2, seeds=["n0"])
    sim.run_until(sim.agreed, 1)
    sim.run(10)
    assert sim.agreed()
    assert sim.false_deaths() == 0
    seen = [e for _, e in sim.nodes["n0"].events if isinstance(e, MemberChanged) and e.view.name == "n2"]
    firsts = {e.view.incarnation: e.previous for e in reversed(seen)}  # the next one says that it was heard from here
    assert firsts == {1: None, 2: MemberState.ALIVE}


def test_a_restart_after_a_counted_death_is_back_at_once(simulator: Make) -> None:
    sim = simulator()
    sim.cluster(4)
    sim.run_until(sim.agreed, 2)
    sim.crash("n2")
    sim.run_until(lambda: sim.all_say("n2", MemberState.DEAD), 10)
    sim.restart("n2", incarnation=2, seeds=["n0"])
    sim.run_until(sim.agreed, 1)


def test_a_restart_that_lost_its_boot_counter_moves_above_what_peers_remember(simulator: Make) -> None:
    sim = simulator()
    sim.add("n0")
    sim.add("n1", incarnation=41, seeds=["n0"])
    sim.run_until(sim.agreed, 2)
    sim.do("n1", io.KeyPut(b"old", b"life"))
    sim.run(1)
    sim.restart("n1", incarnation=1, seeds=["n0"])
    sim.do("n1", io.KeyPut(b"new", b"life"))
    sim.run_until(lambda: dict(sim.nodes["n0"].endpoint.slow_of("n1")) == {b"new": b"life"}, 3)
    assert sim.nodes["n1"].endpoint.identity.incarnation == 42
    assert sim.agreed()


def test_a_restart_whose_peers_still_hold_it_dead_at_a_later_boot_comes_back(simulator: Make) -> None:
    sim = simulator()
    sim.add("n0")
    sim.add("n1", incarnation=41, seeds=["n0"])
    sim.run_until(sim.agreed, 2)
    sim.crash("n1")
    sim.run_until(lambda: sim.all_say("n1", MemberState.DEAD), 10)
    sim.restart("n1", incarnation=1, seeds=["n0"])
    sim.run_until(sim.agreed, 3)
    assert sim.nodes["n1"].endpoint.identity.incarnation == 42


def test_a_node_that_was_cut_off_until_everybody_was_forgotten_rejoins(simulator: Make) -> None:
    sim = simulator(config=quick())
    names = [n.name for n in sim.cluster(5)]
    sim.run_until(sim.agreed, 2)
    sim.partition(["n4"], names[:4])
    sim.run(60)
    assert all(sim.state("n4", name) is None for name in names[:4])
    assert sim.all_say("n4", None)
    sim.heal()
    assert sim.run_until(sim.agreed, 15) > 0


def test_a_seed_that_starts_late_is_still_found(simulator: Make) -> None:
    sim = simulator()
    sim.add("n0")
    sim.crash("n0")
    sim.add("n1", seeds=["n0"])
    sim.run(60)
    sim.restart("n0", incarnation=2)
    sim.run_until(sim.agreed, 12)


def test_a_healed_half_and_half_partition_agrees_within_ten_seconds(simulator: Make) -> None:
    sim = simulator(seed=3)
    names = [n.name for n in sim.cluster(20)]
    sim.run_until(sim.agreed, 3)
    sim.partition(names[:10], names[10:])
    sim.run(60)
    assert sim.state("n0", "n15") is not MemberState.ALIVE
    sim.heal()
    sim.run_until(sim.agreed, 10)
    sim.report.require(cut=100, partitions=1)


def test_a_path_cut_in_one_direction_kills_nobody(simulator: Make) -> None:
    sim = simulator(seed=5)
    sim.cluster(6)
    sim.run_until(sim.agreed, 2)
    sim.cut("n1", "n2")
    sim.run(60)
    assert sim.false_deaths() == 0
    sim.report.require(cut=50)


def test_a_node_that_hears_nobody_does_not_take_the_others_down(simulator: Make) -> None:
    sim = simulator(seed=6)
    sim.cluster(8)
    sim.run_until(sim.agreed, 2)
    for i in range(8):
        sim.cut(f"n{i}", "n7")  # it can send, but hears nothing
    sim.run(60)
    assert all(sim.state(f"n{i}", f"n{j}") is MemberState.ALIVE for i in range(7) for j in range(7))


def test_loss_duplication_and_reordering_kill_nobody(simulator: Make) -> None:
    sim = simulator(seed=8, loss=0.1, duplication=0.1, reordering=0.05)
    sim.cluster(20)
    sim.run_until(sim.agreed, 6)
    sim.run(60)
    assert sim.false_deaths() == 0
    sim.report.require(lost=1000, duplicated=1000)


def test_a_stopped_process_that_resumes_blames_nobody(simulator: Make) -> None:
    sim = simulator(seed=9)
    sim.cluster(6)
    sim.run_until(sim.agreed, 2)
    sim.pause("n3", 45)
    sim.run(45)
    assert sim.all_say("n3", MemberState.DEAD)
    sim.run_until(sim.agreed, 15)
    assert sim.false_deaths() == 0
    assert sim.nodes["n3"].endpoint.counters["stalls"] > 0


def test_stalls_shorter_than_a_suspicion_kill_nobody(simulator: Make) -> None:
    sim = simulator(seed=4)
    sim.cluster(20)
    sim.run_until(sim.agreed, 2)
    sim.load_rows()
    sim.run(3)
    for i in range(8):
        sim.pause(f"n{i}", 2.0)
        sim.run(4.0)
    assert not sim.witness.deaths
    sim.report.require(pauses=8, suspicions_seen=1)


def test_a_sleeper_that_wakes_takes_no_old_news_of_another_sleeper_for_true(simulator: Make) -> None:
    sim = simulator(seed=5)
    sim.cluster(20)
    sim.run_until(sim.agreed, 2)
    sim.load_rows()
    sim.run(3)
    sim.pause("n1", 4.0)
    sim.run(2.5)
    sim.pause("n2", 4.0)
    sim.run(1.4)
    assert all(n.name in ("n1", "n2") or "n1" not in n.up for n in sim.running()), "n1 is dead to all that are awake"
    sim.run_until(sim.agreed, 10)
    told = [event.view for _, event in sim.nodes["n2"].events if isinstance(event, MemberChanged)]
    assert all(view.state.is_up for view in told)


def test_another_name_at_the_same_address_replaces_the_old_tenant_quickly(simulator: Make) -> None:
    sim = simulator()
    sim.cluster(4)
    sim.run_until(sim.agreed, 2)
    old = sim.nodes.pop("n2")
    sim.add("fresh", address=old.address, seeds=["n0"])
    assert not old.running
    assert sim.run_until(lambda: sim.all_say("n2", MemberState.DEAD), 3) < 2
    assert all(sim.state(n.name, "fresh") is MemberState.ALIVE for n in sim.running())


def test_two_hosts_with_one_name_are_a_reported_conflict_and_the_holder_stays(simulator: Make) -> None:
    sim = simulator()
    sim.cluster(3)
    sim.run_until(sim.agreed, 2)
    holder = sim.nodes["n1"]
    twin = sim.add("n1", seeds=["n0"])
    sim.run(20)
    assert sim.report["conflicts"] > 0
    for node in (sim.nodes["n0"], sim.nodes["n2"]):
        view = node.endpoint.member("n1", 0)
        assert view is not None
        assert (view.host, view.port) == holder.address != twin.address
        assert view.state is MemberState.ALIVE


def test_another_clusters_packets_are_counted_and_never_processed(simulator: Make) -> None:
    sim = simulator()
    sim.cluster(2)
    sim.add("stranger", cluster="other", seeds=["n0"])
    sim.run(10)
    assert sim.state("n0", "stranger") is None
    assert sim.state("stranger", "n0") is None
    assert sim.nodes["n0"].endpoint.counters["wrong_cluster"] > 0


def test_the_same_seed_gives_the_same_story(simulator: Make) -> None:
    def story() -> tuple[list[object], int]:
        sim = simulator(seed=11, loss=0.2, duplication=0.1, reordering=0.1)
        sim.cluster(8)
        sim.run(5)
        sim.crash("n3")
        sim.run(10)
        return [n.events for n in sim.nodes.values()], sim.report["delivered"]

    assert story() == story()


def test_a_cluster_of_forty_stays_within_its_bytes_and_its_rows_stay_fresh(simulator: Make) -> None:
    sim = simulator(seed=12)
    sim.cluster(40)
    sim.run_until(sim.agreed, 5)

    def work(ticks: int) -> None:
        for _ in range(ticks):
            for node in sim.running():
                sim.do(node.name, io.RowSet(b"x" * 32))
            sim.run(0.2)

    work(10)
    before = sum(n.bytes_out for n in sim.running())
    work(5)
    per_node_and_second = (sum(n.bytes_out for n in sim.running()) - before) / 40
    assert per_node_and_second < 40_000
    ages = sorted(r.age_s for n in sim.running() for m in sim.running() if (r := n.endpoint.row(m.name, sim.clock(n))))
    assert len(ages) == 40 * 40
    assert ages[int(len(ages) * 0.99)] < 1.5
