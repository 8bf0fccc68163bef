"""The node's side of the engine link: serves the halves of the connector on behalf of the pool.

Promises:
1. Nothing that an engine sends stops the node: a message that breaks the protocol costs its connection.
2. Slots granted to an engine process come back when its connection ends, however it ends.
3. A scheduler's mirror gets every change of the pool in order; after `flush` all changes so far are in its socket.
4. The listener hears what engines report, in the event loop, and must not block. It hears `Hello` for each half that
   came and `Gone` for each that went.

Workers say what blocks are, and the pool is configured from that; a scheduler is told of the pool when all workers
of its engine are there, because before that the pool may still hold another engine's blocks.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvmigrate.errors import InvariantError, LocalError, RemoteError
from kvmigrate.fingerprint import NO_FINGERPRINT
from kvmigrate.layout import MAX_RANKS
from kvmigrate.pool import BlockPool
from kvmigrate.pool_types import Cleared, Slot

from . import messages as m
from .changes import Changes
from .codec import FrameSplitter
from .events import Gone, LinkEvent, LinkStatus
from .session import Session
from .unix_path import check_length, remove_dead_socket

__all__ = ["EngineLink", "Gone", "LinkEvent", "LinkStatus"]

#: Slots that a worker has in stock without asking, and at most. See `EngineLink._share` for what small pools give.
STOCK: Final = 32
MAX_STOCK: Final = 4096
MAX_SESSIONS: Final = 2 * (MAX_RANKS + 1)  # an engine, and the one that it replaces
HELLO_S: Final = 10.0
_READ_BYTES: Final = 256 << 10


class EngineLink:
    """Listen on a Unix socket at `path` for the connector of the engine beside us. Use it from one event loop."""

    def __init__(self, path: Path, pool: BlockPool, listener: Callable[[LinkEvent], None]) -> None:
        self.path = path
        self._pool = pool
        self._listener = listener
        self._numbers = itertools.count(1)
        self._sessions: set[Session] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changes = Changes(self._deliver)
        self._why = "no engine is connected"
        self._engine: m.Hello | None = None
        self._counts: Counter[str] = Counter()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen. Removes a socket file that nobody listens on; LocalError when the path cannot be used."""
        check_length(self.path)
        self._changes.start()
        remove_dead_socket(self.path)
        try:
            self._server = await asyncio.start_unix_server(self._accept, self.path)
            self.path.chmod(0o600)
        except OSError as error:
            raise LocalError(f"engine link cannot listen on {self.path}: {error.strerror}") from error
        self._pool.subscribe(self._changes.add)

    async def close(self) -> None:
        """Disconnect all engines and remove the socket. Idempotent."""
        if self._server is None:
            return
        self._pool.unsubscribe(self._changes.add)
        self._server.close()
        self._server = None
        for session in self._sessions:
            session.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.path.unlink(missing_ok=True)

    async def flush(self, timeout_s: float = 1.0) -> bool:
        """Put all pool changes so far into the schedulers' sockets; False when one does not read.

        Call it after a pull and before the request goes to the engine.
        """
        self._deliver()
        told = [s for s in self._sessions if s.told and s.role is m.Role.SCHEDULER]
        try:
            async with asyncio.timeout(timeout_s):
                for session in told:
                    await session.drain()
        except (TimeoutError, ConnectionError):
            return False
        return True

    def pulled(self, rid: str) -> None:
        """Tell schedulers that the pull for a request is over; they know of its blocks by then."""
        self._deliver()
        for session in self._told(m.Role.SCHEDULER):
            session.send(m.Pulled(rid))

    def status(self) -> LinkStatus:
        """Say who is connected and whether blocks can move."""
        return LinkStatus(
            scheduler=any(s.role is m.Role.SCHEDULER for s in self._sessions),
            workers=tuple(sorted(self._ranks())),
            engine=self._engine,
            why=self._why,
            refused=self._counts["refused"],
            stored=self._counts["stored"],
        )

    # -- connections ---------------------------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if self._server is None or task is None or len(self._sessions) >= MAX_SESSIONS:
            self._counts["refused"] += 1
            writer.transport.abort()
            return
        session = Session(next(self._numbers), writer)
        self._sessions.add(session)
        self._tasks.add(task)
        why = "closed the link"
        try:
            await self._serve(session, reader)
        except (RemoteError, LocalError) as error:
            self._counts["refused"] += 1
            why = str(error)
        except OSError as error:
            why = str(error)
        finally:
            self._tasks.discard(task)
            self._end(session, why)

    async def _serve(self, session: Session, reader: asyncio.StreamReader) -> None:
        splitter = FrameSplitter()
        while True:
            try:
                async with asyncio.timeout(HELLO_S if session.hello is None else None):
                    data = await reader.read(_READ_BYTES)
            except TimeoutError as error:
                raise RemoteError("said no hello") from error
            if not data:
                return
            for message in splitter.feed(data):
                await self._handle(session, message)

    def _end(self, session: Session, why: str) -> None:
        self._sessions.discard(session)
        session.abort()
        self._pool.reclaim(session.name)
        if session.hello is None:
            return
        if session.hello.role is m.Role.WORKER and not self._complete():
            self._why = "no engine is connected" if not self._ranks() else "a worker of the engine is missing"
            for other in self._told(m.Role.SCHEDULER):
                other.told = False
                other.send_pool("", self._pool.header, self._why)
        self._listener(Gone(session.hello.role, session.hello.rank, why))

    # -- messages ------------------------------------------------------------------------------------------------

    async def _handle(self, session: Session, message: m.Message) -> None:
        if isinstance(message, m.Hello):
            await self._on_hello(session, message)
        elif session.role is m.Role.SCHEDULER and isinstance(message, m.FromScheduler):
            self._on_scheduler(session, message)
        elif session.role is m.Role.WORKER and isinstance(message, m.FromWorker):
            await self._on_worker(session, message)
            await self._stock(session)
        else:
            raise RemoteError(f"unexpected {type(message).__name__} from {session.role or 'a stranger'}")
        self._listener(message)

    async def _on_hello(self, session: Session, hello: m.Hello) -> None:
        if session.hello is not None:
            raise RemoteError("said hello twice")
        session.hello = hello
        if hello.role is m.Role.SCHEDULER and hello.supported:
            # It came back before we noticed that it was gone: the end of its old connection is no news any more.
            for other in [s for s in self._sessions if s is not session and s.role is m.Role.SCHEDULER]:
                self._replace(other)
        if not hello.supported:
            session.send_pool("", self._pool.header, hello.why)
            self._why = hello.why
        elif hello.role is m.Role.WORKER:
            await self._on_worker_hello(session, hello)
        elif self._complete():
            self._tell_scheduler(session)

    async def _on_worker_hello(self, session: Session, hello: m.Hello) -> None:
        self._engine = hello
        for other in self._told(m.Role.WORKER):
            if other.hello and (other.hello.rank == hello.rank or other.hello.fingerprint != hello.fingerprint):
                self._replace(other)
        try:
            if hello.fingerprint == NO_FINGERPRINT:
                raise LocalError(_unknown(hello))
            await asyncio.to_thread(self._pool.configure, hello.fingerprint, hello.block_bytes, hello.ranks)
        except LocalError as error:
            self._why = str(error)
            session.send_pool("", self._pool.header, self._why)
            return
        self._deliver()
        session.send_pool(str(self._pool.path), self._pool.header)
        session.told = True
        session.want = STOCK
        await self._stock(session)
        if self._complete():
            self._why = ""
            for other in self._sessions:
                if other.role is m.Role.SCHEDULER and not other.told and other.hello and other.hello.supported:
                    self._tell_scheduler(other)
        else:
            self._why = "not all workers of the engine are connected yet"

    def _replace(self, session: Session) -> None:
        """Cut one whose place is taken: of the engine before this one, or the same half's broken connection."""
        self._pool.reclaim(session.name)
        session.hello, session.told = None, False  # so that its end is not told: its successor is here
        session.abort()

    def _on_scheduler(self, session: Session, message: m.FromScheduler) -> None:
        match message:
            case m.Filled():
                fresh = session.newly_filled(message)
                self._pool.touch(fresh)
                self._pool.touch(message.hashes, use=False)
            case m.Finished():
                session.forget_request(message.rid)
            case m.Reset():
                self._pool.clear()
                self._deliver()
            case _:
                pass

    async def _on_worker(self, session: Session, message: m.FromWorker) -> None:
        match message:
            case m.Stored():
                for item in message.items:
                    self._store(session, item)
                self._deliver()
            case m.Want():
                session.want = min(max(STOCK, message.n), MAX_STOCK)
            case m.Failed():
                self._pool.reclaim(session.name, message.slots)
            case m.Corrupt():
                await asyncio.to_thread(self._pool.check_slots, message.slots)
                self._deliver()
            case _:
                pass

    def _store(self, session: Session, item: m.StoredItem) -> None:
        hello = session.hello
        if hello is None or item.rank != hello.rank:
            raise RemoteError("stored a block of another rank")
        slot = Slot(item.slot, item.generation)
        try:
            if self._pool.commit(slot, item.block_hash, item.rank, item.nbytes, item.digest, writer=session.name):
                self._counts["stored"] += 1
        except LocalError as error:
            raise RemoteError(str(error)) from error

    def _share(self) -> int:
        """Slots that one worker may have in stock: what one writer may hold, divided among all of them.

        A block is there when every rank has stored it, and pulls write into the same pool: all need slots.
        """
        return max(1, self._pool.grant_limit // max(1, self._pool.header.geometry.ranks))

    async def _stock(self, session: Session) -> None:
        """Fill a worker's stock of slots up. In a thread: a slot's first use waits for the system's memory."""
        missing = min(session.want, self._share()) - self._pool.granted_to(session.name) if session.told else 0
        if missing <= 0:
            return
        slots = await asyncio.to_thread(self._pool.grant, missing, session.name)
        self._deliver()  # what was evicted for them
        if session in self._sessions:
            session.send_grant(slots)
        else:
            self._pool.reclaim(session.name)

    # -- the pool's changes --------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        """Write the pool's changes to everybody who follows them."""
        events = self._changes.take()
        if events is None:  # too many: the whole state instead
            self._on_cleared(self._pool.header.epoch)
            for session in self._told(m.Role.SCHEDULER):
                self._tell_scheduler(session)
            return
        if not events:
            return
        for session in self._told(m.Role.SCHEDULER):
            session.send_changes(events)
        cleared = [event for event in events if isinstance(event, Cleared)]
        if cleared:
            self._on_cleared(cleared[-1].epoch)

    def _on_cleared(self, epoch: int) -> None:
        """Who was told of the file before this one is told anew when it, or its successor, has said hello to it."""
        header = self._pool.header
        for session in self._told(m.Role.SCHEDULER):
            session.told = session.instance == header.instance
        for session in self._told(m.Role.WORKER):
            self._pool.reclaim(session.name)
            session.told = session.instance == header.instance
            if session.told:
                session.send(m.Clear(epoch))
                session.want = STOCK
                self._spawn_stock(session)

    def _spawn_stock(self, session: Session) -> None:
        task = asyncio.ensure_future(self._stock(session))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _tell_scheduler(self, session: Session) -> None:
        session.told = True
        session.send_pool(str(self._pool.path), self._pool.header)
        session.send_blocks(self._pool.blocks())

    def _told(self, role: m.Role) -> list[Session]:
        return [s for s in self._sessions if s.told and s.role is role]

    def _ranks(self) -> set[int]:
        return {s.hello.rank for s in self._told(m.Role.WORKER) if s.hello is not None}

    def _complete(self) -> bool:
        ranks = self._pool.header.geometry.ranks
        return self._ranks() == set(range(ranks))

    def validate(self) -> None:
        """Check the books; InvariantError names what is wrong."""
        for session in self._sessions:
            if session.told and session.hello is None:
                raise InvariantError("a session without hello was told of the pool")


def _unknown(hello: m.Hello) -> str:
    names = ", ".join(name for name, value in hello.fields.items() if not value) or "a field"
    return f"the engine's fingerprint is incomplete: {names} is unknown (see its log), and so its blocks match none"
