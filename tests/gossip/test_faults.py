"""What users of other gossip systems ran into, one test per fault, named after where it was reported.

Most of it is tested in detail elsewhere too; here each story is told once, from its beginning to what must come of it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

import gossip
from gossip import GossipConfig, LocalError, MemberState
from gossip import actions as io
from gossip.encode import encode_part
from gossip.incarnation import first
from gossip.messages import Alive, Dead, MemberRecord, Ping, PushPull, Rows, SlowDelta, SlowDigest, SlowPull, Suspect
from gossip.simulator import Simulator
from tests.gossip.lone import OTHER, PEER, THIRD, Lone, row

MakeLone, MakeSim = Callable[..., Lone], Callable[..., Simulator]
#: The dead are forgotten soon, so that a test sees all of it.
SHORT = GossipConfig.lan(dead_keep_s=20.0, gossip_to_dead_s=5.0, push_pull_interval_s=5.0)


def test_wall_clocks_decide_nothing() -> None:
    asked = {"time", "time_ns", "now", "utcnow", "today", "localtime", "gmtime"}
    for path in Path(gossip.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                wall = node.value.id in {"time", "datetime", "date"} and node.attr in asked
                assert not wall, f"{path.name} asks the wall clock in line {node.lineno}"


def test_clocks_that_differ_and_jump_kill_nobody(simulator: MakeSim) -> None:
    sim = simulator(seed=21)
    sim.cluster(12)
    sim.run(3)
    sim.load_rows()
    for number, name in enumerate(list(sim.nodes)[:4]):
        sim.run(5)
        sim.step_clock(name, 10.0 ** (number + 1))
    sim.run(10)
    sim.report.require(clock_steps=4)
    assert sim.false_deaths() == 0
    assert sim.agreed()


def test_memberlist_311_a_restart_of_all_is_not_outlived_by_deaths_of_their_former_lives(simulator: MakeSim) -> None:
    """4500 nodes restarted at once, and `dead@100` outlived `alive@1`."""
    sim = simulator(seed=22, config=SHORT)
    sim.cluster(20)
    sim.run(4)
    old = [f"n{i}" for i in range(10, 20)]
    for name in old:
        sim.crash(name)
    sim.run_until(lambda: all(sim.all_say(name, MemberState.DEAD) for name in old), 15)
    for name in old:  # half of them have lost the file with their boot counter
        sim.restart(name, incarnation=1 if int(name[1:]) % 2 else 2, seeds=["n0"])
    sim.run_until(sim.agreed, 10)


def test_a_death_heard_in_any_kind_of_message_raises_the_incarnation_that_counts(lone: MakeLone) -> None:
    """memberlist's `deadNode` returns early on a node that is dead already, so that a late alive resurrects it."""
    for evidence in (
        Dead("peer", first(1) + 5, "other"),
        Suspect("peer", first(1) + 5, "other"),
        PushPull((MemberRecord("peer", first(1) + 5, *PEER, b"", MemberState.DEAD, 0),)),
    ):
        one = lone()
        one.meet()
        one.hear("other", Suspect("peer", first(1), "other"), source=OTHER)
        one.hear("other", Dead("peer", first(1), "other"), source=OTHER)
        if isinstance(evidence, PushPull):
            one.request("other", evidence)
        else:
            one.hear("other", evidence, source=OTHER)
        one.hear("third", Alive("peer", first(1) + 5, *PEER, b""), source=THIRD)
        assert one.state() is MemberState.DEAD, evidence
        one.hear("third", Alive("peer", first(1) + 6, *PEER, b""), source=THIRD)
        assert one.state() is MemberState.ALIVE, evidence


def test_a_node_that_sends_a_stale_alive_is_told_of_the_accusation(lone: MakeLone) -> None:
    one = lone()
    one.meet()
    one.hear("other", Suspect("peer", first(1), "other"), source=OTHER)
    one.hear("other", Dead("peer", first(1), "other"), source=OTHER)
    one.sent.clear()
    one.hear("peer", Alive("peer", first(1), *PEER, b""))
    assert [d.incarnation for d in one.parts(Dead, PEER) if isinstance(d, Dead)] == [first(1)]


def test_memberlist_222_an_isolated_node_that_dropped_everybody_rejoins(simulator: MakeSim) -> None:
    sim = simulator(seed=23, config=SHORT)
    sim.cluster(8)
    sim.run(4)
    sim.partition(["n5"], [name for name in sim.nodes if name != "n5"])
    sim.run_until(lambda: len(sim.nodes["n5"].endpoint.membership) == 0, 120)
    sim.run_until(lambda: all(n.name == "n5" or n.endpoint.membership.get("n5") is None for n in sim.running()), 120)
    sim.heal()
    sim.run_until(sim.agreed, 12)


def test_consul_3902_a_new_boot_at_the_same_address_supersedes_the_old_one(simulator: MakeSim) -> None:
    sim = simulator(seed=24)
    sim.cluster(6)
    sim.run(3)
    address = sim.nodes["n4"].address
    sim.crash("n4")
    sim.add("renamed", address=address, seeds=["n0"])
    sim.run_until(lambda: all(sim.state(n.name, "n4") is MemberState.DEAD for n in sim.running()), 4)
    sim.restart("n3", incarnation=2, seeds=["n0"], address=("10.9.9.9", 7946))
    sim.run_until(lambda: sim.agreed() and sim.state("n0", "n3") is MemberState.ALIVE, 6)
    view = sim.nodes["n0"].endpoint.member("n3", 0.0)
    assert view is not None
    assert (view.host, view.incarnation) == ("10.9.9.9", 2)
    assert sim.report["conflicts"] == 0


def test_foca_31_chitchat_161_ghosts_are_forgotten_everywhere_and_talked_of_no_more(simulator: MakeSim) -> None:
    """6000 dead in a cluster of 400 nodes; dead incarnations gossiped for ever."""
    sim = simulator(seed=25, config=SHORT)
    sim.cluster(6)
    for generation in range(8):
        sim.add(f"ghost{generation}", seeds=["n0"])
        sim.do(f"ghost{generation}", io.RowSet(b"load"))
        sim.do(f"ghost{generation}", io.KeyPut(b"model", b"big"))
        sim.run(2)
        sim.crash(f"ghost{generation}")
    sim.run(60)
    for node in sim.running():
        endpoint = node.endpoint
        held = {m.name for m in endpoint.membership} | endpoint.rows.names() | endpoint.slow.names()
        assert not {name for name in held | endpoint.coordinates.names() if name.startswith("ghost")}
        assert not any(f"ghost{g}" in endpoint.membership.broadcasts for g in range(8))


def test_mesh_llm_1756_what_a_departed_peer_served_is_gone_at_once(lone: MakeLone) -> None:
    """A departed peer was "serving" 45 minutes later."""
    one = lone()
    one.meet()
    one.hear("peer", row("peer", 1, 1, 0, b"load"), SlowDelta("peer", 1, 0, 1, 1, 0, ((b"model", b"big", 1),)))
    assert one.endpoint.row("peer", one.now) is not None
    member = one.endpoint.membership.get("peer")
    assert member is not None
    one.endpoint.membership.bury(member, one.now)
    assert one.endpoint.row("peer", one.now) is None
    assert dict(one.endpoint.slow_of("peer")) == {}
    assert one.endpoint.estimate_rtt_s("me", "peer") is None


def test_mesh_llm_242_a_report_of_death_is_verified_before_it_is_believed(lone: MakeLone) -> None:
    one = lone()
    one.meet()
    one.answer("peer")
    one.hear("liar", Dead("peer", first(1), "liar"), source=OTHER)
    assert one.state() is MemberState.SUSPECT
    assert one.answer("peer") == 1, "it is asked itself, at once"
    assert one.parts(Suspect, PEER), "and told, so that it can refute"
    one.hear("peer", Alive("peer", first(1) + 1, *PEER, b""))
    assert one.state() is MemberState.ALIVE


def test_consul_5567_one_sick_node_does_not_get_others_declared_dead(simulator: MakeSim) -> None:
    sim = simulator(seed=26)
    sim.cluster(16)
    sim.run(4)
    sim.load_rows()
    sim.run(4)
    for name in sim.nodes:  # it still speaks, but hears only one packet in five
        if name != "n9":
            sim.network.set_loss(name, "n9", 0.8)
    sim.run(30)
    sim.report.require(lost=300)
    others = [n for n in sim.running() if n.name != "n9"]
    assert sim.report["false_incidents"] <= 1
    assert all(n.suspects <= {"n9"} for n in others)


def test_alertmanager_1412_a_value_too_large_for_its_plane_is_refused_loudly(lone: MakeLone) -> None:
    """Above 1400 bytes it was silently never sent. The largest that is taken has to fit, whatever the names."""
    one = lone()
    for event in (
        io.RowSet(b"x" * 1025),
        io.KeyPut(b"k", b"x" * 1025),
        io.KeyPut(b"k" * 65, b""),
        io.KeyPut(b"", b""),
    ):
        with pytest.raises(LocalError, match=r"limit|allowed"):
            one.do(event)
    one.meet()
    one.do(io.RowSet(b"x" * 1024))
    one.do(io.KeyPut(b"k" * 64, b"x" * 1024))
    one.wait(1.0)
    assert any(len(r.payload) == 1024 for part in one.parts(Rows, PEER) if isinstance(part, Rows) for r in part.rows)
    reply = one.request("peer", SlowPull("me", 5, 0, 0))
    assert reply is not None
    (sent,) = reply.parts
    assert isinstance(sent, SlowDelta)
    assert len(sent.entries) == 1


def test_smg_899_an_index_of_thousands_costs_a_few_marks_per_tick_not_its_size(lone: MakeLone) -> None:
    """9.95 MB per second per peer: the whole index at every tick."""
    one = lone()
    one.meet()
    for number in range(5000):
        one.do(io.KeyPut(number.to_bytes(8, "big"), b"x" * 16))
    one.wait(0.5)
    one.sent.clear()
    one.wait(2.0)
    sizes = [len(encode_part(part)) for part in one.parts(SlowDigest) + one.parts(SlowDelta)]
    assert sizes
    assert sum(sizes) / 2.0 < 3 * 5 * one.config.slow_digest_bytes


def test_smg_1102_an_imported_peer_is_pending_until_it_was_heard_from_here(lone: MakeLone) -> None:
    one = lone()
    one.hear("other", Alive("imported", first(1), *PEER, b""), source=OTHER)
    view = one.endpoint.member("imported", one.now)
    assert view is not None
    assert not view.verified
    assert [p.target for to, p in one.pings if to == PEER] == ["imported"]
    one.answer("imported")
    told = [
        event.view.verified for event in one.events if getattr(event, "view", None) and event.view.name == "imported"
    ]
    assert told == [False, True], "and whoever listens hears of it"


def test_smg_1661_a_row_has_one_writer_and_nobody_elses_word_changes_it(lone: MakeLone) -> None:
    one = lone()
    one.meet()
    one.do(io.RowSet(b"mine"))
    one.hear("other", row("me", 5, 99, 0, b"not mine"), row("peer", 1, 3, 500, b"third"), source=OTHER)
    one.hear("other", row("peer", 1, 2, 0, b"second"), row("peer", 2, 9, 0, b"another boot"), source=OTHER)
    own, theirs = one.endpoint.row("me", one.now), one.endpoint.row("peer", one.now)
    assert own is not None and own.payload == b"mine"
    assert theirs is not None and (theirs.seq, theirs.payload) == (3, b"third")


def test_a_ping_for_a_former_tenant_is_answered_by_the_new_one_in_its_own_name(lone: MakeLone) -> None:
    one = lone()
    one.hear("peer", Ping(7, "somebody-else"))
    assert {part.name for part in one.parts(Alive, PEER) if isinstance(part, Alive)} == {"me"}
