"""A made-up cluster on the real page: real picture, hub, routes and server, invented members with moving loads."""

from __future__ import annotations

import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gossip import MemberState, MemberView
from node.addresses import listen_http
from node.decisions import DecisionLog
from node.flows import Flows
from node.history import STEP_S, History
from node.http.events import EventHub
from node.http.page import PageRoutes, build_of, page_files
from node.http.router import Router
from node.http.server import HttpServer
from node.load import LoadVector
from node.models import ModelInfo
from node.peer_info import PeerInfo
from node.picture import Picture
from node.plan import Plan, RouteOptions
from node.policy.base import CandidateCost
from node.prefill import PrefillTime
from node.prompt import ParsedRequest
from node.relay.call import Call
from node.relay.forward import CACHED_HEADER, PULLED_HEADER

MODELS = ("Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "meta-llama/Llama-3.3-70B-Instruct")
BLOCK_TOKENS = 16
MIB = 1024 * 1024


class Stage:
    """Nodes named by the test; `turn` moves everything on by some seconds."""

    def __init__(self, names: list[str], seed: int = 7) -> None:
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.names = names
        self.states = dict.fromkeys(names, MemberState.ALIVE)
        self.loads: dict[str, LoadVector] = {}
        self.engine: dict[str, object] = {
            "state": "ready",
            "reason": "",
            "progress": "",
            "version": "0.32.0",
            "starts": 1,
        }
        self.log = DecisionLog()
        self.past = History(lambda: self.now)
        self.flows = Flows()
        self.spots = {name: (self.rng.random(), self.rng.random()) for name in names}
        self.moods = {name: self.rng.uniform(0.15, 1.0) for name in names}
        self._turns = 0
        self.turn()

    def picture(self) -> Picture:
        return Picture(
            self.names[0], "vineyard", build_of(page_files()),
            members=self.members, describe=self.describe, engine=lambda: self.engine, kv=self.kv,
            log=self.log, ids=True, clock=lambda: self.now, past=self.past, flows=self.flows,
        )  # fmt: skip

    def add(self, name: str) -> None:
        self.names.append(name)
        self.states[name] = MemberState.ALIVE
        self.spots[name] = (self.rng.random(), self.rng.random())
        self.moods[name] = 0.5
        self._move(name)

    def members(self) -> list[MemberView]:
        return [
            MemberView(
                name=name, incarnation=3, host="10.0.0.1", port=18100, meta=b"", state=self.states[name],
                state_age_s=3600.0, rtt_s=self.rtt(self.names[0], name) / 1000 if index else None, is_self=not index,
                suspected_by=("x",) if self.states[name] is MemberState.SUSPECT else (),
            )
            for index, name in enumerate(self.names)
        ]  # fmt: skip

    def describe(self, name: str) -> PeerInfo:
        index = self.names.index(name)
        model = MODELS[0] if len(self.names) < 6 else MODELS[index % 3]
        return PeerInfo(
            http=f"10.0.0.{index + 1}:8100", kv="10.0.0.1:28100", version="0.1.0", load=self.loads[name],
            load_age_s=0.2, models={model: ModelInfo(model)}, digest_size=40 + 13 * index,
        )  # fmt: skip

    def kv(self) -> dict[str, object]:
        pool = {
            "capacity_bytes": 64 * 1024 * MIB,
            "used_bytes": 21 * 1024 * MIB,
            "blocks": 9801,
            "block_bytes": 2 * MIB,
        }
        return {"enabled": True, "connected": True, "corrupt": 0, "block_tokens": BLOCK_TOKENS, "pool": pool}

    def rtt(self, a: str, b: str) -> float:
        (ax, ay), (bx, by) = self.spots[a], self.spots[b]
        return 0.15 + 1.2 * float(((ax - bx) ** 2 + (ay - by) ** 2) ** 0.5)

    def turn(self, seconds: float = 1.0) -> None:
        self.now += seconds
        self._turns += 1
        for name in self.names:
            self._move(name)
        for _ in range(self.rng.randint(1, 5)):
            self._request()

    def age(self, seconds: float) -> None:
        """Let it have run for a while."""
        for _ in range(int(seconds / STEP_S)):
            self.turn(STEP_S)

    def _move(self, name: str) -> None:
        rng, mood = self.rng, self.moods[name]
        mood = self.moods[name] = min(1.0, max(0.02, mood + rng.uniform(-0.08, 0.08)))
        near = sorted((other for other in self.names if other != name), key=lambda other: self.rtt(name, other))[:12]
        pulls = rng.random() < 0.3 / len(self.names) and len(near) > 0
        old = self.loads[name].rates if name in self.loads else {}
        rates = {**old, rng.choice(near[:3]): rng.uniform(1e9, 5e9)} if pulls else old
        up = self.states[name] is MemberState.ALIVE
        self.loads[name] = LoadVector(
            ready=up, running=int(24 * mood), waiting=max(0, int(40 * (mood - 0.8))), slots=64,
            queued_tokens=int(9000 * mood * rng.random()), kv_use=min(1.0, 0.15 + 0.75 * mood),
            prefill=PrefillTime.of_rate(11000.0),
            decode_tps=55 - 25 * mood, ttft_p50_ms=90 + 400 * mood * mood, ttft_p95_ms=300 + 900 * mood,
            itl_p50_ms=18 + 15 * mood, itl_p95_ms=50.0, e2e_p50_ms=4200.0, e2e_p95_ms=9000.0,
            rtts={other: self.rtt(name, other) for other in near}, rates=rates,
        )  # fmt: skip

    def _request(self) -> None:
        rng, entry = self.rng, self.names[0]
        live = [name for name in self.names if self.states[name] is MemberState.ALIVE]
        target = entry if rng.random() < 0.45 or len(live) < 2 else rng.choice(live[:9])
        tokens = rng.randint(120, 9000)
        matched = int(tokens * rng.choice((0, 0, 0.4, 0.8, 0.95)))
        others = [name for name in live if name != target]
        source = rng.choice(others) if matched and others and rng.random() < 0.3 else None
        blocks = matched // BLOCK_TOKENS if source else 0
        first = 0.08 + (tokens - matched) / 9000 + rng.random() * 0.08
        costs = tuple(
            CandidateCost(name, first * 1000 * (1 if name == target else rng.uniform(1.05, 3)), matched_tokens=matched)
            for name in [target, *others[:3]]
        )
        matches = f"prefix {matched // 128} chunks" if matched else "least cost"
        plan = Plan(
            rid=f"chatcmpl-{rng.getrandbits(40):010x}", model=MODELS[0], entry=entry, target=target, source=source,
            matched_tokens=matched, prompt_tokens=tokens, reason=f"pull from {source}" if source else matches,
            policy="cost", hops=int(target != entry), costs=costs,
        )  # fmt: skip
        parsed = ParsedRequest(path="/v1/chat/completions", body=b"", is_json=True, model=MODELS[0])
        call = Call("POST", parsed.path, [], parsed, plan.rid, RouteOptions(), self.now)
        self.flows.opened(plan, {source: blocks} if source and blocks else {})
        told = {PULLED_HEADER: str(blocks), CACHED_HEADER: str(matched)}
        self.log.note(call, plan, 200, self.now, first_byte_s=first, told=told)
        self.past.answered("forwarded" if plan.hops else "local", first)
        if target == entry:
            self.past.started(tokens, matched)
            if blocks:
                self.past.pulled(blocks)


@asynccontextmanager
async def served(stage: Stage, *, port: int = 0, interval_s: float = 0.5) -> AsyncIterator[tuple[str, EventHub]]:
    """Serve the stage's page; the stage moves on by itself with every tick. Gives URL and hub."""
    picture = stage.picture()
    tick = picture.tick

    def moving() -> bytes:
        stage.turn()
        return tick()

    picture.tick = moving  # type: ignore[method-assign]
    hub = EventHub(picture, interval=lambda: interval_s)
    router = Router()
    PageRoutes(page_files(), hub).add_to(router)
    server = HttpServer(router)
    listener: socket.socket = listen_http("127.0.0.1", port)
    await server.start(listener)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/", hub
    finally:
        hub.close()
        await server.close()
