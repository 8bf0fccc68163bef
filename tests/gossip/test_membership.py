"""The rules of `gossip.membership` and `gossip.exchange`, one endpoint at a time."""

from __future__ import annotations

from collections.abc import Callable

from gossip import GossipConfig, IncarnationRaised, MemberChanged, MemberState, NameConflict, SlowReset
from gossip import actions as io
from gossip.incarnation import above, boot_of, first, refutations_of
from gossip.messages import (
    Alive,
    Dead,
    Left,
    MemberRecord,
    Ping,
    PushPull,
    SlowDelta,
    Suspect,
)
from tests.gossip.lone import HERE, OTHER, PEER, THIRD, Lone, row

Make = Callable[..., Lone]
ALIVE, SUSPECT, DEAD, LEFT = MemberState.ALIVE, MemberState.SUSPECT, MemberState.DEAD, MemberState.LEFT


def alive(name: str, incarnation: int, address: tuple[str, int] = PEER, meta: bytes = b"") -> Alive:
    return Alive(name, incarnation, *address, meta)


def record(name: str, incarnation: int, state: MemberState, address: tuple[str, int] = OTHER) -> MemberRecord:
    return MemberRecord(name, incarnation, *address, b"", state, 0)


def buried(one: Lone) -> Lone:
    """A member `peer` of boot 1 that is dead here; `other` is well."""
    one.meet()
    one.meet("other", OTHER)
    one.hear("other", Suspect("peer", first(1), "other"), source=OTHER)
    one.hear("other", Dead("peer", first(1), "other"), source=OTHER)
    assert one.state() is DEAD
    one.sent.clear()
    return one


def test_a_later_boot_is_above_every_refutation_of_an_earlier_one() -> None:
    assert first(2) > first(1) + 60_000
    assert (boot_of(first(7) + 3), refutations_of(first(7) + 3)) == (7, 3)
    assert above(first(2), first(2) + 4) == first(2) + 5
    assert above(first(2), first(9) + 4) == first(10)


def test_a_late_alive_does_not_resurrect_a_dead_member_without_a_higher_incarnation(lone: Make) -> None:
    one = buried(lone())
    one.hear("other", alive("peer", first(1)), source=OTHER)
    assert one.state() is DEAD


def test_a_late_alive_from_another_address_does_not_resurrect_either(lone: Make) -> None:
    one = buried(lone())
    one.hear("other", alive("peer", first(1), THIRD), source=OTHER)
    assert one.state() is DEAD
    one.hear("other", alive("peer", first(1) + 1, THIRD), source=OTHER)
    assert one.state() is ALIVE


def test_a_higher_incarnation_brings_the_dead_back(lone: Make) -> None:
    one = buried(lone())
    one.hear("other", alive("peer", first(1) + 1), source=OTHER)
    assert one.state() is ALIVE
    assert [(e.previous, e.view.state) for e in one.told(MemberChanged)][-1] == (DEAD, ALIVE)


def test_the_highest_incarnation_is_kept_from_a_second_report_of_death(lone: Make) -> None:
    one = buried(lone())
    one.hear("other", Dead("peer", first(1) + 9, "other"), source=OTHER)
    one.hear("other", alive("peer", first(1) + 5), source=OTHER)
    assert one.state() is DEAD
    one.hear("other", alive("peer", first(1) + 10), source=OTHER)
    assert one.state() is ALIVE


def test_the_highest_incarnation_is_kept_from_a_suspicion_of_the_dead(lone: Make) -> None:
    one = buried(lone())
    one.hear("other", Suspect("peer", first(3), "other"), source=OTHER)
    one.hear("other", alive("peer", first(2)), source=OTHER)
    assert one.state() is DEAD


def test_only_a_higher_incarnation_clears_a_suspicion(lone: Make) -> None:
    one = lone()
    one.meet()
    one.hear("other", Suspect("peer", first(1), "other"), source=OTHER)
    one.hear("other", alive("peer", first(1)), source=OTHER)
    assert one.state() is SUSPECT
    one.hear("peer", alive("peer", first(1) + 1))
    assert one.state() is ALIVE


def test_an_accusation_of_an_earlier_incarnation_is_ignored(lone: Make) -> None:
    one = lone()
    one.meet(boot=3)
    one.hear("other", Suspect("peer", first(2) + 7, "other"), Dead("peer", first(2), "other"), source=OTHER)
    assert one.state() is ALIVE


def test_an_accusation_against_ourselves_is_refuted_to_the_accuser_at_once(lone: Make) -> None:
    one = lone(incarnation=5)
    one.meet()
    one.hear("peer", Suspect("me", first(5), "peer"))
    (refutation,) = one.parts(Alive, PEER)
    assert isinstance(refutation, Alive)
    assert refutation.incarnation == first(5) + 1
    assert one.endpoint.identity.incarnation == 5
    one.hear("peer", Suspect("me", first(5), "peer"), Dead("me", first(5), "peer"))
    assert len(one.parts(Alive, PEER)) == 1


def test_an_accusation_of_a_later_boot_moves_us_to_a_boot_above_it_and_asks_to_persist_it(lone: Make) -> None:
    one = lone(incarnation=5)
    one.meet()
    one.hear("peer", Dead("me", first(100) + 3, "peer"))
    assert one.endpoint.identity.incarnation == 101
    assert one.told(IncarnationRaised) == [IncarnationRaised(101)]


def test_an_echo_of_our_own_later_life_at_our_address_moves_us_above_it(lone: Make) -> None:
    one = lone(incarnation=5)
    one.hear("peer", alive("me", first(8), HERE))
    assert one.endpoint.identity.incarnation == 9


def test_confirmations_shorten_a_suspicion_and_repeated_ones_do_not(lone: Make) -> None:
    one = lone(GossipConfig.lan(suspicion_mult=4))
    for i in range(8):
        one.meet(f"m{i}", ("10.0.1.1", 1000 + i))

    def deadline() -> float:
        due = one.endpoint.timers["m0"]
        assert due is not None
        return due - one.now

    one.hear("m1", Suspect("m0", first(1), "m1"))
    longest = deadline()
    one.hear("m1", Suspect("m0", first(1), "m1"))
    assert deadline() == longest
    one.hear("m1", Suspect("m0", first(1), "m2"))
    shorter = deadline()
    one.hear("m1", Suspect("m0", first(1), "m3"))
    assert longest > shorter > deadline() == 4 * 0.5
    view = one.endpoint.member("m0", one.now)
    assert view is not None
    assert view.suspected_by == ("m1", "m2", "m3")


def test_a_suspect_is_told_directly_and_first(lone: Make) -> None:
    one = lone()
    one.meet()
    one.meet("other", OTHER)
    one.hear("other", Suspect("peer", first(1), "other"), source=OTHER)
    to, packet = one.sent[0]
    assert to == PEER
    assert packet.parts[0] == Suspect("peer", first(1), "other")


def test_a_report_of_the_death_of_a_member_held_for_alive_is_checked_first(lone: Make) -> None:
    one = lone()
    one.meet()
    one.answer("peer")
    one.hear("other", Dead("peer", first(1), "other"), source=OTHER)
    assert one.state() is SUSPECT
    assert [to for to, ping in one.pings if ping.target == "peer"] == [PEER]
    one.wait(2)
    assert one.state() is DEAD


def test_a_report_of_the_death_of_a_suspect_is_believed(lone: Make) -> None:
    one = buried(lone())
    assert [e.view.state for e in one.told(MemberChanged) if e.view.name == "peer"] == [ALIVE, SUSPECT, DEAD]


def test_a_dead_entry_in_a_remote_table_is_only_a_doubt(lone: Make) -> None:
    one = lone()
    one.meet()
    one.request("peer", PushPull((record("peer", first(1), ALIVE, PEER), record("other", first(1), ALIVE))))
    one.request("peer", PushPull((record("peer", first(1), ALIVE, PEER), record("other", first(1), DEAD))))
    assert one.state("other") is SUSPECT


def test_the_death_or_departure_of_a_stranger_creates_no_member(lone: Make) -> None:
    one = lone()
    one.hear("peer", Dead("ghost", first(1), "peer"), Left("ghost", first(2)), Suspect("ghost", first(1), "peer"))
    one.request("peer", PushPull((record("ghost", first(1), DEAD), record("ghost2", first(1), LEFT))))
    assert one.state("ghost") is None
    assert one.state("ghost2") is None


def test_a_dead_node_that_speaks_is_told_so_at_most_once_a_second(lone: Make) -> None:
    one = buried(lone())
    one.hear("peer", Ping(1, "me"))
    one.hear("peer", Ping(2, "me"))
    assert one.parts(Dead, PEER) == [Dead("peer", first(1), "me")]


def test_a_stranger_that_speaks_is_asked_for_its_table_at_most_once_a_second(lone: Make) -> None:
    one = lone()
    one.streams.clear()
    one.hear("stranger", Ping(1, "me"), source=THIRD)
    one.hear("stranger", Ping(2, "me"), source=THIRD)
    assert [s.to for s in one.streams] == [THIRD]
    assert one.state("stranger") is None


def test_a_departure_is_believed_from_rumour_and_from_a_table(lone: Make) -> None:
    one = lone()
    one.meet()
    one.meet("other", OTHER)
    one.hear("peer", Left("peer", first(1)))
    one.request("x", PushPull((record("x", first(1), ALIVE, THIRD), record("other", first(1), LEFT))))
    assert (one.state("peer"), one.state("other")) == (LEFT, LEFT)


def test_the_last_packets_of_a_node_that_left_are_not_answered_by_an_accusation(lone: Make) -> None:
    one = lone()
    one.meet()
    one.hear("peer", Left("peer", first(1)))
    one.hear("peer", Ping(1, "me"))
    assert one.parts(Left, PEER) == []


def test_a_node_that_leaves_says_goodbye_and_refutes_nothing_any_more(lone: Make) -> None:
    one = lone()
    one.meet()
    one.do(io.LeaveRequested())
    assert one.parts(Left, PEER) == [Left("me", first(5))]
    one.hear("peer", Dead("me", first(5), "peer"))
    assert one.parts(Alive) == []
    reply = one.request("peer", PushPull(()))
    assert reply is not None
    (table,) = reply.parts
    assert isinstance(table, PushPull)
    assert table.members[0].state is LEFT


def test_a_new_name_at_a_known_address_has_the_old_tenant_probed_at_once(lone: Make) -> None:
    one = lone()
    one.meet("old", PEER)
    assert one.answer("old") == 1
    one.hear("other", alive("fresh", first(1), PEER), source=OTHER)
    assert one.answer("old", by="fresh") == 1  # whatever is answered from there is answered by the new tenant
    assert one.state("old") is DEAD
    assert one.state("fresh") is ALIVE
    assert one.endpoint.counters["replaced"] == 1


def test_the_same_name_elsewhere_with_a_higher_boot_counter_is_a_restart(lone: Make) -> None:
    one = lone()
    one.meet()
    one.hear("peer", alive("peer", first(2), THIRD), source=THIRD, incarnation=first(2))
    view = one.endpoint.member("peer", one.now)
    assert view is not None
    assert (view.host, view.port) == THIRD
    assert one.told(NameConflict) == []


def test_the_same_name_elsewhere_with_the_same_boot_counter_is_a_named_conflict(lone: Make) -> None:
    one = lone()
    one.meet()
    for step in range(3):
        one.hear("peer", alive("peer", first(1) + step, THIRD), source=THIRD)
    view = one.endpoint.member("peer", one.now)
    assert view is not None
    assert (view.host, view.port) == PEER
    assert one.told(NameConflict) == [NameConflict("peer", *THIRD)]
    assert alive("peer", first(1), PEER) in one.parts(Alive, THIRD)


def test_a_ghost_whose_name_runs_elsewhere_in_a_later_boot_does_not_outshout_it(lone: Make) -> None:
    one = lone(incarnation=5)
    one.hear("peer", alive("me", first(6), THIRD))
    assert one.told(NameConflict) == [NameConflict("me", *THIRD)]
    one.hear("peer", Suspect("me", first(6), "peer"))
    assert one.endpoint.identity.incarnation == 5
    one.hear("peer", Dead("me", first(6), "peer"))  # and when that one has died, the name is ours again
    assert one.endpoint.identity.incarnation == 7


def test_a_table_that_is_full_takes_nobody_more(lone: Make) -> None:
    one = lone(GossipConfig.lan(max_members=8))
    for i in range(12):
        one.hear("peer", alive(f"m{i}", first(1), ("10.0.1.1", 1000 + i)))
    assert len(one.endpoint.members(one.now)) == 9
    assert one.endpoint.counters["members_refused"] == 4


def test_rows_and_slow_state_die_with_their_member(lone: Make) -> None:
    one = lone()
    one.meet()
    one.hear("peer", row("peer", 1, 1, 0, b"row"), SlowDelta("peer", 1, 0, 1, 1, 0, ((b"k", b"v", 1),)))
    assert one.endpoint.row("peer", one.now) is not None
    assert dict(one.endpoint.slow_of("peer")) == {b"k": b"v"}
    one.hear("peer", Left("peer", first(1)))
    assert one.endpoint.row("peer", one.now) is None
    assert dict(one.endpoint.slow_of("peer")) == {}
    assert one.told(SlowReset) == [SlowReset("peer")]


def test_a_refutation_keeps_rows_and_slow_state_and_a_restart_drops_them(lone: Make) -> None:
    one = lone()
    one.meet()
    one.hear("peer", row("peer", 1, 1, 0, b"row"), SlowDelta("peer", 1, 0, 1, 1, 0, ((b"k", b"v", 1),)))
    one.hear("peer", alive("peer", first(1) + 1))
    assert dict(one.endpoint.slow_of("peer")) == {b"k": b"v"}
    one.hear("peer", alive("peer", first(2)))
    assert dict(one.endpoint.slow_of("peer")) == {}
    assert one.endpoint.row("peer", one.now) is None


def test_the_dead_are_forgotten_after_their_time_and_their_address_is_still_dialled(lone: Make) -> None:
    one = buried(lone(GossipConfig.lan(dead_keep_s=10, gossip_to_dead_s=5)))
    one.wait(12)
    assert one.state() is None
    one.streams.clear()
    one.wait(30)
    assert PEER in {s.to for s in one.streams}


def test_hearsay_is_marked_until_the_member_itself_was_heard(lone: Make) -> None:
    one = lone()
    one.hear("other", alive("peer", first(1)), source=OTHER)
    view = one.endpoint.member("peer", one.now)
    assert view is not None
    assert not view.verified
    one.hear("peer", Ping(1, "me"))
    view = one.endpoint.member("peer", one.now)
    assert view is not None
    assert view.verified


def test_our_own_name_on_a_datagram_is_never_processed(lone: Make) -> None:
    one = lone()
    one.hear("me", alive("ghost", first(1), OTHER), source=THIRD)
    assert one.state("ghost") is None
    assert one.endpoint.counters["from_own_name"] == 1


def test_whoever_was_stopped_says_that_it_is_back_before_it_hears_of_any_accusation(lone: Make) -> None:
    one = lone()
    for i in range(5):
        one.meet(f"m{i}", ("10.0.1.1", 1000 + i))
    one.now += 3
    one.wait(0)
    told = {to for to, packet in one.sent for p in packet.parts if p == Alive("me", first(5) + 1, *HERE, b"mine")}
    assert {("10.0.1.1", 1000 + i) for i in range(5)} <= told
    assert not one.told(IncarnationRaised)
    one.hear("m0", Suspect("me", first(5), "m1"), source=("10.0.1.1", 1000))
    assert one.endpoint.counters["refutations"] == 0, "what was said of us while we stood still is refuted already"


def test_whoever_was_stopped_believes_no_death_until_it_has_read_on(lone: Make) -> None:
    one = lone()
    one.meet("victim", OTHER)
    one.meet("peer")
    one.hear("peer", Suspect("victim", first(1), "peer"))
    one.now += 6  # longer than any suspicion; its timer and what is in the socket come at once
    one.wait(0)
    one.hear("peer", Dead("victim", first(1), "peer"))
    assert one.state("victim") is SUSPECT
    one.hear("peer", Alive("victim", first(1) + 1, *OTHER, b""))
    assert one.state("victim") is ALIVE
    one.hear("peer", Suspect("victim", first(1) + 1, "peer"))
    one.wait(1.1)
    one.hear("peer", Dead("victim", first(1) + 1, "peer"))
    assert one.state("victim") is DEAD


def test_a_stop_is_noticed_by_whatever_comes_first_a_timer_or_a_datagram(lone: Make) -> None:
    one = lone()
    one.meet("victim", OTHER)
    one.meet("peer")
    one.hear("peer", Suspect("victim", first(1), "peer"))
    one.now += 6
    one.hear("peer", Dead("victim", first(1), "peer"))
    assert one.state("victim") is SUSPECT
    assert one.endpoint.counters["stalls"] == 1


def test_a_suspicion_that_ended_while_we_were_stopped_waits_until_we_have_read_on(lone: Make) -> None:
    one = lone()
    one.meet("victim", OTHER)
    one.hear("peer", Suspect("victim", first(1), "peer"))
    while (due := one.endpoint.next_deadline()) != one.endpoint.timers["victim"]:
        assert due is not None and one.state("victim") is SUSPECT
        one.wait(due - one.now)
    one.now = due + 5.0
    one.wait(0)
    assert one.state("victim") is SUSPECT, "its refutation may be waiting in the socket"
    one.wait(1.1)
    assert one.state("victim") is DEAD
