"""Doing what the plan says, and saying what was really done."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from random import Random

import aiohttp
import psutil

from chaos_run.client import Clients
from chaos_run.cluster import ADMIN_TOKEN, STOP_GRACE_S, Cluster, NotReady
from chaos_run.plan import Strike, What

#: Requests of one burst.
BURST = 12
#: Pieces of nonsense for each port, and their longest size in bytes.
NONSENSE, MAX_NONSENSE = 12, 1400
ADMIN_S = 5.0
#: How nonsense may begin: as HTTP, TLS, or something of ours would.
_BEGINNINGS = (
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n{",
    b"POST /peer/v1/completions HTTP/1.1\r\nx-grapevine-plan: e30\r\n\r\n",
    b"\x16\x03\x01",
    b"\x85\xa1v",
)


class Striker:
    """Carries out strikes on a cluster."""

    def __init__(
        self,
        cluster: Cluster,
        clients: Clients,
        session: aiohttp.ClientSession,
        *,
        rng: Random,
        say: Callable[[str], None],
    ) -> None:
        self._cluster = cluster
        self._clients = clients
        self._session = session
        self._rng = rng
        self._say = say
        self._locks = {name: asyncio.Lock() for name in cluster.nodes}
        #: What was done, by kind; what could not be done, in words.
        self.done: Counter[str] = Counter()
        self.failed: list[str] = []

    async def strike(self, strike: Strike) -> None:
        """One strike, from its beginning until its node is well again."""
        actions = {
            What.KILL_NODE: self._kill_node,
            What.KILL_ENGINE: self._kill_engine,
            What.STOP_NODE: self._stop_node,
            What.STOP_ENGINE: self._stop_engine,
            What.CUT_LINK: self._cut,
            What.CUT_NODE: self._cut,
            What.DRAIN: self._drain,
            What.RESTART: self._restart,
            What.FILL: self._fill,
            What.GARBAGE: self._garbage,
        }
        try:
            # One after the other: a strike may take longer than was planned, on a slow machine.
            async with AsyncExitStack() as locks:
                for name in sorted(strike.nodes):
                    await locks.enter_async_context(self._locks[name])
                done = await actions[strike.what](strike)
            if done:
                self.done[strike.what.value] += 1
                self._say(
                    f"{strike.at_s:7.1f} s  {strike.what.value} {' '.join(strike.nodes)} ({strike.lasts_s:.1f} s)"
                )
        except (NotReady, OSError, aiohttp.ClientError, TimeoutError, psutil.Error) as error:
            self.failed.append(f"{strike.what.value} {strike.node}: {error!r}")
            self._say(f"  failed: {self.failed[-1]}")

    async def _kill_node(self, strike: Strike) -> bool:
        node = self._cluster.nodes[strike.node]
        with self._cluster.trouble("killed", strike.node):
            if not node.signal(signal.SIGKILL):
                return False
            assert node.process is not None
            await node.process.wait()
            await asyncio.sleep(strike.lasts_s)
            await self._cluster.start(strike.node)
            await self._cluster.wait_ready(self._session, strike.node)
        return True

    async def _kill_engine(self, strike: Strike) -> bool:
        engine = self._cluster.nodes[strike.node].engine()
        if engine is None:
            return False
        with self._cluster.trouble("engine killed", strike.node):
            engine.kill()
        return True

    async def _stop_node(self, strike: Strike) -> bool:
        node = self._cluster.nodes[strike.node]
        with self._cluster.trouble("stopped", strike.node):
            if not node.signal(signal.SIGSTOP):
                return False
            await asyncio.sleep(strike.lasts_s)
            node.signal(signal.SIGCONT)
        return True

    async def _stop_engine(self, strike: Strike) -> bool:
        engine = self._cluster.nodes[strike.node].engine()
        if engine is None:
            return False
        with self._cluster.trouble("engine stopped", strike.node):
            engine.suspend()
            await asyncio.sleep(strike.lasts_s)
            # Its node may have ended it meanwhile. psutil knows a process from a later one with the same id.
            with contextlib.suppress(psutil.NoSuchProcess):
                engine.resume()
        return True

    async def _cut(self, strike: Strike) -> bool:
        one = self._cluster.nodes[strike.node].number
        others = [node.number for node in self._cluster.nodes.values() if node.number != one]
        if strike.peer:
            others = [self._cluster.nodes[strike.peer].number]
        with self._cluster.trouble("cut", *strike.nodes):
            for other in others:
                await asyncio.to_thread(self._cluster.network.cut, one, other)
            await asyncio.sleep(strike.lasts_s)
            for other in others:
                await asyncio.to_thread(self._cluster.network.heal, one, other)
        return True

    async def _drain(self, strike: Strike) -> bool:
        # What runs there goes on while it moves: to be told later than the other engine begins is no excuse.
        with self._cluster.trouble("drained", strike.node, excuses=False):
            await self._admin(strike.node, "drain")
            await asyncio.sleep(strike.lasts_s)
            await self._admin(strike.node, "undrain")
        return True

    async def _restart(self, strike: Strike) -> bool:
        node = self._cluster.nodes[strike.node]
        with self._cluster.trouble("drained", strike.node, excuses=False):
            if not await node.stop(STOP_GRACE_S):
                self.failed.append(f"restart: {strike.node} did not end by itself")
        with self._cluster.trouble("restarting", strike.node):
            await self._cluster.start(strike.node)
            await self._cluster.wait_ready(self._session, strike.node)
        return True

    async def _admin(self, name: str, what: str) -> None:
        headers = {"authorization": f"Bearer {ADMIN_TOKEN}"}
        timeout = aiohttp.ClientTimeout(total=ADMIN_S)
        url = f"{self._cluster.nodes[name].url}/admin/{what}"
        async with self._session.post(url, headers=headers, timeout=timeout) as answer:
            if answer.status >= 300:
                raise OSError(f"{what} of {name}: status {answer.status}")

    async def _fill(self, strike: Strike) -> bool:
        for _ in range(BURST):
            self._clients.send(self._session, self._clients.asker.long(), strike.node)
        return True

    async def _garbage(self, strike: Strike) -> bool:
        node = self._cluster.nodes[strike.node]
        pieces = [self._nonsense() for _ in range(NONSENSE)]
        await asyncio.to_thread(_send_nonsense, node.host, node.ports, pieces)
        return True

    def _nonsense(self) -> bytes:
        return self._rng.choice(_BEGINNINGS) + self._rng.randbytes(self._rng.randint(0, MAX_NONSENSE))


def _send_nonsense(host: str, ports: dict[str, int], pieces: list[bytes]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        for piece in pieces:
            udp.sendto(piece, (host, ports["gossip"]))
    for port in ports.values():
        for piece in pieces:
            with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1.0) as tcp:
                tcp.sendall(piece)
