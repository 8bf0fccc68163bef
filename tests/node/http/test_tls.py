"""TLS on the HTTP port and between nodes, and files that change while a node runs."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

from gossip import ClusterKey, Keyring
from node.cli import main
from node.cli.ask import Unreachable, ask, find_node
from node.errors import SettingsError
from node.tls import PEER_NAME, ClusterTrust, ServerTls
from tests.node.fakes.certificates import Authority
from tests.node.fakes.client import RawAnswer, connect
from tests.node.fakes.cluster import Cluster, Member, cluster
from tests.node.http.bodies import CHAT, chat
from tests.waiting import PATIENCE_S

KEY = "k" * 20


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


@asynccontextmanager
async def secure(authority: Authority, count: int = 2, *, key: str = KEY) -> AsyncIterator[Cluster]:
    """Nodes with one certificate each."""
    async with cluster() as nodes:
        for name in "abc"[:count]:
            await nodes.add(name, cluster_key=key, **files(authority, name))
        await nodes.agree()
        yield nodes


def files(authority: Authority, name: str) -> dict[str, str]:
    certificate, key = authority.issue(name)
    return {"tls_cert": str(certificate), "tls_key": str(key)}


async def send(member: Member, authority: Authority, target: str) -> RawAnswer:
    async with connect("127.0.0.1", member.port, authority.trust()) as client:
        return await client.ask("POST", CHAT, (("x-grapevine-force-target", target),), chat())


async def shown(member: Member, authority: Authority) -> bytes:
    """The certificate that a client sees."""
    async with connect("127.0.0.1", member.port, authority.trust()) as client:
        found: ssl.SSLObject = client.writer.get_extra_info("ssl_object")
        return found.getpeercert(binary_form=True) or b""


@pytest.mark.parametrize("key", [KEY, ""], ids=["cluster key", "no cluster key"])
async def test_clients_and_peers_speak_tls_on_one_port(authority: Authority, key: str) -> None:
    async with secure(authority, key=key) as nodes:
        for target in "ab":
            answer = await send(nodes[0], authority, target)
            assert answer.status == 200 and answer.one("x-grapevine-target") == target
        async with connect("127.0.0.1", nodes[0].port) as client:
            client.writer.write(b"GET /healthz HTTP/1.1\r\nHost: node\r\n\r\n")
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await client.head()


async def test_the_command_line_trusts_the_node_of_its_host_by_the_address_of_peers_too(authority: Authority) -> None:
    """As `drain NAME` calls it; the authority is known to nobody here."""
    async with cluster() as nodes:
        await nodes.add("a", host="0.0.0.0", advertise="127.0.0.2", admin_token="t", **files(authority, "a"))
        words = ["drain", "a", "--admin-token", "t", "--state-dir", str(nodes.folder / "state"), "--json"]
        done = await asyncio.to_thread(CliRunner().invoke, main, words)
        assert done.exit_code == 0 and json.loads(done.stdout)["phase"] == "drained", done.output


async def test_a_large_body_passes_between_nodes_under_tls(authority: Authority) -> None:
    async with secure(authority) as nodes, connect("127.0.0.1", nodes[0].port, authority.trust()) as client:
        body = chat(user="x" * 1_000_000)
        answer = await client.ask("POST", CHAT, (("x-grapevine-force-target", "b"),), body)
        assert answer.status == 200 and nodes[1].fake.received[-1].body == body


async def test_a_node_that_does_not_hold_the_cluster_key_is_not_talked_to(authority: Authority) -> None:
    """Somebody in the middle has a certificate that any client trusts; what peers send is not for him."""
    stranger = await asyncio.to_thread(ServerTls, *authority.issue("stranger"), ClusterTrust(Keyring(), Path("/")))
    heard: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read())
        writer.close()

    async with secure(authority) as nodes:
        server = await asyncio.start_server(listen, "127.0.0.1", 0, ssl=stranger.start())
        async with server:
            meta = nodes[0].node.registry._meta
            port = server.sockets[0].getsockname()[1]
            meta["b"] = meta["b"].__class__(f"127.0.0.1:{port}", tls=True, boot=meta["b"].boot)
            answer = await send(nodes[0], authority, "b")
        assert answer.status == 503 and b"certificate verify failed" in answer.body
        assert not any(heard)


async def test_a_port_that_speaks_tls_and_one_that_does_not_are_one_cluster(authority: Authority) -> None:
    async with cluster() as nodes:
        await nodes.add("a", cluster_key=KEY, **files(authority, "a"))
        await nodes.add("b", cluster_key=KEY)
        await nodes.agree()
        assert (await send(nodes[0], authority, "b")).one("x-grapevine-target") == "b"
        async with connect("127.0.0.1", nodes[0].port, authority.trust()) as client:
            told = json.loads((await client.ask("GET", "/gossip/members")).body)["members"]
        assert [member["url"].partition(":")[0] for member in told] == ["https", "http"]


async def test_a_renewed_certificate_is_shown_to_new_connections_and_a_wrong_one_is_not(authority: Authority) -> None:
    async with secure(authority, 1) as nodes:
        a = nodes[0]
        async with connect("127.0.0.1", a.port, authority.trust()) as old:
            first = await shown(a, authority)
            authority.issue("a")
            await a.node.reloader.look()
            second = await shown(a, authority)
            assert second != first
            authority.issue("other")
            (authority.folder / "a.key").write_bytes((authority.folder / "other.key").read_bytes())
            await a.node.reloader.look()
            assert await shown(a, authority) == second, "half a pair changes nothing"
            assert (await old.ask("GET", "/healthz")).status == 200


async def test_calls_between_nodes_survive_a_rotation_of_the_cluster_key(authority: Authority) -> None:
    async with secure(authority) as nodes:
        sessions = [member.node.client for member in nodes.members]
        old = nodes[0].node.keys.ring.ids[0]
        added = ""
        for step in ("add", "use", "remove"):
            for member in nodes.members:
                keys = member.node.keys
                if step == "add":
                    added = await keys.add("another cluster key")
                elif step == "use":
                    keys.use(added)
                else:
                    keys.remove(old)
                for entry, target in ((0, "b"), (1, "a")):
                    await sessions[entry].close()
                    await sessions[entry].start()  # no connection from before
                    answer = await send(nodes[entry], authority, target)
                    assert answer.one("x-grapevine-target") == target


def test_the_authority_of_a_key_is_that_of_no_other(tmp_path: Path) -> None:
    one, two = (ClusterKey.from_root(bytes([number]) * 32) for number in (1, 2))

    def greet(server: ClusterTrust, client: ClusterTrust, name: str = PEER_NAME) -> None:
        """A handshake in memory."""
        answering = server.answering()
        assert answering is not None
        to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        here = client.calling.wrap_bio(to_client, to_server, server_hostname=name)
        there = answering.wrap_bio(to_server, to_client, server_side=True)
        for side in (here, there, here, there):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()

    def trust(*keys: ClusterKey) -> ClusterTrust:
        return ClusterTrust(Keyring(keys), tmp_path)

    greet(trust(one), trust(one))
    greet(trust(two, one), trust(one, two))
    for server, client in ((trust(one), trust(two)), (trust(two, one), trust(one))):
        with pytest.raises(ssl.SSLCertVerificationError):
            greet(server, client)
    with pytest.raises(ssl.SSLCertVerificationError):
        greet(trust(one), trust(one), "another.name")
    assert list(tmp_path.iterdir()) == [], "no key is left behind"


@pytest.mark.parametrize("wrong", ["missing", "garbage", "swapped", "other key", "passphrase"])
def test_files_that_cannot_be_used_are_told_with_what_to_do(authority: Authority, wrong: str) -> None:
    certificate, key = authority.issue()
    words = {
        "missing": "cannot be read",
        "garbage": "not a certificate",
        "swapped": "not a certificate",
        "other key": "is not the key of",
        "passphrase": "without a passphrase",
    }[wrong]
    if wrong == "missing":
        certificate.unlink()
    elif wrong == "garbage":
        certificate.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    elif wrong == "swapped":
        certificate, key = key, certificate
    elif wrong == "other key":
        key = authority.issue("other")[1]
    else:
        certificate, key = authority.issue(passphrase=b"secret")
    with pytest.raises(SettingsError, match=words):
        ServerTls(certificate, key, ClusterTrust(Keyring(), Path("/"))).start()


async def test_a_connection_that_says_nothing_is_not_waited_for(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.http.greeter.HANDSHAKE_S", 0.1)
    async with secure(authority, 1) as nodes, connect("127.0.0.1", nodes[0].port) as client:
        with suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE_S):
                assert await client.reader.read() == b""


async def test_who_opens_connections_and_says_nothing_locks_nobody_out(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.http.greeter.MAX_HANDSHAKES", 1)
    async with secure(authority, 1) as nodes, connect("127.0.0.1", nodes[0].port) as silent:
        assert (await send(nodes[0], authority, "a")).status == 200
        with suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE_S):
                assert await silent.reader.read() == b"", "it made room, long before its time was over"


async def test_garbage_in_place_of_a_handshake_harms_nobody_else(authority: Authority) -> None:
    async with secure(authority, 1) as nodes:
        for garbage in (b"\x16\x03\x01\xff\xff" + b"\0" * 600, b"\x80" * 50, b"\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", nodes[0].port)) as plain:
                plain.sendall(garbage)
        assert (await send(nodes[0], authority, "a")).status == 200


async def test_the_command_line_believes_the_node_of_its_host_and_no_stranger(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with secure(authority, 1) as nodes:
        state = nodes[0].node.settings.state_dir
        monkeypatch.setattr("node.dirs.default_state_dir", lambda: state)
        url = await asyncio.to_thread(find_node, None, state)
        assert url.startswith("https://")
        assert (await asyncio.to_thread(ask, url, "/gossip/members"))["self"] == "a"
        with pytest.raises(Unreachable, match="SSL_CERT_FILE"):
            await asyncio.to_thread(ask, url.replace("127.0.0.1", "localhost"), "/gossip/members")
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
        assert (await asyncio.to_thread(ask, url.replace("127.0.0.1", "localhost"), "/gossip/members"))["self"] == "a"
