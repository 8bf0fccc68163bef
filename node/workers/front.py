"""The port of a node with workers: each connection goes to the worker with least to do; workers are kept alive.

Rules
1. Accepted sockets are handed out, not shared: `SO_REUSEPORT` would pin connections by a hash (of 16 of them 11 or
   more to one of two workers, in one of five cases), and what waits at a worker that dies would be lost with it.
2. Least to do is fewest connections, those with a request counted twice. A worker whose loop does not turn gets none.
3. A worker that is gone is started anew, at once if it lived for long, else later and later.
4. What the node knows is asked over a Unix socket (`inner.py`), after every worker has told what it had to tell: an
   answer of `/metrics` counts every request that was over before it was asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from node.errors import LocalError
from node.http.router import Router
from node.http.server import CUT_S, HttpServer
from node.metrics import Sample
from node.workers import down
from node.workers.desk import Parts
from node.workers.inner import InnerRouter, listen_inside
from node.workers.process import START_S, WorkerProcess

#: Seconds between two looks after the workers; and that they get to tell what they have to tell.
TICK_S = 0.5
SETTLE_S = 2.0
#: Seconds until a worker that ended is started anew: doubled each time, forgotten after it has lived for so long.
AGAIN_MIN_S = 0.1
AGAIN_MAX_S = 10.0
LIVED_S = 30.0
#: Connections accepted at once before something else gets its turn; seconds until it is tried again after an error.
ACCEPT_AT_ONCE = 64
RETRY_S = 0.1
#: Seconds between two looks whether all answers are over, while the node stops.
LOOK_S = 0.05

_log = logging.getLogger("grapevine.workers")


class Front:
    """The workers of a node. ``hello`` is what each is greeted with, by its number; ``load`` the node's, packed."""

    def __init__(
        self, count: int, parts: Parts, *, hello: Callable[[int], down.Hello], load: Callable[[], bytes], inside: Path
    ) -> None:
        self._parts = parts
        self._hello = hello
        self._load = load
        self._inside = inside
        self._inner: HttpServer | None = None
        self._workers: dict[int, WorkerProcess] = {}
        self._numbers = range(1, count + 1)
        self._again = dict.fromkeys(self._numbers, AGAIN_MIN_S)
        self._starting: set[asyncio.Task[None]] = set()
        self._ticking: asyncio.Task[None] | None = None
        self._listener: socket.socket | None = None
        self._accepting = False
        self._stopping = False
        #: Workers that ended and were not told to.
        self.restarts = 0
        self._loop = asyncio.get_running_loop()
        self._served = asyncio.Event()

    # --- life

    async def start(self, listener: socket.socket, router: Router) -> None:
        """Start the workers; returns when the first of them serves.

        :raises LocalError: the socket inside cannot be made, or no worker comes up.
        """
        inside = listen_inside(self._inside)
        self._inner = HttpServer(InnerRouter(router, self.settle))
        await self._inner.start_inside(inside)
        self._listener = listener
        await asyncio.gather(*(self._begin(number) for number in self._numbers))
        self._ticking = self._loop.create_task(self._tick(), name="grapevine-workers")
        try:
            async with asyncio.timeout(START_S):
                await self._served.wait()
        except TimeoutError:
            raise LocalError(f"no worker serves after {START_S:.0f} s; the log says why") from None

    async def stop_accepting(self) -> None:
        """Take no new connections; open ones end with the answers that they wait for, idle ones now."""
        self._stopping = True
        self._pause()
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        self._tell(down.Finish())

    async def idle(self) -> None:
        """Wait until no request is being answered."""
        while True:
            await self.settle()
            if not self.answering:
                return
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        """End every worker, and what is served inside. Idempotent."""
        self._stopping = True
        await self.stop_accepting()
        tasks = [*self._starting] if self._ticking is None else [self._ticking, *self._starting]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        workers = tuple(self._workers.values())
        self._tell(down.Close())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CUT_S + 1.0):
                for worker in workers:
                    if worker.ready.is_set():
                        await worker.gone.wait()
        for worker in workers:
            worker.kill()
        await asyncio.gather(*(worker.reap() for worker in workers))
        if self._inner is not None:
            await self._inner.close()
        self._inside.unlink(missing_ok=True)

    # --- what the node tells the workers, and asks of them

    @property
    def answering(self) -> int:
        """Requests that are being answered, as the workers said last."""
        return sum(worker.answering for worker in self._workers.values())

    @property
    def workers(self) -> tuple[WorkerProcess, ...]:
        """The workers, in the order of their numbers; one that was lost, until there is a new one."""
        return tuple(self._workers[number] for number in sorted(self._workers))

    def snapshot(self) -> list[dict[str, object]]:
        """The workers as plain JSON values."""
        return [
            {
                "worker": worker.number,
                "pid": worker.pid,
                "serves": worker.serves,
                "connections": worker.connections,
                "answering": worker.answering,
            }
            for worker in self.workers
        ]

    def gauges(self) -> Iterable[Sample]:
        """What is read at the moment of a scrape."""
        yield "workers", "Workers that serve.", float(sum(worker.serves for worker in self.workers))

    def totals(self) -> Iterable[Sample]:
        """What is counted here, as it is at the moment of a scrape."""
        yield "worker_restarts", "Workers that ended by themselves and were started anew.", float(self.restarts)

    async def settle(self) -> None:
        """Wait, bounded, until what the workers have said so far is taken in."""
        load = self._load()
        await self._heard(lambda worker, heard: worker.ping(load, heard))

    async def _heard(self, tell: Callable[[WorkerProcess, asyncio.Future[None]], None]) -> None:
        """Tell all workers something and wait, bounded, until they answer."""
        waits = []
        for worker in self._workers.values():
            if worker.takes:
                heard = self._loop.create_future()
                tell(worker, heard)
                waits.append(heard)
        if waits:
            await asyncio.wait(waits, timeout=SETTLE_S)

    def end_streams(self, why: str) -> None:
        """End every stream of a client with an error event."""
        self._tell(down.EndStreams(why))

    def down(self, name: str) -> None:
        """A peer was declared dead."""
        self._tell(down.Down(name))

    def rekey(self, roots: Iterable[bytes]) -> None:
        """The cluster's keys have changed."""
        self._tell(down.Keys(tuple(roots)))

    async def reread(self, what: str) -> None:
        """A file was read again here, and could be used: let the workers read it too."""
        for worker in self._workers.values():
            if not worker.takes:  # it starts, or its loop does not turn: nobody waits, but it has to
                worker.send(down.Reread(0, what))
        await self._heard(lambda worker, heard: worker.reread(what, heard))

    def _tell(self, message: Any) -> None:
        for worker in self._workers.values():
            worker.send(message)

    # --- connections

    def _resume(self) -> None:
        if not self._accepting and self._listener is not None:
            self._accepting = True
            self._loop.add_reader(self._listener, self._accept)

    def _pause(self) -> None:
        if self._accepting and self._listener is not None:
            self._loop.remove_reader(self._listener)
        self._accepting = False

    def _accept(self) -> None:
        for _ in range(ACCEPT_AT_ONCE):
            takers = self._takers()
            if not takers:
                self._pause()  # the next tick looks again
                return
            if self._listener is None:
                return
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                _log.error("no connection can be accepted: %s", error.strerror)
                self._pause()
                self._loop.call_later(RETRY_S, self._resume)
                return
            with connection:
                if not any(worker.give(connection) for worker in takers):
                    _log.error("no worker takes a connection")

    def _takers(self) -> list[WorkerProcess]:
        """Who may be given a connection, the one with least to do first; on a starved host anybody who lives."""
        live = [worker for worker in self._workers.values() if worker.serves]
        return sorted([worker for worker in live if worker.takes] or live, key=lambda worker: worker.load)

    # --- workers

    async def _begin(self, number: int) -> None:
        worker = self._workers[number] = WorkerProcess(number, self._parts, self._lost)
        await worker.start(self._hello(number))
        self._keep(self._greet(worker))

    async def _greet(self, worker: WorkerProcess) -> None:
        """When it serves, connections are accepted."""
        began = self._loop.time()
        await worker.ready.wait()
        worker.ping(self._load())
        self._resume()
        self._served.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LIVED_S - (self._loop.time() - began)):
                await worker.gone.wait()
                return
        self._again[worker.number] = AGAIN_MIN_S

    def _lost(self, worker: WorkerProcess) -> None:
        if self._stopping:
            return
        again = self._again[worker.number]
        self._again[worker.number] = min(AGAIN_MAX_S, again * 2)
        self.restarts += 1
        _log.error("worker %s has ended: its connections are lost; a new one starts in %.1f s", worker.number, again)
        self._keep(self._start_again(worker, again))

    async def _start_again(self, worker: WorkerProcess, after_s: float) -> None:
        await worker.reap()
        await asyncio.sleep(after_s)
        if not self._stopping:
            try:
                await self._begin(worker.number)
            except OSError as error:
                _log.error("worker %s cannot be started: %s", worker.number, error)
                self._keep(self._start_again(worker, AGAIN_MAX_S))

    def _keep(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for worker in tuple(self._workers.values()):
                if worker.hangs:
                    _log.error("worker %s does not answer any more and is ended", worker.number)
                    worker.kill()
                    continue
                worker.ping(self._load())
                worker.desk.tell_ages()
            if not self._stopping:
                self._resume()
