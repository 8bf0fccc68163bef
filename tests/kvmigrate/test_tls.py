"""Transfers over TLS: nothing to read on the way, nobody in between, and no way back to clear text."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from kvmigrate import messages
from kvmigrate.errors import LocalError, RemoteError
from kvmigrate.handshake import PullerHandshake, SourceHandshake
from kvmigrate.pool import BlockPool
from kvmigrate.pull_types import Reason
from kvmigrate.puller import Puller
from kvmigrate.server import ServerLimits, TransferServer
from kvmigrate.tls import PullerTls, SourceTls

from .helpers import BLOCK, SECRET, block_hash, chain, content, flip, store
from .served import LIMITS, at, resolve

Pools = Callable[..., BlockPool]
N = 10
#: Bytes of a block that would be recognised on the wire.
SIGN = 32

#: Sees, and may change, what goes one way; the first argument is "up" (puller to source) or "down".
Touch = Callable[[str, bytes], bytes]


class Proxy:
    """Stands between puller and source, and hears everything."""

    def __init__(self, port: int, touch: Touch = lambda way, data: data, *, terminate: bool = False) -> None:
        self._port = port
        self._touch = touch
        self._terminate = terminate
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.heard = {"up": bytearray(), "down": bytearray()}
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._sockets += [near, far]
                if self._terminate:
                    near = SourceTls().wrap(near)
                    far = PullerTls().wrap(far)
                    self._sockets += [near, far]
                    for sock in (near, far):
                        sock.do_handshake()
                for way, a, b in (("up", near, far), ("down", far, near)):
                    self._threads.append(threading.Thread(target=self._pump, args=(way, a, b)))
                    self._threads[-1].start()

    def _pump(self, way: str, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.heard[way] += data
                target.sendall(self._touch(way, data))
        with contextlib.suppress(OSError):
            socket.socket.shutdown(target, socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        for sock in self._sockets:
            sock.close()


@pytest.fixture
def source(pools: Pools) -> BlockPool:
    pool = pools(64)
    store(pool, chain(N))
    return pool


@pytest.fixture
def target(pools: Pools) -> BlockPool:
    return pools(64)


@pytest.fixture
def serve(source: BlockPool) -> Iterator[Callable[..., TransferServer]]:
    servers: list[TransferServer] = []

    def start(*, encrypt: bool = True, secret: bytes = SECRET, **options: object) -> TransferServer:
        server = TransferServer(source, resolve, secret, "c", encrypt=encrypt, **options)  # type: ignore[arg-type]
        server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def between() -> Iterator[Callable[..., Proxy]]:
    proxies: list[Proxy] = []

    def start(server: TransferServer, *touch: Touch, **options: bool) -> Proxy:
        proxies.append(Proxy(server.port, *touch, **options))
        return proxies[-1]

    yield start
    for proxy in proxies:
        proxy.close()


@pytest.fixture
async def puller(target: BlockPool) -> AsyncIterator[Puller]:
    puller = Puller(target, SECRET, "c", name="target", limits=LIMITS, encrypt=True)
    yield puller
    await puller.close()
    assert target.stats().granted == 0


def holds(pool: BlockPool, n: int) -> None:
    assert len(pool.lookup(chain(N), use=False)) == n
    for h in chain(n):
        lease = pool.lease(h, 0, 1e9)
        assert lease is not None
        found = pool.leased(lease)
        assert found is not None and bytes(found[1]) == content(h)
        pool.release(lease)


def readable(heard: bytes | bytearray) -> bool:
    """Whether blocks, their hashes or our frames can be read in what went over the wire."""
    blocks = any(content(h)[at : at + SIGN] in heard for h in chain(N) for at in range(0, BLOCK, BLOCK // 8))
    return blocks or any(h in heard for h in chain(N)) or b"GVK" in heard


async def test_who_listens_on_the_way_reads_nothing(
    target: BlockPool, puller: Puller, serve: Callable[..., TransferServer], between: Callable[..., Proxy]
) -> None:
    proxy = between(serve())
    result = await puller.pull(proxy.address, range(N), 10)
    assert (result.reason, result.blocks, result.parts[0].way) == (Reason.COMPLETE, N, "tcp")
    holds(target, N)
    assert (
        len(proxy.heard["down"]) > N * BLOCK and not readable(proxy.heard["down"]) and not readable(proxy.heard["up"])
    )


async def test_in_clear_the_same_listener_reads_everything(
    target: BlockPool, serve: Callable[..., TransferServer], between: Callable[..., Proxy]
) -> None:
    """The negative control of the test above."""
    proxy = between(serve(encrypt=False))
    puller = Puller(target, SECRET, "c", limits=LIMITS)
    assert (await puller.pull(proxy.address, range(N), 10)).blocks == N
    await puller.close()
    assert readable(proxy.heard["down"]) and readable(proxy.heard["up"])


async def test_the_connection_stays_warm_and_goes_on_after_a_bad_block(
    source: BlockPool, puller: Puller, serve: Callable[..., TransferServer]
) -> None:
    server = serve()
    assert (await puller.pull(at(server), range(3), 10)).blocks == 3
    flip(source, block_hash(5))
    result = await puller.pull(at(server), range(N), 10)
    assert (result.reason, result.blocks, result.corrupt) == (Reason.CORRUPT, 2, 1)
    assert (await puller.pull(at(server), range(N), 10)).present == 5
    assert server.stats().accepted == 1


async def test_the_wrong_key_is_refused_on_either_side(
    target: BlockPool, puller: Puller, serve: Callable[..., TransferServer]
) -> None:
    server = serve(secret=b"another key")
    result = await puller.pull(at(server), range(N), 10)
    assert (result.reason, result.blocks) == (Reason.REFUSED, 0) and "cluster key" in result.detail
    assert server.stats().lookups == 0
    holds(target, 0)


@pytest.mark.parametrize("knows_the_key", [True, False], ids=["other key", "no channel binding"])
def test_a_puller_without_the_key_or_of_another_channel_is_turned_away(knows_the_key: bool) -> None:
    """The source's own half of the proof, as the puller's half ends the other tests."""
    binding = bytes(32)
    source = SourceHandshake("c", SECRET, bytes(16), binding)
    puller = PullerHandshake("c", "me", SECRET, bytes(16), binding)
    challenge = source.receive(puller.start())
    proof = puller.receive(challenge)
    assert proof is not None
    other = SourceHandshake("c", b"another" if knows_the_key else SECRET, bytes(16), binding[1:] + b"\1")
    other.receive(puller.start())
    assert other.receive(proof) == messages.Error("auth", "wrong cluster key") and not other.done
    assert isinstance(source.receive(proof), messages.Welcome)


async def test_a_man_in_the_middle_is_found_out(
    target: BlockPool, puller: Puller, serve: Callable[..., TransferServer], between: Callable[..., Proxy]
) -> None:
    """He speaks TLS to both sides and passes on all that they say: the proofs are of two different channels."""
    server = serve()
    proxy = between(server, terminate=True)
    result = await puller.pull(proxy.address, range(N), 10)
    assert (result.reason, result.blocks) == (Reason.REFUSED, 0) and "cluster key" in result.detail
    assert proxy.heard["down"]  # the source's proof went through his hands
    assert server.stats().lookups == 0
    holds(target, 0)


async def test_a_source_that_does_not_encrypt_is_named_and_gets_nothing_in_clear(
    target: BlockPool, puller: Puller, serve: Callable[..., TransferServer], between: Callable[..., Proxy]
) -> None:
    server = serve(encrypt=False)
    proxy = between(server)
    result = await puller.pull(proxy.address, range(N), 10)
    assert (result.reason, result.blocks) == (Reason.REFUSED, 0) and "does not encrypt" in result.detail
    assert (server.stats().unauthorized, server.stats().lookups) == (1, 0)
    assert not readable(proxy.heard["up"])
    holds(target, 0)


async def test_a_puller_that_does_not_encrypt_is_told_so(
    target: BlockPool, serve: Callable[..., TransferServer], between: Callable[..., Proxy]
) -> None:
    server = serve()
    proxy = between(server)
    puller = Puller(target, SECRET, "c", limits=LIMITS)
    result = await puller.pull(proxy.address, range(N), 10)
    await puller.close()
    assert (result.reason, result.blocks) == (Reason.REFUSED, 0) and "only over TLS" in result.detail
    assert (server.stats().unauthorized, server.stats().lookups) == (1, 0)
    assert len(proxy.heard["down"]) < 1000


async def test_what_is_changed_on_the_way_breaks_the_connection_and_a_resumed_one_brings_the_rest(
    target: BlockPool, puller: Puller, serve: Callable[..., TransferServer], between: Callable[..., Proxy]
) -> None:
    done = threading.Event()

    def flip_one(way: str, data: bytes) -> bytes:
        if way == "up" or done.is_set() or len(data) < BLOCK:
            return data
        done.set()
        return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]

    proxy = between(serve(), flip_one)
    result = await puller.pull(proxy.address, range(N), 10)
    assert done.is_set() and [part.reason for part in result.parts] == [Reason.BROKEN, Reason.COMPLETE]
    assert result.present == N and result.corrupt == 0
    holds(target, N)


async def test_a_source_that_falls_silent_is_given_up_in_time(
    target: BlockPool, puller: Puller, serve: Callable[..., TransferServer], between: Callable[..., Proxy]
) -> None:
    silent, over = threading.Event(), threading.Event()

    def hold(way: str, data: bytes) -> bytes:
        if way == "down" and len(data) >= BLOCK:
            silent.set()
            over.wait(20)
        return data

    proxy = between(serve(), hold)
    started = asyncio.get_running_loop().time()
    result = await puller.pull(proxy.address, range(N), 8)
    over.set()
    assert silent.is_set() and result.reason is Reason.STALLED
    assert asyncio.get_running_loop().time() - started < 7


async def test_a_peer_that_never_ends_its_tls_handshake_is_cut_off(serve: Callable[..., TransferServer]) -> None:
    server = serve(limits=ServerLimits(handshake_s=0.3))
    with socket.create_connection(("127.0.0.1", server.port)) as drip:
        drip.sendall(b"\x16\x03\x01\x02\x00")
        drip.settimeout(10)
        assert await asyncio.to_thread(drip.recv, 1) == b""
    assert server.stats().broken == 1


@pytest.mark.parametrize("first", [b"\x16", b"\x16\x03\x01\x00\x05hello" * 9, b"\x16\x03\x01\xff\xff" + bytes(70000)])
async def test_nonsense_instead_of_tls_costs_the_connection_only(
    first: bytes, puller: Puller, serve: Callable[..., TransferServer]
) -> None:
    server = serve(limits=ServerLimits(handshake_s=0.5))
    with socket.create_connection(("127.0.0.1", server.port)) as rude:
        with contextlib.suppress(OSError):
            rude.sendall(first)
        rude.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            while await asyncio.to_thread(rude.recv, 4096):
                pass
    assert server.stats().broken == 1
    assert (await puller.pull(at(server), range(N), 10)).blocks == N


async def test_without_a_key_nothing_is_encrypted_and_nothing_sent(
    source: BlockPool, target: BlockPool, serve: Callable[..., TransferServer]
) -> None:
    with pytest.raises(LocalError, match="cluster key"):
        TransferServer(source, resolve, None, "c", encrypt=True)
    server = serve()
    puller = Puller(target, None, "c", limits=LIMITS, encrypt=True)
    result = await puller.pull(at(server), range(N), 10)
    await puller.close()
    assert result.blocks == 0 and "cluster key" in result.detail


def test_only_tls_1_3_is_spoken(serve: Callable[..., TransferServer]) -> None:
    server = serve()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_connection(("127.0.0.1", server.port), 10) as sock,
        pytest.raises((ssl.SSLError, ConnectionResetError)),
    ):
        context.wrap_socket(sock)


def test_each_process_has_a_certificate_of_its_own() -> None:
    near, far = socket.socketpair()
    with near, far:
        bindings = {tls.binding(near) for tls in (SourceTls(), SourceTls())}  # type: ignore[arg-type]
    assert len(bindings) == 2 and all(len(binding) == 32 for binding in bindings)


def test_a_binding_without_a_key_is_refused() -> None:
    with pytest.raises(LocalError):
        SourceHandshake("c", None, bytes(16), bytes(32))
    source, puller = SourceHandshake("c", SECRET, bytes(16), bytes(32)), PullerHandshake("c", "me", SECRET, bytes(16))
    with pytest.raises(RemoteError):
        puller.receive(source.receive(puller.start()))
