"""The source's side of the transfer: serves blocks of the pool to peers, from threads of its own.

Promises:
1. The node's event loop is never blocked: accepting, authentication, lookup and sending happen in threads.
2. Bytes go from shared memory to the socket without a copy in Python, under a lease.
3. Bounds: connections, transfers at a time (beyond it the answer is BUSY), leased bytes for each peer, time of every
   socket call. A peer that breaks the protocol loses its connection and nothing else happens.

What is answered is in `serving`; this has the sockets, the threads and the counters.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from . import messages
from .errors import KvError, LocalError
from .handshake import NO_KEY, Secrets, SourceHandshake
from .leases import MAX_LEASE_S
from .pool import BlockPool
from .serving import LEASE_WINDOW, Describe, Hottest, OnLookup, Resolve, Serving
from .tls import CLIENT_HELLO, SourceTls
from .transport import Deadline, Transport

_JOIN_S: Final = 2.0
_ACCEPT_RETRY_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds of a transfer server; times in seconds."""

    connections: int = 64  #: open at a time; one for each peer stays warm
    spare_s: float = 1.0  #: one that is warm and without a request for so long gives its place to a new one
    transfers: int = 4  #: FETCHes answered at a time; each can fill a link by itself, more only share it
    busy_wait_s: float = 0.25  #: how long a FETCH waits for its turn before it is told BUSY
    handshake_s: float = 5.0
    idle_s: float = 600.0  #: a warm connection without a request
    stall_s: float = 5.0  #: a peer that takes or sends no byte
    fetch_s: float = 60.0  #: one FETCH as a whole

    def __post_init__(self) -> None:
        """Refuse limits that contradict each other."""
        if self.stall_s * LEASE_WINDOW > MAX_LEASE_S:
            raise LocalError(f"stall_s above {MAX_LEASE_S / LEASE_WINDOW} would outlive the leases")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStats:
    """Counters since the start."""

    connections: int  #: open now
    accepted: int
    turned_away: int  #: too many connections
    unauthorized: int
    broken: int  #: connections closed because the peer broke the protocol, stalled or went away in a transfer
    lookups: int
    unlike: int  #: lookups of peers whose blocks are of another fingerprint
    blocks: int  #: sent
    bytes: int
    pinned_blocks: int  #: held for peers of this host, which read them out of the pool file
    pinned_bytes: int
    misses: int
    busy: int
    corrupt: int  #: own blocks found bad after a peer complained


class TransferServer:
    """Serve a pool over TCP.

    `resolve` turns chunk hashes (chain order) into block hashes (chain order); it is called in a transfer thread and
    must be thread-safe; so are `describe`, which gives the fingerprint's readable fields, and `hottest`, which gives
    the chains that are used most, so many blocks in all, and `on_lookup`, which hears of tagged lookups. `secret` is
    the cluster key, or several of them, `label` the cluster's name. `port` 0 picks one. `encrypt`: over TLS or not at
    all, which needs a key.
    """

    def __init__(
        self,
        pool: BlockPool,
        resolve: Resolve,
        secret: Secrets,
        label: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        describe: Describe = dict,
        hottest: Hottest = lambda blocks: (),
        on_lookup: OnLookup = lambda tag, peer, blocks, seconds: None,
        limits: ServerLimits | None = None,
        encrypt: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if encrypt and not secret:
            raise LocalError(NO_KEY)
        self._tls = SourceTls() if encrypt else None
        self._pool = pool
        self._resolve = resolve
        self._describe = describe
        self._hottest = hottest
        self._on_lookup = on_lookup
        self._secret = secret
        self._label = label
        self._address = (host, port)
        self._limits = limits or ServerLimits()
        self._clock = clock
        self._turns = threading.Semaphore(self._limits.transfers)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._open: dict[Transport, threading.Thread] = {}
        self._idle: dict[Transport, float] = {}  # since when, the longest first
        self._closing = threading.Event()
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None

    def rekey(self, secret: Secrets) -> None:
        """Ask new connections for these keys; open ones go on."""
        self._secret = secret

    @property
    def port(self) -> int:
        """The port it listens on; 0 before `start`."""
        return int(self._listener.getsockname()[1]) if self._listener is not None else 0

    def start(self) -> None:
        """Bind and serve; LocalError when the address cannot be had."""
        host, port = self._address
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=64)
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)
            raise LocalError(
                f"KV transfer cannot listen on {host} port {port} ({why}): choose another --kv-port"
            ) from error
        self._acceptor = threading.Thread(target=self._accept, args=(self._listener,), name="kv-accept", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Close all connections and wait a bounded time for their threads. Idempotent."""
        with self._lock:
            listener, self._listener = self._listener, None
            running = dict(self._open)
        if listener is None:
            return
        self._closing.set()
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # close alone does not wake a thread in accept()
        listener.close()
        for transport in running:
            transport.close()
        for thread in [*running.values(), self._acceptor]:
            if thread is not None and thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def stats(self) -> ServerStats:
        """Return the counters as of now."""
        with self._lock:
            c = self._counts
            return ServerStats(
                connections=len(self._open),
                accepted=c["accepted"],
                turned_away=c["turned_away"],
                unauthorized=c["unauthorized"],
                broken=c["broken"],
                lookups=c["lookups"],
                unlike=c["unlike"],
                blocks=c["blocks"],
                bytes=c["bytes"],
                pinned_blocks=c["pinned_blocks"],
                pinned_bytes=c["pinned_bytes"],
                misses=c["misses"],
                busy=c["busy"],
                corrupt=c["corrupt"],
            )

    def _count(self, what: str, n: int = 1) -> None:
        with self._lock:
            self._counts[what] += n

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                if self._closing.is_set():
                    return
                self._count("broken")  # the peer gave up while it waited, or we are out of descriptors: wait for one
                self._closing.wait(_ACCEPT_RETRY_S)
                continue
            self._count("accepted")
            self._begin(Transport(sock))

    def _begin(self, transport: Transport) -> None:
        """Serve a connection in a thread of its own; without room or a thread for it, it is closed."""
        thread = threading.Thread(target=self._serve, args=(transport,), name="kv-serve", daemon=True)
        with self._lock:
            if not self._closing.is_set() and self._has_room():
                try:
                    thread.start()
                except RuntimeError:  # the system has no thread to give now: others may be served later
                    pass
                else:
                    self._open[transport] = thread
                    return
            self._counts["turned_away"] += 1
        transport.close()

    def _has_room(self) -> bool:
        """Whether one more may be open; where there are too many, the one that is idle for longest goes."""
        if len(self._open) < self._limits.connections:
            return True
        transport, since = next(iter(self._idle.items()), (None, 0.0))
        if transport is None or self._clock() - since < self._limits.spare_s:
            return False
        del self._idle[transport], self._open[transport]
        transport.close()  # its peer dials again when it has use for it
        return True

    def _serve(self, transport: Transport) -> None:
        try:
            peer = self._welcome(transport)
            if peer is not None:
                self._answer(transport, peer)
        except _Idle:
            pass
        except (OSError, KvError):
            self._count("broken")
        finally:
            with self._lock:
                self._open.pop(transport, None)
            transport.close()

    def _welcome(self, transport: Transport) -> str | None:
        """Authenticate; returns the peer's name, None when it was refused."""
        deadline = self._deadline(self._limits.handshake_s)
        if not self._same_encryption(transport, deadline):
            self._count("unauthorized")
            return None
        binding = transport.encrypt(self._tls, deadline) if self._tls is not None else b""
        nonce = secrets.token_bytes(messages.NONCE_BYTES)
        shake = SourceHandshake(self._label, self._secret, nonce, binding)
        while not shake.done:
            answer = shake.receive(transport.receive(deadline))
            transport.send(answer, deadline)
            if isinstance(answer, messages.Error):
                self._count("unauthorized")
                return None
        return shake.peer

    def _same_encryption(self, transport: Transport, deadline: Deadline) -> bool:
        """Whether the peer begins as we are told to; otherwise it is told what is wrong, in clear."""
        starts_tls = transport.first_byte(deadline) == CLIENT_HELLO
        if starts_tls == (self._tls is not None):
            return True
        transport.skip()  # a connection that is closed with bytes unread loses the answer
        words = (
            "only over TLS: start yours with --kv-tls too" if self._tls is not None else "in clear, without --kv-tls"
        )
        transport.send(messages.Error("tls", f"this node exchanges KV blocks {words}"), deadline)
        return False

    def _answer(self, transport: Transport, peer: str) -> None:
        """Answer requests until the peer goes away."""
        serving = Serving(
            self._pool,
            transport,
            peer,
            resolve=self._resolve,
            describe=self._describe,
            hottest=self._hottest,
            turns=self._turns,
            busy_wait_s=self._limits.busy_wait_s,
            count=self._count,
            on_lookup=self._on_lookup,
            clock=self._clock,
        )
        try:
            while True:
                request = self._next(transport, pinning=serving.pinning)
                serving.answer(request, self._deadline(self._limits.fetch_s))
        finally:
            serving.close()

    def _next(self, transport: Transport, *, pinning: bool) -> messages.Message:
        idle = Deadline(self._clock, self._limits.idle_s, self._limits.idle_s)
        if not pinning:
            with self._lock:
                self._idle[transport] = self._clock()
        try:
            if not transport.wait_readable(idle):
                raise _Idle
        except TimeoutError as error:
            raise _Idle from error
        finally:
            with self._lock:
                self._idle.pop(transport, None)
        return transport.receive(self._deadline(self._limits.handshake_s))

    def _deadline(self, whole_s: float) -> Deadline:
        return Deadline(self._clock, whole_s, self._limits.stall_s)


class _Idle(Exception):
    pass
