"""Seeds by name, and the log when nothing answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from gossip import ClusterKey, GossipAgent, Identity, Keyring, LocalError, joinwatch, seeds
from gossip import actions as io
from gossip.identity import Address
from gossip.joinwatch import JoinWatch, reason_of
from gossip.seeds import MAX_ADDRESSES, MAX_NAMES, SeedNames, lookup
from tests.gossip.lone import Lone
from tests.gossip.test_agent import FAST, Cluster, alive, on_both_loops, seed, until

OWN: Address = ("10.0.0.1", 7946)


class Names:
    """A name server whose answers the test writes; with what the followed names led to."""

    def __init__(self, own: Address = OWN) -> None:
        self.answers: dict[str, list[str]] = {}
        self.asked: list[str] = []
        self.dialled: set[Address] = set()
        self.failures: dict[Address, str] = {}
        self.names = SeedNames(own, self._changed, self.failures.__setitem__, self._lookup)

    async def _lookup(self, host: str) -> list[str]:
        self.asked.append(host)
        if host not in self.answers:
            raise OSError(-2, "Name or service not known")
        return self.answers[host]

    def _changed(self, added: tuple[Address, ...], removed: tuple[Address, ...]) -> None:
        assert not self.dialled & set(added)
        assert self.dialled >= set(removed)
        self.dialled = (self.dialled | set(added)) - set(removed)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "RESOLVE_S", 0.01)
    monkeypatch.setattr(seeds, "RETRY_MIN_S", 0.01)


async def test_all_addresses_of_a_name_are_seeds_and_follow_what_the_name_says(quick: None) -> None:
    server = Names()
    server.answers = {"pods": ["10.0.0.7", "10.0.0.8", "fd00::9"], "more": ["10.0.0.8"]}
    server.names.add("pods", 1)
    server.names.add("more", 1)
    server.names.add("pods", 1)
    await until(lambda: server.dialled == {("10.0.0.7", 1), ("10.0.0.8", 1), ("fd00::9", 1)})
    server.answers["pods"] = ["10.0.0.9"]
    await until(lambda: server.dialled == {("10.0.0.8", 1), ("10.0.0.9", 1)})
    await server.names.close()


async def test_a_name_that_is_not_found_is_asked_for_again_and_keeps_what_it_had(quick: None) -> None:
    server = Names()
    server.names.add("late", 1)
    await until(lambda: len(server.asked) >= 3)
    assert server.failures["late", 1] == "cannot be looked up: Name or service not known"
    server.answers["late"] = ["10.0.0.7"]
    await until(lambda: server.dialled == {("10.0.0.7", 1)})
    assert server.failures["late", 1] == ""
    del server.answers["late"]
    asked = len(server.asked)
    await until(lambda: len(server.asked) > asked + 2)
    assert server.dialled == {("10.0.0.7", 1)}
    await server.names.close()


async def test_a_lookup_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    monkeypatch.setattr(seeds, "LOOKUP_TIMEOUT_S", 0.01)
    failures: list[str] = []

    async def hang(host: str) -> list[str]:
        await asyncio.Event().wait()
        return []

    names = SeedNames(OWN, lambda added, removed: None, lambda address, why: failures.append(why), hang)
    names.add("slow", 1)
    await until(lambda: len(failures) >= 2)
    assert set(failures) == {"cannot be looked up: the name service does not answer"}
    await names.close()


async def test_names_and_their_addresses_are_bounded_and_rubbish_is_left_out(quick: None) -> None:
    server = Names(("127.0.0.1", 1))
    server.answers["many"] = ["0.0.0.0", "fe80::1%eth0", "::1", *(f"10.0.{n}.1" for n in range(200))]
    server.names.add("many", 1)
    await until(lambda: len(server.dialled) == MAX_ADDRESSES)
    assert ("::1", 1) not in server.dialled
    for n in range(MAX_NAMES - 1):
        server.names.add(f"name-{n}", 1)
    with pytest.raises(LocalError, match="limit"):
        server.names.add("one-more", 1)
    await server.names.close()


async def test_localhost_is_looked_up_by_the_system() -> None:
    assert "127.0.0.1" in await lookup("localhost")


def test_a_seed_that_was_removed_is_not_dialled_any_more_unless_a_member_lived_there() -> None:
    one = Lone().start()
    one.do(io.SeedsAdded((("10.0.0.7", 1), ("10.0.0.8", 1))))
    one.do(io.SeedsRemoved((("10.0.0.7", 1), ("10.0.0.99", 1))))
    assert [one.endpoint.exchange.book.get((host, 1)) is None for host in ("10.0.0.7", "10.0.0.8")] == [True, False]
    one.endpoint.exchange.book.add_dead(("10.0.0.8", 1), "gone", one.now)
    one.do(io.SeedsRemoved((("10.0.0.8", 1),)))
    kept = one.endpoint.exchange.book.get(("10.0.0.8", 1))
    assert kept is not None
    assert not kept.is_seed
    one.endpoint.validate()


@on_both_loops
async def test_an_agent_joins_through_whichever_address_of_a_name_lives(cluster: Cluster) -> None:
    a = await cluster.add("a")

    async def headless(host: str) -> list[str]:
        assert host == "grapevine.internal"
        return ["127.0.0.9", "127.0.0.1", "127.0.0.8"]

    b = GossipAgent(Identity("b", "test", 1, "127.0.0.1", 0), FAST, listener=lambda event: None, lookup=headless)
    cluster.agents["b"] = b
    await b.start()
    b.add_seeds([f"grapevine.internal:{a.address[1]}"])
    await until(lambda: alive(a) == alive(b) == {"a", "b"})


# --- nothing answers


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    monkeypatch.setattr(joinwatch, "FIRST_S", 0.05)
    caplog.set_level(logging.INFO, "grapevine.gossip")
    return lambda: [record.getMessage() for record in caplog.records]


async def test_when_nothing_answers_the_log_names_each_seed_and_why_and_then_the_success(
    said: Callable[[], list[str]],
) -> None:
    cluster = Cluster()
    try:
        a, b = await cluster.add("a"), await cluster.add("b")
        free = b.address[1]
        await b.close()
        a.add_seeds([f"127.0.0.1:{free}"])
        await until(lambda: any(f"127.0.0.1:{free} refuses the connection" in line for line in said()))
        assert "still trying" in said()[0]
        c = await cluster.add("c", port=free)
        await until(lambda: alive(a) == alive(c) == {"a", "c"})
        await until(lambda: any(line.startswith("joined the cluster") for line in said()))
    finally:
        for agent in cluster.agents.values():
            await agent.close()


async def test_a_missing_key_is_named_in_the_log(said: Callable[[], list[str]]) -> None:
    cluster = Cluster()
    try:
        key = Keyring([ClusterKey.from_root(b"k" * 32)])
        keyed = GossipAgent(Identity("k", "test", 1, "127.0.0.1", 0), FAST, listener=lambda event: None, keyring=key)
        cluster.agents["k"] = keyed
        await keyed.start()
        a = await cluster.add("a")
        a.add_seeds([seed(keyed)])
        keyed.add_seeds([seed(a)])
        await until(lambda: any("this one has none" in line for line in said()))
        await until(lambda: any("closes without an answer: another cluster key or label" in line for line in said()))
        await until(lambda: any("without a cluster key is speaking to this one" in line for line in said()))
    finally:
        for agent in cluster.agents.values():
            await agent.close()


def test_every_kind_of_failure_has_its_words() -> None:
    assert "no node listens" in reason_of(ConnectionRefusedError())
    assert "firewall" in reason_of(TimeoutError())
    assert "another cluster key" in reason_of(asyncio.IncompleteReadError(b"", 4))
    assert reason_of(OSError(113, "No route to host")) == "No route to host"


async def test_what_is_remembered_of_failures_is_bounded() -> None:
    watch = JoinWatch(lambda: 0, dict)
    for n in range(1000):
        watch.failed((f"10.0.0.{n}", 1), "refuses")
    assert len(watch._failures) == joinwatch.MAX_FAILURES
    assert watch.story().count("refuses") == joinwatch.MAX_SHOWN
    watch.failed(("10.0.0.999", 1), "")
    assert "10.0.0.999" not in watch.story()
