"""Serving traces as arrivals: when, how long, and which blocks of the prompt are the same as whose.

A block is 512 tokens of the prompt, chained: the same number means the same text from the beginning on. Formats and
sources: the README beside the traces.
"""

from __future__ import annotations

import gzip
import heapq
import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

BLOCK_TOKENS = 512
#: Where the traces lie when the repository stands beside them.
SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "traces"
#: The conversation trace as if no prompt had anything in common with another: affinity has nothing to win there.
UNSHARED = "unshared"
FILES = {
    "conversation": SHARED / "mooncake_conversation" / "conversation_trace.jsonl",
    "claude_code": SHARED / "claude_code_kvct" / "claude_code_sessions.jsonl.gz",
}
FILES[UNSHARED] = FILES["conversation"]
#: Timestamps of the conversation trace are whole multiples of this; requests are spread evenly inside.
TICK_S = 3.0
#: Starts of sessions (mean gap, Poisson) and the longest pause kept, for the trace without wall clock. Seconds.
SESSION_GAP_S = 20.0
MAX_PAUSE_S = 300.0
#: Distance between the block numbers of two sessions or copies.
_STRIDE = 1 << 24
#: The same of two prompts: more than any has blocks.
_PROMPT = 1 << 10


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request."""

    at: float
    tokens: int
    output: int
    #: Numbers of its full blocks.
    blocks: tuple[int, ...]


def find(name: str) -> Path | None:
    """The file of a trace by name, or a path; None when it is not here."""
    path = FILES.get(name, Path(name))
    return path if path.is_file() else None


def named(name: str, *, until: float = math.inf) -> list[Arrival] | None:
    """The trace of that name, or in that file, as `load` reads it; None when it is not here."""
    path = find(name)
    if path is None:
        return None
    arrivals = load(path, until=until)
    return unshared(arrivals) if name == UNSHARED else arrivals


def unshared(arrivals: Iterable[Arrival]) -> list[Arrival]:
    """The same requests without a block that two of them have, not even the first."""
    return [
        replace(arrival, blocks=tuple(range(number * _PROMPT + 1, number * _PROMPT + 1 + len(arrival.blocks))))
        for number, arrival in enumerate(arrivals)
    ]


def load(path: Path, *, seed: int = 1, until: float = math.inf) -> list[Arrival]:
    """All arrivals, in order of time; at least those before `until`, where reading more takes long."""
    if path.suffix == ".gz":
        with gzip.open(path, "rt") as lines:
            return list(_sessions(map(json.loads, lines), random.Random(seed), until))
    with path.open() as lines:
        return _spread([json.loads(line) for line in lines])


def _spread(rows: list[dict[str, object]]) -> list[Arrival]:
    """The conversation trace: requests of one tick follow each other evenly."""
    arrivals, start = [], 0
    while start < len(rows):
        stop = start
        while stop < len(rows) and rows[stop]["timestamp"] == rows[start]["timestamp"]:
            stop += 1
        for index in range(start, stop):
            row: dict[str, object] = rows[index]
            at = float(str(row["timestamp"])) / 1000 + TICK_S * (index - start) / (stop - start)
            tokens, ids = int(str(row["input_length"])), row["hash_ids"]
            assert isinstance(ids, list)
            full = tuple(ids[: tokens // BLOCK_TOKENS])
            arrivals.append(Arrival(at, max(1, tokens), max(1, int(str(row["output_length"]))), full))
        start = stop
    return arrivals


def _sessions(rows: Iterator[dict[str, object]], rng: random.Random, until: float) -> list[Arrival]:
    """Sessions of an agent: starts are drawn, pauses are cut, eight blocks of 64 tokens become one of 512."""
    arrivals, start = [], 0.0
    for number, row in enumerate(rows):
        start += rng.expovariate(1 / SESSION_GAP_S)
        if start >= until:
            break
        at, before = start, None
        requests = row["requests"]
        assert isinstance(requests, list)
        for request in sorted(requests, key=lambda request: request["t"]):
            if before is not None:
                at += min(MAX_PAUSE_S, request["t"] - before)
            before = request["t"]
            ids = [first + offset for first, count in request["runs"] for offset in range(count)]
            group = BLOCK_TOKENS // 64
            # A group is known by its last block: ids are chained, so that names all before it.
            blocks = tuple(number * _STRIDE + ids[last] for last in range(group - 1, len(ids), group))
            arrivals.append(Arrival(at, max(1, request["in"]), max(1, request["out"]), blocks))
    return sorted(arrivals, key=lambda arrival: arrival.at)


def copies(arrivals: list[Arrival], count: float, *, seconds: float, seed: int = 1) -> list[Arrival]:
    """`count` copies at once (the last one thinned out to a fraction), each begun somewhere else, for a while.

    The first block of every copy stays the same: the system prompt that everybody shares.
    """
    rng = random.Random(seed)
    length = arrivals[-1].at + TICK_S
    taken: list[Arrival] = []
    number = 0
    while count > 0:
        shift, share = (rng.random() * length if number else 0.0), min(1.0, count)
        for arrival in arrivals:
            at = (arrival.at + shift) % length
            if at < seconds and (share == 1.0 or rng.random() < share):
                blocks = tuple(block and block + number * _STRIDE for block in arrival.blocks)
                taken.append(Arrival(at, arrival.tokens, arrival.output, blocks))
        count -= 1
        number += 1
    return sorted(taken, key=lambda arrival: arrival.at)


def talk_of(arrival: Arrival) -> int | None:
    """The first block of its own: the same in all requests of one conversation. None: the prompt is too short."""
    return next((block for block in arrival.blocks if block), None)


def part(
    arrivals: Iterable[Arrival], *, start: float, seconds: float, share: float, longest: int, seed: int = 1
) -> list[Arrival]:
    """Whole conversations, a share of them, of a while of the trace that begins at 0 then.

    So the turns of a conversation keep their distance, which thinning out single requests would not. Prompts with
    more than `longest` tokens are left out.
    """
    taken = []
    for number, arrival in enumerate(arrivals):
        if not start <= arrival.at < start + seconds or arrival.tokens > longest:
            continue
        talk = talk_of(arrival)
        if random.Random(f"{seed}/{number if talk is None else talk}").random() < share:
            taken.append(replace(arrival, at=arrival.at - start))
    return taken


def made_up(requests: int, *, rate: float, seed: int = 1) -> list[Arrival]:
    """A small trace for tests and for machines without the real ones: conversations of a few turns."""
    rng = random.Random(seed)
    talks: list[tuple[float, int, tuple[int, ...]]] = []
    arrivals: list[Arrival] = []
    fresh, at = 1, 0.0
    while len(arrivals) < requests:
        if talks and (rng.random() < 0.5 or talks[0][0] < at):
            at = max(at, talks[0][0])
            _, _, blocks = heapq.heappop(talks)
        else:
            at += rng.expovariate(rate)
            blocks = (0,)
        more = rng.randrange(1, 24)
        blocks = (*blocks, *range(fresh, fresh + more))
        fresh += more
        arrivals.append(
            Arrival(at, len(blocks) * BLOCK_TOKENS + rng.randrange(1, BLOCK_TOKENS), rng.randrange(20, 600), blocks)
        )
        if rng.random() < 0.7:
            heapq.heappush(talks, (at + rng.expovariate(1 / 30), fresh, blocks))
    return sorted(arrivals, key=lambda arrival: arrival.at)
