"""zeroconf: the filter by fed records, and two real instances on the loopback interface."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zeroconf import InterfaceChoice, IPVersion

from gossip import Identity, LocalError, parse_seed
from gossip.discovery import SERVICE_TYPE, MdnsDiscovery, instance_name, peers_of
from gossip.identity import is_ip_literal

ME = Identity("me", "c1", 1, "127.0.0.1", 7001)
LAN = Identity("me", "c1", 1, "192.168.1.5", 7001)


def record(cluster: bytes = b"c1", name: bytes = b"peer") -> dict[bytes, bytes | None]:
    return {b"cluster": cluster, b"name": name}


def test_a_peers_of_the_same_cluster_is_taken() -> None:
    assert peers_of(ME, record(), ["127.0.0.1"], 7002) == ["127.0.0.1:7002"]
    assert peers_of(LAN, record(), ["fd00::2", "192.168.1.9"], 7002) == ["192.168.1.9:7002", "[fd00::2]:7002"]
    assert peers_of(LAN, record(), ["fd00::2"], 7002) == ["[fd00::2]:7002"]


@pytest.mark.parametrize(
    ("properties", "addresses", "port"),
    [
        (record(cluster=b"c2"), ["127.0.0.1"], 7002),
        ({b"name": b"peer"}, ["127.0.0.1"], 7002),
        ({b"cluster": None, b"name": b"peer"}, ["127.0.0.1"], 7002),
        (record(name=b"bad name"), ["127.0.0.1"], 7002),
        (record(name=b"\xff"), ["127.0.0.1"], 7002),
        (record(), [], 7002),
        (record(), ["not an address", "0.0.0.0"], 7002),
        (record(), ["127.0.0.1"], None),
        (record(name=b"me"), ["127.0.0.1"], 7001),
        (record(), ["192.168.1.9"], 7002),
    ],
)
def test_what_is_of_no_interest_is_ignored(
    properties: dict[bytes, bytes | None], addresses: list[str], port: int | None
) -> None:
    assert peers_of(ME, properties, addresses, port) == []


def test_another_hosts_loopback_address_is_not_dialled() -> None:
    assert peers_of(LAN, record(), ["127.0.0.1"], 7002) == []


def test_a_namesake_elsewhere_is_reported_so_that_gossip_can_name_the_conflict() -> None:
    assert peers_of(ME, record(name=b"me"), ["127.0.0.1"], 7009) == ["127.0.0.1:7009"]


def test_instance_names_fit_a_label_and_differ_by_cluster_and_address() -> None:
    long = Identity("n" * 64, "c" * 64, 1, "127.0.0.1", 7001)
    assert len(instance_name(long).removesuffix("." + SERVICE_TYPE)) <= 63
    others = [Identity("me", "c2", 1, "127.0.0.1", 7001), Identity("me", "c1", 1, "127.0.0.1", 7002), LAN, ME]
    assert len({instance_name(identity) for identity in others}) == 4


def test_an_address_that_is_not_known_yet_is_refused() -> None:
    with pytest.raises(LocalError, match="start the agent first"):
        MdnsDiscovery(Identity("me", "c1", 1, "127.0.0.1", 0))


def test_zeroconf_is_not_imported_before_discovery_starts() -> None:
    code = "import sys, gossip, gossip.discovery; sys.exit('zeroconf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_two_instances_find_each_other_on_loopback_and_not_the_other_cluster() -> None:
    found: dict[str, set[str]] = {}
    started: list[MdnsDiscovery] = []
    both = asyncio.Event()

    def note(seen: set[str], peer: str) -> None:
        seen.add(peer)
        if found.get("a") and found.get("b"):
            both.set()

    try:
        for name, cluster, port in (("a", "c1", 7101), ("b", "c1", 7102), ("x", "c2", 7103)):
            found[name] = set()
            one = MdnsDiscovery(Identity(name, cluster, 1, "127.0.0.1", port), interfaces=["127.0.0.1"])
            try:
                await one.start(lambda peer, seen=found[name]: note(seen, peer))
            except OSError as error:
                pytest.skip(f"no multicast on loopback here: {error}")
            started.append(one)
        async with asyncio.timeout(60):
            await both.wait()
    finally:
        for one in started:
            await one.close()
            await one.close()
    assert found == {"a": {"127.0.0.1:7102"}, "b": {"127.0.0.1:7101"}, "x": set()}


@given(
    st.dictionaries(st.sampled_from([b"cluster", b"name", b"v"]), st.none() | st.binary() | st.sampled_from([b"c1"])),
    st.lists(st.text(max_size=12) | st.sampled_from(["127.0.0.1", "::1", "fe80::1%eth0", "10.0.0.1"]), max_size=12),
    st.none() | st.integers(0, 65535),
)
def test_whatever_a_record_says_only_addresses_come_of_it(
    properties: dict[bytes, bytes | None], addresses: list[str], port: int | None
) -> None:
    for peer in peers_of(ME, properties, addresses, port):
        host, peer_port = parse_seed(peer)
        assert is_ip_literal(host) and peer_port == port


@pytest.mark.parametrize(("interfaces", "asked"), [((), "all"), (("10.0.0.1", "10.0.1.1"), "named"), (("::1",), "six")])
@pytest.mark.parametrize("has_ipv6", [True, False])
def test_several_interfaces_and_both_families_are_used_where_the_host_has_them(
    monkeypatch: pytest.MonkeyPatch, interfaces: tuple[str, ...], asked: str, has_ipv6: bool
) -> None:
    opened: list[tuple[object, IPVersion]] = []

    def open_zeroconf(*, interfaces: object, ip_version: IPVersion) -> object:
        if ip_version is IPVersion.All and not has_ipv6:
            raise OSError("Address family not supported")
        opened.append((interfaces, ip_version))
        return object()

    monkeypatch.setattr("zeroconf.asyncio.AsyncZeroconf", open_zeroconf)
    MdnsDiscovery(LAN, interfaces=interfaces)._open()
    both = IPVersion.All if has_ipv6 and asked != "named" else IPVersion.V4Only
    assert opened == [(list(interfaces) or InterfaceChoice.All, both)]
