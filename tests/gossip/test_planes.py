"""Load rows and slow state through whole endpoints, in virtual time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gossip import GossipConfig, LocalError, RowReceived, SlowChanged
from gossip import actions as io
from gossip.incarnation import first
from gossip.messages import Rows, SlowDelta, SlowDigest, SlowMark, SlowPull, Suspect
from gossip.simulator import SimNode, Simulator
from tests.gossip.lone import OTHER, PEER, Lone, row

MakeLone = Callable[..., Lone]
MakeSim = Callable[..., Simulator]


def measure_row_ages(sim: Simulator, seconds: float) -> list[float]:
    """Every node sets its row every 200 ms; gives all ages as seen by all, sorted."""
    ages = []
    for _ in range(int(seconds / 0.2)):
        for node in sim.running():
            sim.do(node.name, io.RowSet(b"load" * 8))
        for _ in range(4):
            sim.run(0.05)
            views = [n.endpoint.row(m.name, sim.clock(n)) for n in sim.running() for m in sim.running()]
            assert None not in views
            ages += [view.age_s for view in views if view is not None]
    return sorted(ages)


def test_rows_of_three_nodes_stay_younger_than_a_second(simulator: MakeSim) -> None:
    sim = simulator(config=GossipConfig.loopback())
    sim.cluster(3)
    for name in sim.nodes:
        sim.do(name, io.RowSet(b"first"))
    sim.run(1)
    measure_row_ages(sim, 1)
    assert measure_row_ages(sim, 10)[-1] < 0.5


def test_rows_of_thirty_nodes_stay_fresh_with_loss(simulator: MakeSim) -> None:
    sim = simulator(loss=0.1)
    sim.cluster(30)
    for name in sim.nodes:
        sim.do(name, io.RowSet(b"first"))
    sim.run(1.5)
    measure_row_ages(sim, 1.5)
    ages = measure_row_ages(sim, 1.5)
    assert ages[int(len(ages) * 0.99)] < 1.2


def test_an_age_is_counted_across_hops_and_never_by_the_senders_clock(simulator: MakeSim) -> None:
    sim = simulator(latency=(0.001, 0.001))
    sim.cluster(3)
    sim.run(1)
    sim.cut("n1", "n2")
    sim.do("n1", io.RowSet(b"measured once"))
    set_at = sim.now
    sim.run(1.5)
    view = sim.nodes["n2"].endpoint.row("n1", sim.clock(sim.nodes["n2"]))
    assert view is not None
    assert abs(view.age_s - (sim.now - set_at)) < 0.01


def test_an_older_row_never_replaces_a_newer_one_and_the_same_is_reported_once(lone: MakeLone) -> None:
    one = lone()
    one.meet()
    for seq in (2, 1, 2, 3):
        one.hear("other", row("peer", 1, seq, 100, b"%d" % seq), source=OTHER)
    assert [e.row.seq for e in one.told(RowReceived) if isinstance(e, RowReceived)] == [2, 3]


def test_a_row_of_a_stranger_or_of_another_boot_is_not_kept(lone: MakeLone) -> None:
    one = lone()
    one.meet()
    one.hear("peer", row("stranger", 1, 1, 0, b""), row("peer", 2, 1, 0, b""), row("me", 5, 9, 0, b"forged"))
    assert one.endpoint.row("stranger", one.now) is None
    assert one.endpoint.row("peer", one.now) is None
    assert one.endpoint.row("me", one.now) is None
    assert one.endpoint.counters["rows_without_member"] == 2


def test_a_row_is_not_sent_back_to_its_owner_or_to_its_giver(lone: MakeLone) -> None:
    one = lone()
    one.meet("peer", PEER)
    one.meet("other", OTHER)
    one.do(io.RowSet(b"own"))
    one.hear("other", row("peer", 1, 1, 0, b"of peer"), source=OTHER)
    one.wait(0.2)
    assert {r.name for part in one.parts(Rows) if isinstance(part, Rows) for r in part.rows} == {"me"}


def test_a_row_that_is_too_large_is_refused_at_the_api(lone: MakeLone) -> None:
    one = lone()
    with pytest.raises(LocalError, match="1025 bytes"):
        one.do(io.RowSet(b"x" * 1025))
    assert one.endpoint.row("me", one.now) is None


def test_rows_use_only_their_budget_and_each_datagram_stands_alone(
    lone: MakeLone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gossip.rows.MEMBERS_PER_DATAGRAM", 7)
    one = lone(GossipConfig.lan(row_datagrams=3))
    for i in range(20):
        one.meet(f"m{i}", ("10.0.1.1", 1000 + i))
        one.hear(f"m{i}", row(f"m{i}", 1, 1, i, b"x" * 500), source=("10.0.1.1", 1000 + i))
    one.sent.clear()
    one.wait(0.2)
    by_target: dict[object, list[Rows]] = {}
    for to, packet in one.sent:  # every one of them was decoded by itself
        by_target.setdefault(to, []).extend(p for p in packet.parts if isinstance(p, Rows))
    gossiped = [parts for parts in by_target.values() if parts]
    assert len(gossiped) == 3
    for parts in gossiped:
        names = [r.name for part in parts for r in part.rows]
        assert 4 <= len(set(names)) <= len(names) <= 6  # where heads differ, what follows may repeat a row
        assert all(age < 100 for part in parts for age in part.ages)


# --- slow state -------------------------------------------------------------------------------------------------------


def converged(sim: Simulator, owner: str) -> bool:
    truth = dict(sim.nodes[owner].endpoint.slow_of(owner))
    return all(dict(n.endpoint.slow_of(owner)) == truth for n in sim.running())


def test_a_change_is_everywhere_within_half_a_second(simulator: MakeSim) -> None:
    sim = simulator(config=GossipConfig.loopback())
    sim.cluster(3)
    sim.run(2)
    for i in range(20):
        sim.do("n1", io.KeyPut(b"key%d" % i, b"value"))
        assert sim.run_until(lambda: converged(sim, "n1"), 0.5, step=0.01) <= 0.5
        sim.run(0.137)


def test_slow_state_is_gap_free_under_loss_duplication_and_reordering(simulator: MakeSim) -> None:
    sim = simulator(seed=4, loss=0.2, duplication=0.2, reordering=0.2)
    sim.cluster(6)
    sim.run(3)
    changes: dict[str, dict[bytes, tuple[int, bytes | None]]] = {name: {} for name in sim.nodes}

    def check(node: SimNode, _event: object) -> None:
        for owner, truth in changes.items():
            reached = node.endpoint.slow.version(owner)
            held = node.endpoint.slow_of(owner)
            for key, (version, value) in truth.items():
                assert version > reached or node.name == owner or held.get(key) == value
            checked[0] += 1

    checked = [0]
    sim.listener = lambda node, event: check(node, event) if isinstance(event, SlowChanged) else None
    for _ in range(400):
        owner, key = sim.rng.choice(list(sim.nodes)), b"k%d" % sim.rng.randrange(30)
        value = None if sim.rng.random() < 0.3 else b"v%d" % sim.rng.randrange(1000)
        before = sim.nodes[owner].endpoint.slow.version(owner)
        sim.do(owner, io.KeyDeleted(key) if value is None else io.KeyPut(key, value))
        after = sim.nodes[owner].endpoint.slow.version(owner)
        if after > before:
            changes[owner][key] = (after, value)
        sim.run(0.03)
    sim.run_until(lambda: all(converged(sim, name) for name in sim.nodes), 10)
    assert checked[0] > 1000
    assert sim.report["lost"] > 500


def test_a_restart_resets_its_slow_state_everywhere(simulator: MakeSim) -> None:
    sim = simulator()
    sim.cluster(3)
    sim.run(1)
    sim.do("n1", io.KeyPut(b"old", b""))
    sim.run(1)
    assert converged(sim, "n1")
    sim.restart("n1", incarnation=2, seeds=["n0"])
    sim.do("n1", io.KeyPut(b"new", b""))
    sim.run(2)
    assert dict(sim.nodes["n2"].endpoint.slow_of("n1")) == {b"new": b""}
    assert sim.report["resets"] >= 2


def test_fifty_thousand_keys_travel_over_tcp_in_bounded_chunks_and_a_tick_stays_small(simulator: MakeSim) -> None:
    sim = simulator(config=GossipConfig.loopback())
    sim.cluster(3)
    sim.run(1)
    for i in range(50_000):
        sim.do("n1", io.KeyPut(i.to_bytes(9, "big"), b""))
    sim.run_until(lambda: converged(sim, "n1"), 3, step=0.2)
    before = sim.nodes["n1"].bytes_out
    sim.do("n1", io.KeyPut(b"one more!", b""))
    sim.run(1)
    assert converged(sim, "n1")
    assert sim.nodes["n1"].bytes_out - before < 10_000
    assert sim.report["streams"] > 10


def test_owners_with_long_collected_tombstones_still_converge(simulator: MakeSim) -> None:
    config = GossipConfig.lan(tombstone_keep_s=1.0, max_tombstones=16)
    sim = simulator(seed=5, config=config, loss=0.1)
    sim.cluster(4)
    sim.run(1)
    for i in range(600):
        sim.do("n1", io.KeyPut(b"k%d" % (i % 40), b"%d" % i))
        sim.do("n1", io.KeyDeleted(b"k%d" % ((i * 7) % 40)))
        if i == 200:
            sim.partition(["n3"], ["n0", "n1", "n2"])
        if i == 220:
            sim.heal()
        sim.run(0.01)
    sim.run_until(lambda: converged(sim, "n1"), 10)
    assert sim.report["resets"] > 0


def test_whoever_is_behind_asks_by_datagram_for_little_and_over_tcp_for_much(lone: MakeLone) -> None:
    one = lone()
    one.meet()
    one.streams.clear()
    one.hear("peer", SlowDigest((SlowMark("peer", 1, 3),)))
    assert one.parts(SlowPull, PEER) == [SlowPull("peer", 1, 0, 0)]
    one.hear("peer", SlowDigest((SlowMark("peer", 1, 3),)))
    assert len(one.parts(SlowPull, PEER)) == 1, "one pull at a time"
    entries = tuple((b"%d" % i, b"", i) for i in (1, 2, 3))
    one.hear("peer", SlowDelta("peer", 1, 0, 3, 3, 0, entries))
    one.hear("peer", SlowDigest((SlowMark("peer", 1, 5000),)))
    assert [s.to for s in one.streams] == [PEER]


def test_nobody_is_asked_about_strangers_other_boots_or_ourselves(lone: MakeLone) -> None:
    one = lone()
    one.meet()
    one.hear("peer", SlowDigest((SlowMark("ghost", 1, 3), SlowMark("peer", 2, 3), SlowMark("me", 5, 3))))
    assert one.parts(SlowPull) == []


def test_large_values_that_overflow_the_datagrams_come_over_tcp_next(simulator: MakeSim) -> None:
    sim = simulator(config=GossipConfig.loopback())
    sim.cluster(2)
    sim.run(1)
    for i in range(40):
        sim.do("n1", io.KeyPut(b"%d" % i, b"x" * 1024))
    assert sim.run_until(lambda: converged(sim, "n1"), 2) < 1


def test_a_pull_for_what_we_do_not_have_is_not_answered(lone: MakeLone) -> None:
    one = lone()
    one.do(io.KeyPut(b"k", b"v"))
    one.hear("peer", SlowPull("ghost", 1, 0, 0), SlowPull("me", 4, 0, 0), SlowPull("me", 5, 1, 0))
    assert one.parts(SlowDelta) == []
    one.hear("peer", SlowPull("me", 5, 0, 0), incarnation=first(1))
    assert one.parts(SlowDelta) == [SlowDelta("me", 5, 0, 1, 1, 0, ((b"k", b"v", 1),))]


def test_rumours_are_never_starved_by_rows_and_slow_state(lone: MakeLone) -> None:
    one = lone(GossipConfig.lan(row_datagrams=6))
    for i in range(60):
        one.meet(f"m{i}", ("10.0.1.1", 1000 + i))
        one.hear(f"m{i}", row(f"m{i}", 1, 1, i, b"x" * 300), source=("10.0.1.1", 1000 + i))
        one.do(io.KeyPut(b"key%d" % i, b"v" * 1000))
        one.endpoint.membership.broadcasts.drop(f"m{i}")
    one.sent.clear()
    one.hear("m0", Suspect("m1", first(1), "m0"), source=("10.0.1.1", 1000))
    one.wait(0.2)
    first_packets = {to: packet for to, packet in reversed(one.sent) if any(isinstance(p, Rows) for p in packet.parts)}
    assert len(first_packets) == 3
    for packet in first_packets.values():
        assert packet.parts[0] == Suspect("m1", first(1), "m0")
