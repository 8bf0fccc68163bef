"""Nodes in this process: everything real (HTTP, gossip, routing) but the engines."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossip import GossipConfig
from node.addresses import join_address
from node.assembly import Node
from node.engine.client import EngineAddress, open_session
from node.engine.events import EngineDown, EngineEvent, EngineModel, EngineReady, EngineState
from node.engine.vitals import Look
from node.relay.deadlines import Deadlines
from node.relay.session import Session
from node.room import WaitingRoom
from node.settings import Settings, make_settings
from node.turns import Denial, Entrance, Ticket
from tests.node.fakes.engine import FakeEngine
from tests.node.fakes.faulty import FaultyEngine
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from node.tracing.tracing import Tracing

FAST_GOSSIP = GossipConfig.loopback(
    gossip_interval_s=0.05, push_pull_interval_s=1.0, redial_min_s=0.1, leave_timeout_s=0.1
)


class FakeSupervisor:
    """Stands between a node and a `FakeEngine`; the test says when the engine is up and down."""

    def __init__(self, fake: FakeEngine | FaultyEngine, listener: Callable[[EngineEvent], None]) -> None:
        self.fake = fake
        self.address = EngineAddress(socket=fake.path)
        self.ready = False
        self.reason = "still loading"
        self.takes_token_ids = False
        self.form_is_known = False
        self.stalls: list[str] = []
        self.notes = 0
        self._listener = listener
        self._session: Session | None = None

    @property
    def session(self) -> Session:
        assert self._session is not None
        return self._session

    async def start(self) -> None:
        self._session = open_session(self.address)

    async def stop(self) -> None:
        if self._session is not None:
            await self._session.close()

    def up(self) -> None:
        self.ready, self.reason = True, ""
        models = tuple(EngineModel(m, m, None, self.fake.max_model_len) for m in self.fake.models)
        self._listener(EngineReady(models, "fake"))

    def down(self, state: EngineState = EngineState.RESTARTING, reason: str = "it crashed") -> None:
        self.ready, self.reason = False, reason
        self._listener(EngineDown(state, reason))

    def known_form(self, *, chat: bool) -> bool:
        return self.form_is_known

    def look(self) -> Look | None:
        return None

    def note_stall(self, why: str) -> None:
        self.stalls.append(why)

    def note_activity(self) -> None:
        self.notes += 1

    def snapshot(self) -> dict[str, object]:
        return {"state": "ready" if self.ready else "starting", "reason": self.reason}


class Member:
    """One node with its engine."""

    def __init__(self, node: Node, engine: FakeEngine | FaultyEngine) -> None:
        self.node = node
        self.engine = engine
        self._changed = asyncio.Event()
        node.registry.subscribe(self._changed.set)
        node.room = self._watched(node.room)
        self.draining = asyncio.Event()
        drain = node.admission.drain

        def drained(on: bool = True) -> None:
            drain(on)
            if on:
                self.draining.set()

        node.admission.drain = drained  # type: ignore[method-assign]

    def _watched(self, room: WaitingRoom) -> WaitingRoom:
        join, leave = room.join, room.quit

        def joined(entrance: Entrance) -> Ticket | Denial:
            self._changed.set()
            return join(entrance)

        def left(ticket: Ticket, *, served: bool) -> None:
            leave(ticket, served=served)
            self._changed.set()

        room.join, room.quit = joined, left  # type: ignore[method-assign]
        return room

    @property
    def name(self) -> str:
        return self.node.settings.name

    @property
    def port(self) -> int:
        return self.node.http_port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def fake(self) -> FakeEngine:
        assert isinstance(self.engine, FakeEngine)
        return self.engine

    @property
    def faulty(self) -> FaultyEngine:
        assert isinstance(self.engine, FaultyEngine)
        return self.engine

    @property
    def supervisor(self) -> FakeSupervisor:
        supervisor = self.node.engine
        assert isinstance(supervisor, FakeSupervisor)
        return supervisor

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds; it is looked at after every change of the node's view."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def sees(self, names: Sequence[str]) -> bool:
        return self.node.registry.serving() == sorted(names)


class Cluster:
    """Started members, in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        #: Settings of every member that is added.
        self.defaults: dict[str, Any] = {}
        self.members: list[Member] = []
        self._stack = AsyncExitStack()

    def __getitem__(self, index: int) -> Member:
        return self.members[index]

    async def add(
        self,
        name: str,
        *,
        models: Sequence[str] = ("m",),
        up: bool = True,
        deadlines: Deadlines | None = None,
        engine: FaultyEngine | None = None,
        tracing: Tracing | None = None,
        **settings: Any,
    ) -> Member:
        """Start a node that joins the others; its engine is ready at once unless ``up`` is False.

        ``engine``: this one, that gives token ids, in place of a `FakeEngine`.
        """
        fake = await (engine or FakeEngine(self.folder / f"{name}.fake", models)).start()
        self._stack.push_async_callback(fake.close)
        seeds = tuple(join_address(*member.node.gossip.address) for member in self.members[:1])
        node = Node(
            self.settings(name, join=seeds, **settings),
            engine=lambda _, listener: FakeSupervisor(fake, listener),
            gossip_config=FAST_GOSSIP,
            deadlines=deadlines,
            tracing=tracing,
            rng=random.Random(name),
        )
        member = Member(node, fake)
        member.supervisor.takes_token_ids = member.supervisor.form_is_known = engine is not None
        await node.start()
        self._stack.push_async_callback(node.stop)
        if up:
            member.supervisor.up()
        self.members.append(member)
        return member

    def settings(self, name: str, **changed: Any) -> Settings:
        given: dict[str, Any] = {
            "name": name,
            "port": 0,
            "gossip_port": 0,
            "kv_port": 0,
            "mdns": False,
            "kv": False,
            "stop_grace_s": 0.2,
            "state_dir": self.folder / "state",
            "run_dir": self.folder / "run",
        }
        return make_settings(**(given | self.defaults | changed))

    async def agree(self) -> None:
        """Wait until every member sees every ready member as a candidate."""
        names = [member.name for member in self.members if member.supervisor.ready]
        for member in self.members:
            await member.until(lambda member=member: member.sees(names))  # type: ignore[misc]

    async def close(self) -> None:
        for member in self.members:
            member.node.admission.validate()
            member.node.room.validate()
            member.node.meter.validate()
            member.node.registry.roster.sends.validate()
        await self._stack.aclose()


@asynccontextmanager
async def cluster(count: int = 0, **settings: Any) -> AsyncIterator[Cluster]:
    """A cluster of ``count`` equal nodes named a, b, c, ...; stopped and checked at the end."""
    folder = Path(tempfile.mkdtemp(prefix="gv"))
    whole = Cluster(folder)
    try:
        for index in range(count):
            await whole.add("abcdefgh"[index], **settings)
        await whole.agree()
        yield whole
    finally:
        await whole.close()
        shutil.rmtree(folder, ignore_errors=True)
