"""Who runs on this host: a file for each running node, for the command line, and a lock on its name.

The file tells name, URL and process; the lock (freed by the kernel however the node ends) tells whether it is
true. One name cannot run twice on a host, even with different state directories.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

from node import dirs
from node.addresses import join_address
from node.errors import SettingsError
from node.settings import Settings

#: Most run files looked at.
MAX_NODES = 256


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A running node of this host."""

    name: str
    url: str
    pid: int
    lock: str
    #: Files of the certificate that it shows and of its key; empty without TLS.
    tls_cert: str = ""
    tls_key: str = ""
    #: Its URL as peers know it.
    peer_url: str = ""


class RunFile:
    """Holds the name of a node as long as it runs; use it with `with`."""

    def __init__(self, record: RunRecord, path: Path, lock: int) -> None:
        self.record = record
        self._path = path
        self._lock = lock

    def __enter__(self) -> RunFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Give the name back. Idempotent."""
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._lock)
            self._lock = -1


def claim(settings: Settings, url: str) -> RunFile:
    """Take the node's name on this host and write its run file.

    Raises `SettingsError` when a node of that name runs here, or a directory cannot be used.
    """
    dirs.private_dir(settings.run_dir)
    lock_path = settings.engine_socket.with_suffix(".lock")
    lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise SettingsError(
            f"a node named {settings.name} already runs on this host: choose another --name, or stop that one"
        ) from None
    peer_url = f"{settings.scheme}://{join_address(settings.advertise, urlsplit(url).port or 0)}"
    record = RunRecord(settings.name, url, os.getpid(), str(lock_path), settings.tls_cert, settings.tls_key, peer_url)
    path = _directory(settings.state_dir) / f"{settings.name}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(asdict(record)))
        temporary.replace(path)
    except OSError as error:
        os.close(lock)
        raise SettingsError(f"--state-dir {settings.state_dir} cannot be written: {error.strerror}") from error
    return RunFile(record, path, lock)


def running_nodes(state_dir: Path | None = None) -> list[RunRecord]:
    """The nodes that run on this host, by name: this user's, or where there are none, those of the system's service."""
    found = _recorded(state_dir or dirs.default_state_dir(), lambda path, record: _held(Path(record.lock)))
    return found if found or state_dir else _recorded(dirs.SERVICE_STATE_DIR, _alive)


def _recorded(state_dir: Path, runs: Callable[[Path, RunRecord], bool]) -> list[RunRecord]:
    found = []
    for path in sorted(_directory(state_dir).glob("*.json"))[:MAX_NODES]:
        with contextlib.suppress(OSError, ValueError, TypeError):
            record = RunRecord(**json.loads(path.read_text()))
            if runs(path, record):
                found.append(record)
    return found


def _alive(path: Path, record: RunRecord) -> bool:
    """Whether another user's process is still there. Its lock is closed to us, and its word on paths is not taken."""
    return Path(f"/proc/{int(record.pid)}").stat().st_uid == path.stat().st_uid


def _held(lock: Path) -> bool:
    handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    try:
        # Shared, so that two commands that look at the same time do not take each other for the node.
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(handle)


def _directory(state_dir: Path) -> Path:
    return state_dir / "running"
