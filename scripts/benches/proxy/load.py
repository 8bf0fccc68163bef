"""The load: closed loops over kept connections, raw bytes, bounded in time and number.

Streams begin one after the other, spread over the time that one takes: a load that is steady from its first moment,
as many users make it, and no crowd at the door. The `burst` is that crowd.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

from benches.proxy.backend import MODEL

#: Seconds for one answer; a router that takes longer is counted as failed.
PATIENCE_S = 20.0
#: Bound on the requests of one measurement.
MAX_REQUESTS = 400_000
#: Sessions of the `sessions` load, and bytes of what they have in common with themselves.
SESSIONS = 16
SESSION_BYTES = 16 * 1024
LARGE_BYTES = 220 * 1000


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of load: `clients` closed loops of requests of `tokens` tokens, `pace_ms` apart when streamed."""

    clients: int
    tokens: int = 8
    stream: bool = False
    pace_ms: int = 0
    prompt_bytes: int = 24
    sessions: int = 0

    @property
    def lasts_s(self) -> float:
        """Seconds that one answer takes by itself."""
        return self.tokens * self.pace_ms / 1000 if self.stream else 0.0


KINDS = {
    "c1": Kind(1),
    "c16": Kind(16),
    "sessions": Kind(16, prompt_bytes=SESSION_BYTES, sessions=SESSIONS),
    "burst": Kind(50, tokens=200, stream=True),
    "paced": Kind(50, tokens=40, stream=True, pace_ms=5),
    "large": Kind(20, tokens=8, stream=True, pace_ms=25, prompt_bytes=LARGE_BYTES),
    "idle": Kind(1000, tokens=4, stream=True, pace_ms=1000),
}


def body_of(kind: Kind, session: int) -> bytes:
    """The request of a session: deterministic, and different from those of other sessions from its first word."""
    words = random.Random(session)
    text = f"session {session}: " + " ".join(
        f"{words.getrandbits(28):07x}" for _ in range(max(1, kind.prompt_bytes // 8))
    )
    fields: dict[str, object] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text[: max(kind.prompt_bytes, 16)]}],
        "max_tokens": kind.tokens,
    }
    if kind.stream:
        fields["stream"] = True
    if kind.pace_ms:
        fields["seed"] = kind.pace_ms
    return json.dumps(fields).encode()


def request_of(body: bytes) -> bytes:
    """The bytes on the wire."""
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer none\r\nUser-Agent: bench\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@dataclass(slots=True)
class Tally:
    """What one measurement saw; seconds."""

    whole: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    failed: int = 0
    events: int = 0
    backends: dict[int, dict[str, int]] = field(default_factory=dict)

    def took(self, session: int, answer: Answer) -> None:
        """Count an answer."""
        if answer.status != b"200":
            self.failed += 1
            return
        self.whole.append(answer.ended - answer.began)
        self.first.append(answer.first - answer.began)
        self.events += answer.events
        seen = self.backends.setdefault(session, {})
        seen[answer.backend] = seen.get(answer.backend, 0) + 1

    def affinity(self) -> float:
        """Share of requests that went to the backend that served most of their session."""
        total = sum(sum(seen.values()) for seen in self.backends.values())
        return sum(max(seen.values()) for seen in self.backends.values()) / total if total else 0.0


@dataclass(slots=True)
class Answer:
    """One answer as it comes in."""

    began: float
    first: float = 0.0
    ended: float = 0.0
    status: bytes = b""
    events: int = 0
    backend: str = "?"


class Connection(asyncio.Protocol):
    """A kept connection with at most one request under way."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._answer = Answer(0.0)
        self._done: asyncio.Future[None] | None = None
        self._left = -1
        self._tail = b""
        self._head = b""
        self._chunked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail what is under way."""
        self._transport = None
        self._finish()

    @property
    def open(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes) -> Answer:
        """Send a request; an answer without a status is one that did not come whole."""
        self._head, self._tail, self._chunked, self._left = b"", b"", False, -1
        self._done = asyncio.get_running_loop().create_future()
        answer = self._answer = Answer(time.perf_counter())
        self._transport.write(request)
        await self._done
        return answer

    def data_received(self, data: bytes) -> None:
        """Take a piece of the answer."""
        answer = self._answer
        if not answer.status:
            data = self._take_head(data)
            if not data and not (self._done is not None and self._left == 0):
                return
        if answer.backend == "?" and (at := data.find(b'"backend-')) >= 0:
            answer.backend = data[at + 9 : at + 10].decode()
        if self._chunked:
            if not answer.first and b"data:" in data:
                answer.first = time.perf_counter()
            answer.events += data.count(b"data:")
            self._tail = (self._tail + data[-5:])[-5:]
            if self._tail == b"0\r\n\r\n":
                self._whole()
        else:
            answer.first = answer.first or time.perf_counter()
            self._left -= len(data)
            if self._left <= 0:
                self._whole()

    def _take_head(self, data: bytes) -> bytes:
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if end < 0:
            return b""
        head, rest = self._head[:end].lower(), self._head[end + 4 :]
        self._answer.status = head[9:12]
        self._chunked = b"\r\ntransfer-encoding: chunked" in head
        at = head.find(b"\r\ncontent-length:")
        self._left = int(head[at + 17 :].split(b"\r\n", 1)[0]) if at >= 0 else sys.maxsize
        if b"\r\nconnection: close" in head:
            self._transport.close()
        return rest

    def _whole(self) -> None:
        self._answer.ended = time.perf_counter()
        self._finish()

    def _finish(self) -> None:
        if not self._answer.ended:
            self._answer.status = b""
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def close(self) -> None:
        """End it."""
        if self._transport is not None:
            self._transport.abort()


class Run:
    """One measurement."""

    def __init__(self, ports: Sequence[int], kind: Kind) -> None:
        self._ports = ports
        self._kind = kind
        self._requests = [request_of(body_of(kind, session)) for session in range(max(1, kind.sessions))]
        self._tally = Tally()
        self._numbers = count()
        self._left = 0
        self._until = 0.0

    async def measure(self, seconds: float, requests: int) -> dict[str, Any]:
        """Load for so many seconds, or until so many requests were sent."""
        self._tally, self._left = Tally(), min(requests, MAX_REQUESTS)
        began = time.perf_counter()
        self._until = began + seconds
        await asyncio.gather(*(self._client(i) for i in range(self._kind.clients)))
        tally = self._tally
        return {
            "seconds": time.perf_counter() - began,
            "requests": len(tally.whole),
            "failed": tally.failed,
            "events": tally.events,
            "affinity": tally.affinity(),
            "whole": _quantiles(tally.whole),
            "first": _quantiles(tally.first),
        }

    async def _client(self, number: int) -> None:
        loop, port = asyncio.get_running_loop(), self._ports[number % len(self._ports)]
        connection = Connection()
        try:
            if self._kind.lasts_s:
                await asyncio.sleep(self._kind.lasts_s * number / self._kind.clients)
            while self._left > 0 and time.perf_counter() < self._until:
                self._left -= 1
                if not connection.open:
                    _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
                session = next(self._numbers) % len(self._requests)
                async with asyncio.timeout(PATIENCE_S):
                    answer = await connection.ask(self._requests[session])
                self._tally.took(session, answer)
        except (OSError, TimeoutError):
            self._tally.failed += 1
        finally:
            connection.close()


def _quantiles(values: list[float]) -> list[float]:
    """p50 and p99, seconds."""
    if not values:
        return [0.0, 0.0]
    values.sort()
    return [values[len(values) // 2], values[min(len(values) - 1, int(len(values) * 0.99))]]


@dataclass(frozen=True, slots=True)
class Ask:
    """What is measured: `kind` of load on `ports`, for `seconds` or until `requests` were sent."""

    ports: list[int]
    kind: str
    seconds: float
    requests: int = MAX_REQUESTS

    def line(self) -> str:
        """The question as it is sent."""
        return json.dumps(asdict(self))
