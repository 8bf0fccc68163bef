"""A source that authenticates and offers blocks properly, and then does what the test wants."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from kvmigrate import messages
from kvmigrate.digest import block_digest
from kvmigrate.errors import RemoteError
from kvmigrate.handshake import SourceHandshake
from kvmigrate.transport import Deadline, Transport

from .helpers import BLOCK, SECRET, chain, content

#: Called with each FETCH or PIN.
Behave = Callable[[Transport, Any, Deadline], None]


def _entries(n: int) -> Iterator[messages.Entry]:
    for h in chain(n):
        yield messages.Entry(h, 0, BLOCK, block_digest(content(h)))


class BadSource:
    """A source that authenticates and offers blocks properly, and then does what the test wants."""

    def __init__(
        self,
        behave: Behave,
        n: int = 10,
        *,
        file: str = "",
        instance: int = 0,
        asked: Callable[[], object] = lambda: None,
    ) -> None:
        self._behave = behave
        self._asked = asked  # before it says what it has
        self._manifest = messages.Manifest(file, instance, tuple(_entries(n)))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._transport = transport = Transport(self._listener.accept()[0])
        deadline = Deadline(time.monotonic, 20, 20)
        shake = SourceHandshake("c", SECRET, bytes(16))
        while not shake.done:
            transport.send(shake.receive(transport.receive(deadline)), deadline)
        try:
            while True:
                request = transport.receive(deadline)
                if isinstance(request, messages.Lookup):
                    self._asked()
                    transport.send(self._manifest, deadline)
                elif isinstance(request, messages.Fetch | messages.Pin):
                    self._behave(transport, request, deadline)
        except (OSError, RemoteError):
            pass
        finally:
            transport.close()

    def hold(self) -> None:
        """Do nothing until the test is over."""
        self._released.wait(20)

    def end(self) -> None:
        self._released.set()
        self._listener.close()
        self._transport.close()  # the puller keeps good connections warm
        self._thread.join(10)
        assert not self._thread.is_alive()
