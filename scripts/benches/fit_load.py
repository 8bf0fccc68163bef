"""Requests that tell an engine's times apart, and requests as a service gets them; both as token ids.

Token ids mean the same to a real engine and to an emulated one, so that both are sent the very same bodies.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

#: Token ids of prompts: words of any vocabulary in use.
IDS = (1000, 30_000)
SHORT = 24
#: Requests that are sent together, to see what decoding in company costs.
BURSTS = (2, 4, 8)
#: Lengths of cold prompts, from SHORT to the longest, each a constant factor above the last.
LENGTHS = 7
#: Of the mixed load: how many beginnings are shared, and the share of requests that begin with one of them.
DOCUMENTS = 6
WITH_DOCUMENT = 0.45
#: Tokens of answers: from and to.
ANSWERS = (4, 24)
DECODING = 32


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: a prompt, and how long the answer shall be."""

    prompt: tuple[int, ...]
    answer: int


def apart(rng: random.Random, longest: int) -> list[list[Ask]]:
    """Groups to be sent one after the other, each when the one before it is done: cold, cached, and in company."""
    groups: list[list[Ask]] = []
    step = (longest / SHORT) ** (1 / (LENGTHS - 1))
    for place in range(LENGTHS):
        ask = Ask(_ids(rng, round(SHORT * step**place)), 2)
        groups += [[ask], [ask]]
    groups.append([Ask(_ids(rng, SHORT), DECODING)])
    groups.append([Ask(_ids(rng, longest // 2), DECODING)])
    groups += [[Ask(_ids(rng, SHORT), DECODING) for _ in range(count)] for count in BURSTS]
    return groups


def mixed(rng: random.Random, count: int, longest: int) -> list[Ask]:
    """Lengths from short to `longest`, many of them short; some begin with one of a few shared documents."""
    documents = [_ids(rng, _length(rng, longest // 6, longest // 2)) for _ in range(DOCUMENTS)]
    asks = []
    for _ in range(count):
        answer = rng.randint(*ANSWERS)
        if rng.random() < WITH_DOCUMENT:
            prompt = documents[rng.randrange(DOCUMENTS)] + _ids(rng, _length(rng, SHORT, longest // 6))
        else:
            prompt = _ids(rng, _length(rng, SHORT, longest))
        asks.append(Ask(prompt, answer))
    return asks


def with_other_tokens(asks: Sequence[Ask]) -> list[Ask]:
    """The same lengths with the same beginnings in common, of which no cache has anything yet."""
    first, end = IDS
    by = (end - first) // 3
    return [
        Ask(tuple(first + (token - first + by) % (end - first) for token in ask.prompt), ask.answer) for ask in asks
    ]


def moments(rng: random.Random, count: int, rate: float) -> list[float]:
    """When an open loop sends `count` requests, `rate` a second in the mean: seconds from its start."""
    at, found = 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate)
        found.append(at)
    return found


def fresh_tokens(asks: Sequence[Ask], block: int) -> list[tuple[int, int]]:
    """Tokens of each prompt that earlier ones have left in a cache with blocks of this size, and the others."""
    known: set[tuple[int, ...]] = set()
    found = []
    for ask in asks:
        blocks = [ask.prompt[:end] for end in range(block, len(ask.prompt), block)]
        cached = block * next((n for n, prefix in enumerate(blocks) if prefix not in known), len(blocks))
        known.update(blocks)
        found.append((cached, len(ask.prompt) - cached))
    return found


def _length(rng: random.Random, least: int, most: int) -> int:
    """Even in its logarithm."""
    return round(math.exp(rng.uniform(math.log(least), math.log(most))))


def _ids(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(*IDS) for _ in range(count))
