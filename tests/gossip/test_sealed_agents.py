"""Real agents with a key on real sockets: who lacks it cannot join, be listed, or inject; and keys rotate live."""

from __future__ import annotations

import asyncio
import socket

from gossip import ClusterKey, GossipAgent, Identity, Keyring, MemberChanged, MemberState
from gossip.encode import encode_packet
from gossip.framing import read_frame, write_frame
from gossip.incarnation import first
from gossip.messages import Alive, Left, Packet, PushPull
from tests.gossip.test_agent import FAST, Cluster, alive, on_both_loops, seed, until

KEY, OTHER = ClusterKey.from_root(b"k" * 32), ClusterKey.from_root(b"o" * 32)


async def add(cluster: Cluster, name: str, *keys: ClusterKey) -> tuple[GossipAgent, Keyring]:
    ring = Keyring(keys)
    heard = cluster.heard[name] = []
    agent = GossipAgent(Identity(name, "test", 1, "127.0.0.1", 0), FAST, listener=heard.append, keyring=ring)
    await agent.start()
    cluster.agents[name] = agent
    return agent, ring


def counted(agent: GossipAgent, what: str) -> int:
    counters = agent.snapshot()["counters"]
    assert isinstance(counters, dict)
    return int(counters.get(what, 0))


@on_both_loops
async def test_a_node_without_the_key_can_neither_join_nor_be_listed(cluster: Cluster) -> None:
    (a, _), (b, _) = await add(cluster, "a", KEY), await add(cluster, "b", KEY)
    b.add_seeds([seed(a)])
    await until(lambda: alive(a) == alive(b) == {"a", "b"})
    (keyless, _), (wrong, _) = await add(cluster, "keyless"), await add(cluster, "wrong", OTHER)
    for stranger in (keyless, wrong):
        stranger.add_seeds([seed(a), seed(b)])
        a.add_seeds([seed(stranger)])
    await until(lambda: counted(a, "unsealed") > 2 and counted(a, "unknown_key") > 2)
    await until(lambda: counted(keyless, "sealed_without_key") > 2)
    assert {view.name for agent in (a, b) for view in agent.members()} == {"a", "b"}
    assert alive(keyless) == {"keyless"}
    assert alive(wrong) == {"wrong"}


@on_both_loops
async def test_whoever_lacks_the_key_injects_nothing_by_datagram_or_stream(cluster: Cluster) -> None:
    (a, _), (b, _) = await add(cluster, "a", KEY), await add(cluster, "b", KEY)
    b.add_seeds([seed(a)])
    await until(lambda: alive(a) == alive(b) == {"a", "b"})
    forged = Packet("b", first(9), (Left("b", first(9)), Alive("evil", first(1), "127.0.0.1", 9, b"")))
    before = counted(a, "unsealed")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as attacker:
        attacker.sendto(encode_packet("test", forged), a.address)
    reader, writer = await asyncio.open_connection(*a.address)
    await write_frame(writer, encode_packet("test", Packet("evil", first(1), (PushPull(()),))))
    try:
        await read_frame(reader)
        raise AssertionError("a stream in clear was answered")
    except (asyncio.IncompleteReadError, ConnectionResetError):
        writer.close()
    await until(lambda: counted(a, "unsealed") == before + 2)
    assert alive(a) == {"a", "b"}


@on_both_loops
async def test_a_recorded_datagram_does_nothing_when_it_is_sent_again(cluster: Cluster) -> None:
    (a, _) = await add(cluster, "a", KEY)
    recorded: list[bytes] = []
    take = a.datagram
    a.datagram = lambda data, source: (recorded.append(data), take(data, source))  # type: ignore[assignment, func-returns-value]
    (b, _) = await add(cluster, "b", KEY)
    b.add_seeds([seed(a)])
    await until(lambda: alive(a) == {"a", "b"} and bool(recorded))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as attacker:
        attacker.sendto(recorded[-1], a.address)
        await until(lambda: counted(a, "replayed") == 1)


@on_both_loops
async def test_keys_rotate_without_a_moment_apart(cluster: Cluster) -> None:
    nodes = [await add(cluster, name, KEY) for name in ("a", "b", "c")]
    agents = [agent for agent, _ in nodes]
    for agent in agents[1:]:
        agent.add_seeds([seed(agents[0])])
    await until(lambda: all(alive(agent) == {"a", "b", "c"} for agent in agents))

    async def heard_by_all(payload: bytes) -> None:
        # Each hears of each: so each has also read what was sent to it before, under the key that goes next.
        for agent in agents:
            agent.set_row(payload)
        rows = [(agent, name) for agent in agents for name in "abc"]
        await until(lambda: all((row := agent.row(name)) and row.payload == payload for agent, name in rows))

    for number, step in enumerate(
        [lambda ring: ring.add(OTHER), lambda ring: ring.use(OTHER.id), lambda ring: ring.remove(KEY.id)]
    ):
        for at, (_, ring) in enumerate(nodes):  # one after the other, each hears the others at every moment in between
            step(ring)
            await heard_by_all(f"{number} {at}".encode())
    assert [entry["id"] for entry in agents[0].keyring_view()] == [OTHER.id]
    assert all(alive(agent) == {"a", "b", "c"} for agent in agents)
    assert not [agent for agent in agents if counted(agent, "unknown_key")]
    told = [event for heard in cluster.heard.values() for event in heard if isinstance(event, MemberChanged)]
    assert not [event for event in told if event.view.state is MemberState.DEAD]
    late, _ = await add(cluster, "late", OTHER)
    late.add_seeds([seed(agents[0])])
    await until(lambda: all(alive(agent) == {"a", "b", "c", "late"} for agent in (*agents, late)))
