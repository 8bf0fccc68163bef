"""What a node knows about itself, and telling it: load row at every tick, models and prefix chunks on change.

The row goes out at every gossip tick and at once when something matters changed (ready, down, draining). Models are
the engine's own list joined with what the connector said about its blocks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from gossip import GossipAgent
from kvmigrate.link import Hello
from node import banner
from node.admission import Admission
from node.digest import Changes
from node.engine.events import EngineDown, EngineEvent, EngineModel, EngineProgress, EngineReady, EngineState
from node.load import LoadVector
from node.meter import LoadMeter
from node.own_models import own_models
from node.publisher import Publisher
from node.registry import Registry

#: Round trips are read from gossip every this many ticks: it is a pass over all members.
RTT_EVERY = 10

#: States from which an engine returns only by a restart of the node: what it served is withdrawn.
_NOT_COMING_BACK = (EngineState.FAILED, EngineState.STOPPED)


class Reporter:
    """Speaks for this node. `connect` gives it the registry and the rates, `begin` the gossip agent."""

    def __init__(
        self,
        name: str,
        *,
        meter: LoadMeter,
        admission: Admission,
        say: banner.Say,
        clock: Callable[[], float],
    ) -> None:
        self._name = name
        self._meter = meter
        self._admission = admission
        self._say = say
        self._clock = clock
        self._registry: Registry | None = None
        self._rates: Callable[[], dict[str, float]] = dict
        self._engine_ready: Callable[[int], None] = lambda kv_tokens: None
        self._engine_lost: Callable[[], None] = lambda: None
        self._gossip: GossipAgent | None = None
        self._publisher: Publisher | None = None
        self._ready = False
        self._models: tuple[EngineModel, ...] = ()
        self._kv_tokens = 0
        self._hello: Hello | None = None
        self._rtts: dict[str, float] = {}
        self._ticks = 0

    def connect(
        self,
        registry: Registry,
        *,
        rates: Callable[[], dict[str, float]],
        copy_rate: Callable[[], float],
        engine_ready: Callable[[int], None],
        engine_lost: Callable[[], None],
    ) -> None:
        """Give what is made after this object. `engine_ready` hears how many tokens the engine's KV cache holds."""
        self._registry = registry
        self._rates = rates
        self._copy_rate = copy_rate
        self._engine_ready = engine_ready
        self._engine_lost = engine_lost

    def begin(self, gossip: GossipAgent) -> None:
        """Begin to publish through a started agent."""
        self._gossip = gossip
        self._publisher = Publisher(gossip)

    async def run(self, interval_s: float) -> None:
        """Tick for ever."""
        while True:
            self.tick()
            await asyncio.sleep(interval_s)

    def vector(self) -> LoadVector:
        """Our own load, now."""
        return self._meter.vector(
            self._clock(),
            ready=self._ready,
            draining=self._admission.draining,
            rtts=self._rtts,
            rates=self._rates(),
            copy_rate=self._copy_rate(),
        )

    def glance(self) -> LoadVector:
        """The same for our own decisions, see `LoadMeter.glance`."""
        return self._meter.glance(
            self._clock(),
            ready=self._ready,
            draining=self._admission.draining,
            rtts=self._rtts,
            rates=self._rates(),
            copy_rate=self._copy_rate(),
        )

    def tick(self) -> None:
        """Publish the load row and what waits."""
        if self._publisher is None or self._gossip is None or self._registry is None:
            return
        if self._ticks % RTT_EVERY == 0:
            self._rtts = self._registry.rtts(self._gossip.members())
        self._ticks += 1
        self._publisher.tick(self.vector().encode())

    def on_engine(self, event: EngineEvent) -> None:
        """Take what the supervisor tells."""
        match event:
            case EngineReady():
                if not self._ready:
                    self._say(banner.ready(event))
                self._ready, self._models, self._kv_tokens = True, event.models, event.kv_tokens
                self._engine_ready(event.kv_tokens)
                self._publish_models()
            case EngineDown():
                # A stop that was asked for has no reason, a start only that of the end before it: no news.
                if event.reason and event.state is not EngineState.STARTING:
                    now = "has failed" if event.state is EngineState.FAILED else f"is {event.state.value}"
                    self._say(f"the engine {now}: {event.reason}")
                self._ready = False
                self._engine_lost()
                if event.state in _NOT_COMING_BACK:
                    self._models = ()
                self._publish_models()
            case EngineProgress():
                self._say(f"the engine: {event.text}")
        self.tick()

    def on_connector(self, hello: Hello | None) -> None:
        """Take what the engine's connector said about its blocks; None when it went away."""
        self._hello = hello
        self._publish_models()

    def on_chunks(self, changes: Changes) -> None:
        """Take changes of our prefix digest: into our own view now, to the peers with the next ticks."""
        if self._registry is not None:
            prefixes = self._registry.roster.prefixes
            for chunk in changes.added:
                prefixes.learn(self._name, chunk)
            for chunk in changes.promised:
                prefixes.learn(self._name, chunk, promised=True)
            for chunk in changes.withdrawn:
                prefixes.forget(self._name, chunk)
        if self._publisher is not None:
            self._publisher.chunks(changes)

    def _publish_models(self) -> None:
        created = int(time.time())
        records = own_models(self._models, self._hello, name=self._name, created=created, kv_tokens=self._kv_tokens)
        if self._registry is not None:
            self._registry.own_models(records)
        if self._publisher is not None:
            self._publisher.models(records)
