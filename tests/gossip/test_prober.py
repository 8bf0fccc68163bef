"""The rules of `gossip.prober`."""

from __future__ import annotations

from collections.abc import Callable

from gossip import GossipConfig, MemberState
from gossip import actions as io
from gossip.encode import encode_packet
from gossip.incarnation import first
from gossip.messages import Ack, Nack, Packet, Ping, PingRequest, Suspect
from tests.gossip.lone import CLUSTER, OTHER, PEER, THIRD, Lone

Make = Callable[..., Lone]


def test_a_silent_member_is_probed_through_peers_and_over_tcp_at_the_same_time(lone: Make) -> None:
    one = lone()
    one.meet("other", OTHER)
    one.answer("other")
    one.meet("peer", PEER)
    one.streams.clear()
    one.wait(one.config.probe_timeout_s + 0.01)
    requests = [p for p in one.parts(PingRequest, OTHER) if isinstance(p, PingRequest) and p.target == "peer"]
    assert len(requests) == 1
    assert PEER in {s.to for s in one.streams}


def test_an_ack_through_a_helper_or_over_tcp_saves_the_member(lone: Make) -> None:
    for over_tcp in (False, True):
        one = lone()
        one.meet("other", OTHER)
        one.meet("peer", PEER)
        one.streams.clear()
        one.wait(one.config.probe_timeout_s + 0.01)
        request = next(p for p in one.parts(PingRequest) if isinstance(p, PingRequest) and p.target == "peer")
        if over_tcp:
            stream = next(s for s in one.streams if s.to == PEER)
            reply = encode_packet(CLUSTER, Packet("peer", first(1), (Ack(request.seq, "peer"),)))
            one.do(io.StreamReplied(stream.session, reply))
        else:
            one.hear("other", Ack(request.seq, "peer"), source=OTHER)
        one.wait(one.config.probe_interval_s - one.config.probe_timeout_s)
        assert one.state("peer") is MemberState.ALIVE
        view = one.endpoint.member("peer", one.now)
        assert view is not None
        assert view.rtt_s is None, "an indirect answer says nothing about the round trip"


def test_a_member_that_nobody_reaches_is_suspected_by_us(lone: Make) -> None:
    one = lone()
    one.meet("peer", PEER)
    one.wait(one.config.probe_interval_s + 0.01)
    assert one.state("peer") is MemberState.SUSPECT
    assert Suspect("peer", first(1), "me") in one.parts(Suspect, PEER)


def test_missing_nacks_are_charged_to_ourselves_and_given_ones_are_not(lone: Make) -> None:
    scores = []
    for nack in (False, True):
        one = lone()
        one.meet("other", OTHER)
        one.answer("other")
        one.meet("peer", PEER)
        one.wait(one.config.probe_timeout_s + 0.01)
        request = next(p for p in one.parts(PingRequest) if isinstance(p, PingRequest) and p.target == "peer")
        if nack:
            one.hear("other", Nack(request.seq), source=OTHER)
        one.answer("other")
        one.wait(one.config.probe_interval_s - one.config.probe_timeout_s)
        scores.append(one.endpoint.health.score)
    assert scores[0] > scores[1]


def test_poor_health_slows_probing_down_and_acks_heal_it(lone: Make) -> None:
    one = lone()
    one.endpoint.health.add(3)
    assert one.endpoint.health.scale(0.5) == 2.0
    one.endpoint.health.add(100)
    assert one.endpoint.health.score == one.config.health_max - 1
    one.endpoint.health.add(-100)
    assert one.endpoint.health.score == 0


def test_a_direct_ack_gives_a_round_trip_time(lone: Make) -> None:
    one = lone()
    one.meet("peer", PEER)
    one.now += 0.02
    assert one.answer("peer") == 1
    view = one.endpoint.member("peer", one.now)
    assert view is not None
    assert view.rtt_s is not None
    assert abs(view.rtt_s - 0.02) < 1e-6


def test_a_ping_is_answered_with_our_own_name_whoever_was_meant(lone: Make) -> None:
    one = lone()
    one.hear("peer", Ping(7, "me"), Ping(8, "somebody-else"), source=THIRD)
    assert one.parts(Ack, THIRD) == [Ack(7, "me"), Ack(8, "me")]


def test_a_request_is_relayed_and_answered_by_ack_or_nack(lone: Make) -> None:
    one = lone()
    one.hear("peer", PingRequest(70, "other", *OTHER), PingRequest(71, "third", *THIRD))
    to_other = next(p for p in one.parts(Ping, OTHER) if isinstance(p, Ping))
    one.hear("other", Ack(to_other.seq, "other"), source=OTHER)
    assert one.parts(Ack, PEER) == [Ack(70, "other")]
    one.wait(one.config.probe_timeout_s + 0.01)
    assert one.parts(Nack, PEER) == [Nack(71)]


def test_relays_are_bounded(lone: Make) -> None:
    one = lone()
    for _ in range(3):
        one.hear("peer", *[PingRequest(i, "other", *OTHER) for i in range(120)])
    assert len(one.parts(Ping, OTHER)) == 256
    assert one.endpoint.counters["relays_refused"] == 360 - 256


def test_two_rounds_probe_everybody(lone: Make) -> None:
    one = lone(GossipConfig.lan(suspicion_mult=16))
    for i in range(20):
        one.meet(f"m{i}", ("10.0.1.1", 1000 + i))
    one.pings.clear()
    seen: set[str] = set()
    for _ in range(40):
        one.wait(one.config.probe_interval_s)
        for target in {ping.target for _, ping in one.pings}:
            one.answer(target)
            seen.add(target)
        one.endpoint.health.add(-8)
    assert seen == {f"m{i}" for i in range(20)}


def test_an_unasked_ack_or_nack_changes_nothing(lone: Make) -> None:
    one = lone()
    one.meet()
    one.hear("peer", Ack(12345, "peer"), Ack(12345, "other"), Nack(999))
    assert one.state() is MemberState.ALIVE
    assert one.endpoint.member("other", one.now) is None


def test_a_stall_of_our_own_blames_nobody(lone: Make) -> None:
    one = lone()
    one.meet()
    one.now += 60
    one._take(one.endpoint.handle_timeout(one.now))
    assert one.state() is MemberState.ALIVE
    assert one.endpoint.counters["stalls"] == 1
