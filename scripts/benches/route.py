"""What one routing decision costs in CPU time, by cluster size, without and with the hashing of a 220 KB prompt."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from functools import partial

import orjson

from benches.result import Result, Target
from node.chunks import chunk_hashes
from node.decide import decide
from node.load import LoadVector
from node.models import ModelInfo
from node.plan import Plan
from node.policy import make_policy
from node.prefill import PrefillTime
from node.prompt import ParsedRequest, parse_request
from node.roster import Roster
from node.view import NodeState

SIZES = (10, 100, 1000)
TARGETS: dict[str, Target] = {
    "decide_us_n100": ("<=", 100),
    "decide_220kb_us_n100": ("<=", 200),
    "decide_220kb_us_n1000": ("<=", 1000),
}
PATH, MODEL = "/v1/chat/completions", "m"
SMALL_BYTES, LARGE_BYTES = 2_000, 220_000
#: Nodes that hold the prompt's prefix, as gossip would have told.
HOLDERS = 3
#: Chunks that every node holds in the figures `shared`.
SHARED_CHUNKS = 2
#: Share of the nodes whose vectors arrive between two rounds: 10 ms of gossip every 200 ms.
ROWS_SHARE = 0.05
#: Decisions in one round.
REPEATS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options of its own."""


def run(options: argparse.Namespace) -> Result:
    """Every size."""
    result = Result("route", TARGETS)
    rounds = 15 if options.quick else 60
    small, large = _parsed(SMALL_BYTES), _parsed(LARGE_BYTES)
    text = b"x" * large.prompt_bytes
    for size in SIZES:
        cluster = Cluster(size, (small, large))
        result.add(f"decide_us_n{size}", _time(partial(cluster.decide, small), rounds, cluster.gossip))
        hashed = _time(partial(cluster.decide, large, text), rounds, cluster.gossip)
        result.add(f"decide_220kb_us_n{size}", hashed)
        cluster.share((small, large))
        result.add(f"decide_shared_us_n{size}", _time(partial(cluster.decide, small), rounds, cluster.gossip))
    for name, size in (("2kb", SMALL_BYTES), ("220kb", LARGE_BYTES)):
        body = _body(size)
        result.add(f"parse_{name}_us", _time(partial(parse_request, PATH, body), rounds))
    result.note(
        f"CPU time, the fastest tenth of {rounds} rounds of {REPEATS} in a row; a decision = building the view "
        f"and decide with the policy cost, {HOLDERS} holders of the prefix (shared: and all nodes of its first "
        f"{SHARED_CHUNKS} chunks); between rounds a twentieth of the nodes "
        "send a new vector (not counted); 220kb includes hashing the canonical text, parse_220kb is the whole reading "
        "of the JSON body with it"
    )
    return result


class Cluster:
    """A node's view of a cluster."""

    def __init__(self, size: int, known: tuple[ParsedRequest, ...]) -> None:
        self.rng = random.Random(size)
        self.roster = Roster("n0")
        self.policy = make_policy("cost")
        self.own = LoadVector(ready=True, slots=64)
        self.names = [f"n{number}" for number in range(size)]
        self.now = 100.0
        self.seq = 0
        info = ModelInfo(
            MODEL,
            max_model_len=131_072,
            block_size=16,
            kv_token_bytes=131_072,
            fingerprint=b"f" * 16,
            kv_tokens=1 << 20,
        )
        for name in self.names:
            self.roster.member(name, NodeState.ALIVE, incarnation=1, rtt_ms=self.rng.uniform(0.2, 2))
            self.roster.models(name, {MODEL: info})
        self.gossip(1.0)
        for holder in self.names[1 : HOLDERS + 1]:
            for parsed in known:
                for chunk in parsed.chunks:
                    self.roster.prefixes.learn(holder, chunk)

    def share(self, known: tuple[ParsedRequest, ...]) -> None:
        """Every node holds the beginning of the prompts, as with one system prompt for all."""
        for name in self.names:
            for parsed in known:
                for chunk in parsed.chunks[:SHARED_CHUNKS]:
                    self.roster.prefixes.learn(name, chunk)

    def gossip(self, share: float = ROWS_SHARE) -> None:
        """Vectors of some nodes arrive, and time passes."""
        self.seq += 1
        self.now += 0.01
        for name in self.rng.sample(self.names, max(1, int(len(self.names) * share))):
            load = LoadVector(
                ready=True,
                running=self.rng.randrange(20),
                slots=64,
                queued_tokens=self.rng.randrange(20_000),
                kv_use=self.rng.random() * 0.8,
                queued_ms=self.rng.uniform(0, 1300),
                prefill=PrefillTime(7.5, 0.05, 1.7e-6),
                itl_p50_ms=16,
                e2e_p50_ms=8000,
            )
            self.roster.row(name, incarnation=1, seq=self.seq, load=load, age_s=0.3, now=self.now)

    def decide(self, parsed: ParsedRequest, text: bytes = b"") -> None:
        """One decision, after hashing `text`."""
        if text:
            chunk_hashes(b"seed", text)
        view = self.roster.view(parsed.chunks, self.own, self.now)
        plan = decide(view, parsed, self.policy, self.now, self.rng, entry="n0")
        assert isinstance(plan, Plan)


def _parsed(size: int) -> ParsedRequest:
    return parse_request(PATH, _body(size))


def _body(size: int) -> bytes:
    words = random.Random(size)
    text = " ".join(words.choice(("vine", "grape", "root", "leaf", "trellis")) for _ in range(size // 6))
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 256}
    return orjson.dumps(body)


def _time(work: Callable[[], object], rounds: int, between: Callable[[], None] = lambda: None) -> float:
    """Microseconds of CPU: the fastest tenth of the rounds, each the mean of a few in a row.

    Not the median: who shares the core makes the same code take twice as long, and never less.
    """
    found = []
    for _ in range(rounds):
        between()
        began = time.thread_time_ns()
        for _ in range(REPEATS):
            work()
        found.append((time.thread_time_ns() - began) / 1000 / REPEATS)
    return sorted(found)[len(found) // 10]
