"""A thousand owners: no message of the slow plane grows with them, and what was missed is noticed in bounded time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from gossip import GossipConfig
from gossip import actions as io
from gossip.decode import decode_packet
from gossip.messages import SlowDelta, SlowDigest, SlowPull
from gossip.simulator import Simulator
from tests.gossip.lone import CLUSTER, PEER, Lone

MakeLone, MakeSim = Callable[..., Lone], Callable[..., Simulator]
OWNERS = 1001  # a multiple of 7, 11 and 13: no stride covers it by luck


def delta(name: str, base: int, count: int, key: bytes = b"k") -> SlowDelta:
    upto = base + count
    entries = tuple((key + version.to_bytes(4, "big"), b"value", version) for version in range(base + 1, upto + 1))
    return SlowDelta(name, 1, base, upto, upto, 0, entries)


@pytest.fixture(scope="module")
def crowded() -> Iterator[Lone]:
    """One node that holds the slow state of a thousand others; one of them has thousands of keys."""
    one = Lone(GossipConfig.lan(push_pull_interval_s=600.0)).start()
    for n in range(OWNERS):
        one.meet(f"owner-{n}", (f"10.1.{n // 250}.{n % 250 + 1}", 7946))
        one.hear(f"owner-{n}", delta(f"owner-{n}", 0, 3))
    for chunk in range(50):
        one.hear("owner-0", delta("owner-0", 3 + 100 * chunk, 100))
    one.sent.clear()
    yield one
    one.endpoint.validate()


def test_the_marks_of_a_tick_stay_within_their_bytes(crowded: Lone) -> None:
    for _ in range(300):
        assert len(crowded.endpoint.slow.digest()) <= crowded.config.slow_digest_bytes
    assert len(crowded.endpoint.slow_of("owner-0")) == 5003


def marked(one: Lone) -> list[str]:
    """Whose marks the next tick carries."""
    packet = one.endpoint._hub.packet()
    packet.add(one.endpoint.slow.digest())
    (digest,) = decode_packet(packet.build(), CLUSTER, 9000).parts
    assert isinstance(digest, SlowDigest)
    return [mark.name for mark in digest.marks]


def test_every_owner_is_marked_within_a_bounded_number_of_ticks_and_ours_in_each(crowded: Lone) -> None:
    ticks = [marked(crowded) for _ in range(OWNERS // 4)]
    assert all(tick[0] == "me" for tick in ticks)
    assert {name for tick in ticks for name in tick} >= {f"owner-{n}" for n in range(OWNERS)}


def test_what_moved_last_is_marked_at_once(crowded: Lone) -> None:
    for n in (500, 20):
        crowded.hear(f"owner-{n}", delta(f"owner-{n}", 3, 1))
        assert marked(crowded)[1] == f"owner-{n}"


def test_an_answer_to_a_pull_stays_within_its_datagrams_or_its_chunk(crowded: Lone) -> None:
    crowded.sent.clear()
    crowded.hear("owner-1", SlowPull("owner-0", 1, 0, 0))
    deltas = [p for p in crowded.parts(SlowDelta, PEER) if isinstance(p, SlowDelta)]
    assert len(deltas) == crowded.config.slow_datagrams
    assert deltas[-1].upto < deltas[-1].latest
    chunk = crowded.endpoint.slow.give(SlowPull("owner-0", 1, 0, 0), crowded.config.slow_chunk_bytes)
    assert chunk is not None
    assert sum(len(k) + len(v or b"") for k, v, _ in chunk.entries) <= crowded.config.slow_chunk_bytes


def test_all_copies_together_are_bounded_and_shrink_with_their_members(lone: MakeLone) -> None:
    one = lone(GossipConfig.lan(max_slow_entries=1000))
    one.meet()
    one.meet("other", ("10.0.0.3", 7946))
    for base in range(0, 900, 180):
        one.hear("peer", delta("peer", base, 180))
    one.hear("other", delta("other", 0, 200))
    assert (len(one.endpoint.slow_of("peer")), len(one.endpoint.slow_of("other"))) == (900, 0)
    assert one.endpoint.counters["refused"] == 1
    member = one.endpoint.membership.get("peer")
    assert member is not None
    one.endpoint.membership.bury(member, one.now)
    one.hear("other", delta("other", 0, 200))
    assert len(one.endpoint.slow_of("other")) == 200


def test_an_update_that_everybody_missed_but_one_is_repaired_without_an_exchange(simulator: MakeSim) -> None:
    sim = simulator(seed=4, config=GossipConfig.lan(push_pull_interval_s=600.0))
    sim.cluster(14)
    for name in sim.nodes:
        sim.do(name, io.KeyPut(b"k", name.encode()))
    sim.run(6)
    others = [name for name in sim.nodes if name not in ("n3", "n5")]
    for name in others:
        sim.cut("n3", name)
    sim.do("n3", io.KeyPut(b"late", b"news"))
    sim.run_until(lambda: b"late" in sim.nodes["n5"].endpoint.slow_of("n3"), 3.0)
    sim.run_until(lambda: all(b"late" in sim.nodes[n].endpoint.slow_of("n3") for n in others), 6.0)
