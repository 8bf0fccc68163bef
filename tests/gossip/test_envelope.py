"""Sealing: what a stranger cannot do to a cluster with a key, one attempt per test."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip import ClusterKey, Endpoint, GossipConfig, Identity, Keyring, SealError, envelope
from gossip import actions as io
from gossip.encode import encode_packet
from gossip.envelope import Envelope
from gossip.incarnation import first
from gossip.messages import Alive, Packet, PushPull, SlowDelta
from gossip.replay import WINDOW, ReplayWindow
from gossip.simulator import Simulator
from tests.gossip.lone import HERE, PEER

KEY, OTHER = ClusterKey.from_root(b"k" * 32), ClusterKey.from_root(b"o" * 32)
WORST_NAME = "n" * 64


def sealer(*keys: ClusterKey, cluster: str = "test", seed: int = 1) -> Envelope:
    return Envelope(Keyring(keys), cluster, random.Random(seed).randbytes)


def refused(what: Callable[[], object]) -> str:
    with pytest.raises(SealError) as caught:
        what()
    return caught.value.reason


def test_a_sealed_datagram_opens_once_and_hides_its_text() -> None:
    ours, theirs = sealer(KEY), sealer(KEY, seed=2)
    sealed = ours.seal(b"all my secrets")
    assert b"secret" not in sealed
    assert len(sealed) == len(b"all my secrets") + envelope.OVERHEAD
    assert theirs.open(sealed) == b"all my secrets"
    assert refused(lambda: theirs.open(sealed)) == "replayed"
    assert theirs.opened == {KEY.id: 1}


def test_without_keys_nothing_changes_and_what_is_sealed_is_refused() -> None:
    clear = sealer()
    assert clear.seal(b"\x01x") == clear.open(b"\x01x") == b"\x01x"
    assert clear.seal_request(b"\x01x") == (b"\x01x", None)
    assert clear.seal_reply(b"\x01x", None) == clear.open_reply(b"\x01x", None) == b"\x01x"
    sealed = sealer(KEY).seal(b"x")
    for attempt in (lambda: clear.open(sealed), lambda: clear.open_request(sealed)):
        assert refused(attempt) == "sealed_without_key"


def test_what_is_in_clear_is_refused_by_a_node_with_a_key() -> None:
    ours = sealer(KEY)
    for data in (b"\x01packet", b"", b"\xe5", b"\xe5\x01" + bytes(20)):
        assert refused(lambda data=data: ours.open(data)) == "unsealed"  # type: ignore[misc]
        assert refused(lambda data=data: ours.open_request(data)) == "unsealed"  # type: ignore[misc]
    _, token = ours.seal_request(b"q")
    assert refused(lambda: ours.open_reply(b"\x01packet", token)) == "unsealed"


def test_a_seal_of_another_key_or_for_another_cluster_is_refused() -> None:
    sealed = sealer(KEY).seal(b"x")
    assert refused(lambda: sealer(OTHER).open(sealed)) == "unknown_key"
    assert refused(lambda: sealer(KEY, cluster="away").open(sealed)) == "forged"


@given(st.integers(0, 60), st.integers(1, 255))
def test_a_datagram_with_any_byte_changed_is_refused(at: int, flip: int) -> None:
    sealed = bytearray(sealer(KEY).seal(b"x" * 23))
    sealed[at] ^= flip
    assert refused(lambda: sealer(KEY).open(bytes(sealed))) in {"unsealed", "unknown_key", "forged"}


@given(st.lists(st.integers(0, 300), min_size=1))
def test_a_window_takes_every_counter_once_and_forgets_only_the_old(counters: list[int]) -> None:
    window, taken = ReplayWindow(), set[int]()
    for counter in counters:
        old = bool(taken) and counter <= max(taken) - WINDOW
        assert window.fresh(counter) == (counter not in taken and not old)
        if window.fresh(counter):
            window.mark(counter)
            taken.add(counter)


def test_late_datagrams_pass_within_the_window_and_not_beyond() -> None:
    ours, theirs = sealer(KEY), sealer(KEY, seed=2)
    sent = [ours.seal(bytes([n])) for n in range(WINDOW + 1)]
    assert theirs.open(sent[-1]) == bytes([WINDOW])
    assert theirs.open(sent[1]) == b"\x01"
    assert refused(lambda: theirs.open(sent[0])) == "replayed"


def test_a_forgery_moves_no_window_and_pushes_nobody_out_of_the_table() -> None:
    ours, theirs = sealer(KEY), sealer(KEY, seed=2)
    sealed = ours.seal(b"x")
    for n in range(50):
        forged = sealed[:6] + bytes([n]) * 12 + sealed[18:]
        assert refused(lambda forged=forged: theirs.open(forged)) == "forged"  # type: ignore[misc]
    ahead = sealed[:18] + b"\xff\xff\xff\xff" + sealed[22:]
    assert refused(lambda: theirs.open(ahead)) == "forged"
    assert theirs.sizes == (0, 0)
    assert theirs.open(sealed) == b"x"


@pytest.mark.plain
def test_the_tables_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envelope, "MAX_SESSIONS", 3)
    monkeypatch.setattr(envelope, "MAX_REQUESTS", 2)
    ours = sealer(KEY)
    for seed in range(10, 20):
        ours.open(sealer(KEY, seed=seed).seal(b"x"))
        ours.open_request(sealer(KEY, seed=seed).seal_request(b"q")[0])
    assert ours.sizes == (3, 2)


def test_a_session_whose_counters_are_used_up_is_replaced() -> None:
    ours, theirs = sealer(KEY), sealer(KEY, seed=2)
    before = ours.seal(b"x")
    ours._counter = 1 << 32
    after = ours.seal(b"y")
    assert before[6:18] != after[6:18]
    assert [theirs.open(before), theirs.open(after)] == [b"x", b"y"]


def test_a_request_is_taken_once_and_its_reply_answers_it_alone() -> None:
    ours, theirs = sealer(KEY), sealer(KEY, seed=2)
    one, token_one = ours.seal_request(b"first")
    two, token_two = ours.seal_request(b"second")
    data, token = theirs.open_request(one)
    assert data == b"first"
    assert refused(lambda: theirs.open_request(one)) == "replayed"
    reply = theirs.seal_reply(b"answer", token)
    assert refused(lambda: ours.open_reply(reply, token_two)) == "forged"
    assert ours.open_reply(reply, token_one) == b"answer"
    assert refused(lambda: ours.open_reply(two, token_one)) == "unsealed"


def test_a_datagram_is_no_request_and_a_request_no_datagram() -> None:
    ours = sealer(KEY)
    assert refused(lambda: ours.open_request(ours.seal(b"x"))) == "unsealed"
    assert refused(lambda: ours.open(ours.seal_request(b"x")[0])) == "unsealed"


def test_every_key_of_the_ring_opens_and_the_first_one_seals() -> None:
    old, both, new = sealer(KEY), sealer(KEY, OTHER, seed=2), sealer(OTHER, seed=3)
    assert both.open(old.seal(b"x")) == b"x"
    assert old.open(both.seal(b"y")) == b"y"
    assert refused(lambda: new.open(both.seal(b"y"))) == "unknown_key"
    both.keyring.use(OTHER.id)
    assert new.open(both.seal(b"z")) == b"z"
    both.keyring.remove(KEY.id)
    assert refused(lambda: both.open(old.seal(b"x"))) == "unknown_key"


def test_the_reply_goes_by_the_key_of_its_request_whatever_the_ring_does_meanwhile() -> None:
    ours, theirs = sealer(KEY), sealer(KEY, OTHER, seed=2)
    request, token = ours.seal_request(b"q")
    _, received = theirs.open_request(request)
    theirs.keyring.use(OTHER.id)
    theirs.keyring.remove(KEY.id)
    assert ours.open_reply(theirs.seal_reply(b"a", received), token) == b"a"


def test_the_largest_entry_still_fits_a_sealed_datagram_of_1400_bytes() -> None:
    me = Identity(WORST_NAME, WORST_NAME, (1 << 44) - 1, *HERE)
    endpoint = Endpoint(me, GossipConfig.lan(), random.Random(1), sealer(KEY, cluster=WORST_NAME))
    endpoint._hub.send(
        PEER,
        SlowDelta(WORST_NAME, (1 << 44) - 1, *([(1 << 53) - 9] * 4), ((b"k" * 64, b"v" * 1024, (1 << 53) - 8),)),
    )
    (sent,) = endpoint._hub.drain()
    assert isinstance(sent, io.SendDatagram)
    assert 1300 < len(sent.data) <= 1400


def test_whoever_lacks_the_key_cannot_inject_and_every_attempt_is_counted() -> None:
    endpoint = Endpoint(Identity("me", "test", 1, *HERE), GossipConfig.lan(), random.Random(1), sealer(KEY))
    endpoint.handle(io.Started(), 0.0)
    packet = encode_packet("test", Packet("evil", first(9), (Alive("evil", first(9), *PEER, b""),)))
    table = encode_packet("test", Packet("evil", first(9), (PushPull(()),)))
    stranger, insider = sealer(OTHER, seed=5), sealer(KEY, seed=6)
    endpoint.handle(io.DatagramReceived(PEER, packet), 0.1)
    endpoint.handle(io.DatagramReceived(PEER, stranger.seal(packet)), 0.1)
    genuine = insider.seal(b"not a packet")
    endpoint.handle(io.DatagramReceived(PEER, genuine), 0.1)
    endpoint.handle(io.DatagramReceived(PEER, genuine), 0.1)
    endpoint.handle(io.DatagramReceived(PEER, genuine[:-1] + b"?"), 0.1)
    for number, frame in enumerate((table, stranger.seal_request(table)[0])):
        assert endpoint.handle(io.StreamRequested(number, PEER, frame), 0.1) == [io.CloseStream(number)]
    assert [view.name for view in endpoint.members(0.1)] == ["me"]
    counted = {name: endpoint.counters[name] for name in ("unsealed", "unknown_key", "replayed", "malformed")}
    assert counted == {"unsealed": 2, "unknown_key": 2, "replayed": 2, "malformed": 1}


@pytest.mark.plain
def test_a_sealed_cluster_lives_with_loss_duplicates_and_reordering(
    simulator: Callable[..., Simulator], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sealed(me: Identity, config: GossipConfig, rng: random.Random, **more: Any) -> Endpoint:
        return Endpoint(me, config, rng, Envelope(Keyring([KEY]), me.cluster, rng.randbytes), **more)

    monkeypatch.setattr("gossip.simulator.simulator.Endpoint", sealed)
    sim = simulator(seed=31, loss=0.05, duplication=0.1, reordering=0.1)
    sim.cluster(8)
    sim.run(4)
    sim.load_rows()
    sim.do("n3", io.KeyPut(b"model", b"big"))
    sim.run(8)
    sim.report.require(lost=20, duplicated=50)
    counted = [sum(n.endpoint.counters[name] for n in sim.running()) for name in ("replayed", "forged", "unsealed")]
    assert counted[0] >= sim.report["duplicated"] * 0.9, "each copy is refused"
    assert counted[1:] == [0, 0]
    assert sim.agreed()
    assert all(dict(n.endpoint.slow_of("n3")) == {b"model": b"big"} for n in sim.running())
    assert sim.false_deaths() == 0
