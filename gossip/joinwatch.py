"""Says, in the log, when nothing answers: whom we dialled, what came of it, and what to check. Part of the shell.

A node that finds nobody goes on trying for ever; without this, it would do so in silence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from gossip.errors import RemoteError
from gossip.identity import Address

#: Seconds after the seeds were given until the first warning, and the longest pause between two; it triples.
FIRST_S = 5.0
LONGEST_S = 300.0
#: Failures remembered, and shown in one line.
MAX_FAILURES = 64
MAX_SHOWN = 8

_log = logging.getLogger("grapevine.gossip")

#: What refusals counted by the endpoint mean to whoever wonders why nobody answers.
_HINTS = {
    "wrong_cluster": "packets of a cluster with another label arrive here",
    "unsealed": "a node without a cluster key is speaking to this one, which has one",
    "sealed_without_key": "the nodes here use a cluster key, this one has none",
    "unknown_key": "the nodes here use another cluster key",
    "forged": "the nodes here use the same cluster key with another cluster label",
}


def reason_of(error: BaseException) -> str:
    """Say what a failed dial means."""
    if isinstance(error, ConnectionRefusedError):
        return "refuses the connection: no node listens there"
    if isinstance(error, TimeoutError):
        return "does not answer: wrong address, or a firewall (UDP and TCP are needed)"
    if isinstance(error, EOFError | ConnectionResetError | RemoteError):
        return "closes without an answer: another cluster key or label, or not a node"
    return getattr(error, "strerror", None) or type(error).__name__


class JoinWatch:
    """Fed by the agent. `peers()`: how many others are up; `counters()`: what the endpoint refused."""

    def __init__(self, peers: Callable[[], int], counters: Callable[[], Mapping[str, int]]) -> None:
        self._peers = peers
        self._counters = counters
        self._failures: dict[Address, str] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._pause_s = FIRST_S
        self._waited_s = 0.0

    def seeded(self) -> None:
        """Seeds were given: begin to watch, if that is not under way."""
        if self._timer is None:
            self._arm()

    def failed(self, address: Address, why: str) -> None:
        """Note how a dial or a lookup ended; an empty reason is a success."""
        self._failures.pop(address, None)
        if why:
            self._failures[address] = why
            if len(self._failures) > MAX_FAILURES:
                del self._failures[next(iter(self._failures))]

    def failures(self) -> dict[str, str]:
        """Give the addresses whose last dial failed, and why."""
        return {f"{host}:{port}": why for (host, port), why in self._failures.items()}

    def close(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._look)

    def _look(self) -> None:
        self._waited_s += self._pause_s
        peers = self._peers()
        if peers:
            if self._pause_s > FIRST_S:
                _log.info("joined the cluster after %.0f s: %d other nodes", self._waited_s, peers)
            self._timer, self._pause_s, self._waited_s = None, FIRST_S, 0.0
            return
        _log.warning("found no other node in %.0f s, still trying: %s", self._waited_s, self.story())
        self._pause_s = min(LONGEST_S, self._pause_s * 3)
        self._arm()

    def story(self) -> str:
        """Say whom we dialled and why nobody may have answered."""
        told = [f"{address} {why}" for address, why in list(self.failures().items())[-MAX_SHOWN:]]
        counters = self._counters()
        told += [hint for name, hint in _HINTS.items() if counters.get(name)]
        return "; ".join(told) or "no dial has ended yet"
