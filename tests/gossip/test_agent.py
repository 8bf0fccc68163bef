"""Real agents on real loopback sockets, on both event loops."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

from gossip import (
    GossipAgent,
    GossipBindError,
    GossipConfig,
    GossipEvent,
    Identity,
    LocalError,
    MemberChanged,
    MemberState,
    RowReceived,
    SlowChanged,
    parse_seed,
)
from tests.waiting import until

#: Presets are for production; here the same rules run a few times faster.
FAST = GossipConfig.loopback(
    probe_interval_s=0.2,
    probe_timeout_s=0.1,
    suspicion_mult=3,
    gossip_interval_s=0.05,
    redial_min_s=0.1,
    redial_max_s=0.5,
    session_timeout_s=1.0,
    push_pull_interval_s=1.0,
)

pytestmark = pytest.mark.timeout(60)


class Cluster:
    """Agents of one test, with everything that their listeners heard."""

    def __init__(self) -> None:
        self.agents: dict[str, GossipAgent] = {}
        self.heard: dict[str, list[GossipEvent]] = {}

    async def add(
        self, name: str, *, incarnation: int = 1, port: int = 0, host: str = "127.0.0.1", cluster: str = "test"
    ) -> GossipAgent:
        heard = self.heard[name] = []
        agent = GossipAgent(Identity(name, cluster, incarnation, host, port, b"meta"), FAST, listener=heard.append)
        await agent.start()
        self.agents[name] = agent
        return agent

    async def trio(self) -> list[GossipAgent]:
        agents = [await self.add(name) for name in ("a", "b", "c")]
        for agent in agents[1:]:
            agent.add_seeds([seed(agents[0])])
        await until(lambda: all(len(alive(agent)) == 3 for agent in agents))
        return agents


def on_both_loops(test: Callable[[Cluster], Awaitable[None]]) -> Callable[..., None]:
    """Run a test on asyncio's own loop and on uvloop; validate and close its agents afterwards."""

    async def whole() -> None:
        cluster = Cluster()
        try:
            await test(cluster)
            for agent in cluster.agents.values():
                agent.validate()
        finally:
            for agent in cluster.agents.values():
                await agent.close()

    @pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
    def run(loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(whole())

    run.__name__ = test.__name__  # type: ignore[attr-defined]
    return run


def seed(agent: GossipAgent) -> str:
    host, port = agent.address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def alive(agent: GossipAgent) -> set[str]:
    return {view.name for view in agent.members() if view.state is MemberState.ALIVE}


def state(agent: GossipAgent, name: str) -> MemberState | None:
    view = agent.member(name)
    return view.state if view else None


@on_both_loops
async def test_three_agents_join_by_seed_and_exchange_rows_and_slow_state(cluster: Cluster) -> None:
    a, b, c = await cluster.trio()
    a.set_row(b"load of a")
    b.put(b"key", b"value")
    await until(lambda: (row := c.row("a")) is not None and row.payload == b"load of a")
    await until(lambda: all(dict(agent.slow("b")) == {b"key": b"value"} for agent in (a, b, c)))
    b.delete(b"key")
    await until(lambda: all(not agent.slow("b") for agent in (a, b, c)))
    view = c.member("a")
    assert view is not None
    assert (view.host, view.port, view.meta) == (*a.address, b"meta")
    await until(lambda: all((v := c.member(n)) is not None and v.rtt_s is not None for n in ("a", "b")))
    kinds = {type(event) for event in cluster.heard["c"]}
    assert {MemberChanged, RowReceived, SlowChanged} <= kinds


@on_both_loops
async def test_every_row_is_known_to_all_one_round_after_the_other(cluster: Cluster) -> None:
    agents = await cluster.trio()
    for number in range(20):
        for agent in agents:
            agent.set_row(b"%03d" % number * 100)
        for holder in agents:
            for other in agents:
                name = other.identity.name
                await until(lambda h=holder, n=name, k=number: (r := h.row(n)) and r.payload == b"%03d" % k * 100)  # type: ignore[misc]


@on_both_loops
async def test_an_agent_that_vanishes_without_a_word_is_dead_to_the_others(cluster: Cluster) -> None:
    a, b, c = await cluster.trio()
    await c.close()
    await until(lambda: state(a, "c") is MemberState.DEAD and state(b, "c") is MemberState.DEAD)
    assert alive(a) == alive(b) == {"a", "b"}


@on_both_loops
async def test_a_leaving_agent_is_known_to_have_left(cluster: Cluster) -> None:
    a, b, c = await cluster.trio()
    await c.leave()
    await until(lambda: state(a, "c") is MemberState.LEFT and state(b, "c") is MemberState.LEFT)


@on_both_loops
async def test_a_restart_at_the_same_port_is_the_same_node_in_a_new_boot(cluster: Cluster) -> None:
    a, b, c = await cluster.trio()
    port = c.address[1]
    await c.close()
    again = await cluster.add("c", incarnation=2, port=port)
    again.add_seeds([seed(a)])
    await until(lambda: all((v := x.member("c")) is not None and v.incarnation == 2 for x in (a, b)))
    assert alive(a) == {"a", "b", "c"}


@on_both_loops
async def test_a_seed_that_starts_late_is_dialled_until_it_answers(cluster: Cluster) -> None:
    a = await cluster.add("a")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    a.add_seeds([f"localhost:{port}"])
    await until(lambda: a.snapshot()["addresses_remembered"] == 1)
    await cluster.add("b", port=port)
    await until(lambda: alive(a) == {"a", "b"})


@on_both_loops
async def test_another_cluster_on_the_same_seed_stays_apart(cluster: Cluster) -> None:
    a = await cluster.add("a")
    stranger = await cluster.add("s", cluster="other")
    stranger.add_seeds([seed(a)])
    await until(lambda: a.snapshot()["counters"].get("wrong_cluster", 0) >= 2)
    assert alive(a) == {"a"}
    assert alive(stranger) == {"s"}


@on_both_loops
async def test_a_port_in_use_is_a_clear_error_and_leaks_nothing(cluster: Cluster) -> None:
    a = await cluster.add("a")
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(type=kind) as holder:
            holder.bind(("127.0.0.1", 0))
            if kind == socket.SOCK_STREAM:
                holder.listen()
            port = holder.getsockname()[1]
            with pytest.raises(GossipBindError, match=f"port {port} on 127.0.0.1 is in use"):
                await cluster.add("x", port=port)
    with pytest.raises(GossipBindError):
        await cluster.add("y", port=a.address[1])


@on_both_loops
async def test_a_name_that_does_not_resolve_and_an_address_not_ours_are_clear_errors(cluster: Cluster) -> None:
    with pytest.raises(GossipBindError, match="not an address of this host"):
        await cluster.add("x", host="192.0.2.1")
    with pytest.raises(LocalError, match="not the wildcard"):
        await cluster.add("x", host="0.0.0.0")


@on_both_loops
async def test_two_agents_speak_ipv6(cluster: Cluster) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 in this Python")
    try:
        a = await cluster.add("a", host="::1")
    except GossipBindError:
        pytest.skip("no IPv6 loopback on this host")
    b = await cluster.add("b", host="::1")
    b.add_seeds([seed(a)])
    await until(lambda: alive(a) == alive(b) == {"a", "b"})


@on_both_loops
async def test_garbage_on_both_sockets_is_counted_and_does_no_harm(cluster: Cluster) -> None:
    a = await cluster.add("a")
    with socket.socket(type=socket.SOCK_DGRAM) as sender:
        for data in (b"", b"\x00" * 100, b"\x01garbage", b"x" * 20_000):
            sender.sendto(data, a.address)
    for frame in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x05hello", b"\x00"):
        reader, writer = await asyncio.open_connection(*a.address)
        writer.write(frame)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()
        await writer.wait_closed()
    await until(lambda: a.snapshot()["counters"].get("malformed", 0) >= 4)
    assert alive(a) == {"a"}


@on_both_loops
async def test_silent_connections_are_bounded_in_number_and_in_time(cluster: Cluster) -> None:
    a = await cluster.add("a")
    start = time.monotonic()
    idle = [await asyncio.open_connection(*a.address) for _ in range(FAST.max_sessions + 5)]
    reads = [asyncio.ensure_future(reader.read()) for reader, _ in idle]
    first, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED, timeout=5)
    assert first <= set(reads[FAST.max_sessions :]), "the surplus is turned away while the others may still speak"
    assert await asyncio.wait_for(asyncio.gather(*reads), 30) == [b""] * len(reads)
    assert time.monotonic() - start >= FAST.session_timeout_s
    for _, writer in idle:
        writer.close()
        await writer.wait_closed()


@on_both_loops
async def test_a_listener_that_raises_does_not_stop_the_agent(cluster: Cluster) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reported.append(context))

    def broken(_event: GossipEvent) -> None:
        raise RuntimeError("listener bug")

    a = GossipAgent(Identity("a", "test", 1, "127.0.0.1", 0), FAST, listener=broken)
    await a.start()
    cluster.agents["a"] = a
    b = await cluster.add("b")
    b.add_seeds([seed(a)])
    await until(lambda: alive(a) == alive(b) == {"a", "b"})
    assert "listener" in reported[0]["message"]


@on_both_loops
async def test_closing_twice_and_leaving_alone_are_fine(cluster: Cluster) -> None:
    a = await cluster.add("a")
    await a.leave()
    await a.close()
    await a.close()
    a.set_row(b"ignored")
    with pytest.raises(LocalError, match="starts once"):
        await a.start()


@on_both_loops
async def test_closing_with_streams_open_is_quiet(cluster: Cluster) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reported.append(context))
    a = await cluster.add("a")
    reader, writer = await asyncio.open_connection(*a.address)
    await until(lambda: bool(a._streams._incoming))
    await a.close()
    assert await asyncio.wait_for(reader.read(), 30) == b""
    writer.close()
    await writer.wait_closed()
    assert reported == []


@on_both_loops
async def test_reading_before_the_start_is_an_error(_cluster: Cluster) -> None:
    a = GossipAgent(Identity("a", "test", 1, "127.0.0.1", 0), FAST, listener=lambda _event: None)
    with pytest.raises(LocalError, match="not started"):
        a.members()
    await a.close()


def test_seeds_are_parsed_strictly() -> None:
    assert parse_seed("host.name:7946") == ("host.name", 7946)
    assert parse_seed("[::1]:7946") == ("::1", 7946)
    for wrong in ("host", "host:", ":1", "host:x", "host:70000", "::1:7946", ""):
        with pytest.raises(LocalError):
            parse_seed(wrong)
