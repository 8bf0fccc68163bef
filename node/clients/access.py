"""Who a client is by its API key, and whether it may have one more request.

Rules
1. With any key set, in the settings or by a file, nobody without one is let in; an empty file lets nobody in.
2. Keys are looked up by a digest under a key of this process: how long that takes tells nothing about a key.
3. Each key of the settings is a client of its own without limits.
4. The file may change at any time. Who is still in it keeps what it has used; a file with a fault changes nothing.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from types import MappingProxyType

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from node.clients import file
from node.clients.client import Client, Limits
from node.settings import Settings


class Access(Collector):
    """The clients of a node. `load` is called in a thread when the file changes; all else in the event loop."""

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._salt = secrets.token_bytes(32)
        self.path = Path(settings.clients_file) if settings.clients_file else None
        #: Anybody may ask.
        self.open = not settings.has_clients
        self._fixed = [
            file.Entry(f"{file.RESERVED}{number}", file.digest_of(key), Limits())
            for number, key in enumerate(settings.api_key, 1)
        ]
        self._clients: MappingProxyType[str, Client] = MappingProxyType({})
        self._by_key: dict[bytes, Client] = {}
        #: Requests without a key or with a wrong one.
        self.strangers = 0
        self._take(self._fixed)

    def load(self) -> None:
        """Read the file. :raises SettingsError: it cannot be used; nothing has changed."""
        if self.path is not None:
            self._take([*self._fixed, *file.read(self.path)])

    def find(self, key: str) -> Client | None:
        """The client whose key this is."""
        return self._by_key.get(self._known_by(file.digest_of(key)))

    def named(self, name: str) -> Client | None:
        """The client of that name."""
        return self._clients.get(name)

    def _take(self, entries: Iterable[file.Entry]) -> None:
        now, before = self._clock(), self._clients
        clients: dict[str, Client] = {}
        by_key: dict[bytes, Client] = {}
        limits: dict[str, Limits] = {}
        for entry in entries:
            if limits.get(entry.name, Limits()) == Limits():
                limits[entry.name] = entry.limits
            if entry.name not in clients:
                clients[entry.name] = before.get(entry.name) or Client(entry.name, Limits(), now)
            by_key[self._known_by(entry.digest)] = clients[entry.name]
        for name, client in clients.items():
            client.change(limits[name], now)
        self._clients, self._by_key = MappingProxyType(clients), by_key

    def _known_by(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._salt, digest_size=16).digest()

    def collect(self) -> Iterable[Metric]:
        """For Prometheus: as many series as there are clients in settings and file."""
        yield CounterMetricFamily(
            "grapevine_unknown_client_requests", "Requests without a client's key.", self.strangers
        )
        running = GaugeMetricFamily("grapevine_client_running_requests", "Requests of a client now.", labels=["client"])
        requests = CounterMetricFamily("grapevine_client_requests", "Requests of a client taken in.", labels=["client"])
        tokens = CounterMetricFamily(
            "grapevine_client_tokens", "Tokens counted for a client: of prompts, and asked for.", labels=["client"]
        )
        refused = CounterMetricFamily(
            "grapevine_client_refusals", "Requests of a client refused, by the limit.", labels=["client", "limit"]
        )
        for name, client in self._clients.items():
            running.add_metric([name], client.running)
            requests.add_metric([name], client.requests)
            tokens.add_metric([name], client.tokens)
            for why, count in client.refused.items():
                refused.add_metric([name, why], count)
        yield from (running, requests, tokens, refused)
