"""One client: what it may use at a time and in a minute, and what it has used. No IO; time is a parameter (seconds).

Rules
1. A minute's worth may be used at once; it comes back evenly, a sixtieth of it each second (a token bucket).
2. A request is counted when it comes. Its tokens are counted before it runs: those of its prompt as they are estimated,
   and those that it asks for at most, as OpenAI counts them. Nothing is given back for an answer that ends early.
3. Who is refused is told when it will be taken in: exactly, where that depends on time alone; for a place, by how long
   its requests have taken so far.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_MINUTE = 60.0
#: What sums of seconds may be off by: who comes when he was told to is not sent away for it.
_ROUNDING = 1e-6
#: Longest time told to whoever waits for a place of its own, seconds.
MAX_WAIT_S = 60
#: Share of the newest request in the usual time of one.
_NEWEST = 0.2


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may use at one node; 0 = no limit."""

    running: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0


@dataclass(frozen=True, slots=True)
class Denied:
    """Which limit is reached (`running`, `requests`, `tokens`), and after how many seconds to come again.

    None = it would never fit.
    """

    why: str
    message: str
    after_s: int | None


class _Bucket:
    """So much a minute."""

    __slots__ = ("_at", "_level", "per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def take(self, amount: int, now: float) -> float:
        """Take ``amount``; else the seconds until it will be there.

        Requests of several workers may be told of out of the order in which they came: time never goes back here, or
        what was there a moment ago would not be any more.
        """
        now = max(now, self._at)
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / _MINUTE)
        self._at = now
        if amount <= self._level + _ROUNDING:
            self._level = max(0.0, self._level - amount)
            return 0.0
        return (amount - self._level) * _MINUTE / self.per_minute

    def adopt(self, other: _Bucket) -> None:
        """Go on from where another one was."""
        self._level, self._at = min(other._level, self.per_minute), other._at


class Client:
    """What one client uses."""

    def __init__(self, name: str, limits: Limits, now: float) -> None:
        self.name = name
        self.running = 0
        #: Totals: requests taken in, tokens counted, refusals by limit.
        self.requests = 0
        self.tokens = 0
        self.refused = {"running": 0, "requests": 0, "tokens": 0}
        self._usual_s = 0.0
        self._latest = now
        self.limits = limits
        self._requests = _Bucket(limits.requests_per_minute, now)
        self._tokens = _Bucket(limits.tokens_per_minute, now)

    def change(self, limits: Limits, now: float) -> None:
        """Other limits from now on; what was used stays used."""
        if limits == self.limits:
            return
        before = (self._requests, self._tokens)
        self.limits = limits
        self._requests = _Bucket(limits.requests_per_minute, now)
        self._tokens = _Bucket(limits.tokens_per_minute, now)
        for bucket, old in zip((self._requests, self._tokens), before, strict=True):
            if old.per_minute:
                bucket.adopt(old)

    def enter(self, now: float) -> Denied | None:
        """A request has come: it holds a place until `leave`, unless it is denied."""
        limits = self.limits
        if limits.running and self.running >= limits.running:
            waited = self._usual_s - (now - self._latest)
            after = min(MAX_WAIT_S, max(1, math.ceil(waited)))
            return self._denied("running", f"{limits.running} requests at a time", after)
        if limits.requests_per_minute:
            missing_s = self._requests.take(1, now)
            if missing_s:
                return self._denied(
                    "requests", f"{limits.requests_per_minute} requests per minute", math.ceil(missing_s)
                )
        self.running += 1
        self.requests += 1
        self._latest = now
        return None

    def spend(self, tokens: int, now: float) -> Denied | None:
        """A request that holds a place needs so many tokens."""
        limit = self.limits.tokens_per_minute
        if limit:
            if tokens > limit:
                what = f"{limit} tokens per minute, and this request alone may need {tokens}"
                return self._denied("tokens", what, None)
            missing_s = self._tokens.take(tokens, now)
            if missing_s:
                return self._denied("tokens", f"{limit} tokens per minute", math.ceil(missing_s))
        self.tokens += tokens
        return None

    def leave(self, took_s: float) -> None:
        """A request is over."""
        self.running -= 1
        self._usual_s += (took_s - self._usual_s) * (_NEWEST if self._usual_s else 1.0)

    def _denied(self, why: str, limit: str, after_s: int | None) -> Denied:
        self.refused[why] += 1
        again = "Ask for fewer." if after_s is None else f"Try again after {after_s} s."
        return Denied(why, f"{self.name} may use {limit} at this node. {again}", after_s)
