"""The cluster keys of this node: one ring for gossip, peer calls and transfers of KV blocks, and its file.

Rules
1. The ring begins with the key of the settings. A rotation is kept in the node's directory (mode 0600), because after
   it the key of the settings may be of no use any more.
2. The file also tells with which configured key it was made. As long as the settings say the same, the file's ring
   counts; a new key in the settings replaces the whole ring.
3. A change is on disk before it counts. Text becomes a key (50 ms) in a thread.
4. No key leaves the node: only ids are shown. A key gets to another node by whoever administers that node.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

from gossip import ClusterKey, Keyring
from gossip import LocalError as GossipLocalError
from node.errors import LocalError, SettingsError
from node.settings import Settings

#: What the derived keys are for; at most 16 bytes each.
USE_PEER_CALLS = b"peer calls"
USE_PEER_BODIES = b"peer bodies"
USE_PEER_TLS = b"peer tls"
USE_TRANSFERS = b"transfers"
_FORMAT = 1


class NodeKeys:
    """The ring and what follows it. `subscribe` before `load`; every callback is called in the loop."""

    def __init__(self, settings: Settings) -> None:
        self.ring = Keyring()
        self._text = settings.cluster_key
        self._cluster = settings.cluster
        self._path = settings.node_dir / "keyring"
        self._configured = ""
        self._followers: list[Callable[[], None]] = []

    def subscribe(self, follower: Callable[[], None]) -> None:
        """Call this after every change of the ring."""
        self._followers.append(follower)

    async def load(self) -> None:
        """Fill the ring. Raises `SettingsError`: the configured key is no secret, or the file cannot be read."""
        if not self._text:
            return
        keys = await asyncio.to_thread(self._read)
        self.ring.fill(keys)
        self._tell()

    async def add(self, text: str) -> str:
        """Open with this key too; gives its id. Raises `LocalError`."""
        key = await asyncio.to_thread(self._key, text)
        self._change(lambda ring: ring.add(key))
        return key.id

    def use(self, key_id: str) -> None:
        """Seal and sign with this key. Raises `LocalError`."""
        self._change(lambda ring: ring.use(key_id))

    def remove(self, key_id: str) -> None:
        """Forget a key. Raises `LocalError`."""
        self._change(lambda ring: ring.remove(key_id))

    def secrets(self, use: bytes) -> tuple[bytes, ...]:
        """The derived keys for one use, that of the key in use first."""
        return tuple(key.derive(use) for key in self.ring)

    def _change(self, change: Callable[[Keyring], object]) -> None:
        changed = Keyring(self.ring)
        try:
            change(changed)
            self._write(changed)
        except GossipLocalError as error:
            raise LocalError(str(error)) from error
        except OSError as error:
            raise LocalError(f"{self._path} cannot be written: {error.strerror}") from error
        self.ring.fill(changed)
        self._tell()

    def _tell(self) -> None:
        for follower in self._followers:
            follower()

    # --- the file

    def _key(self, text: str) -> ClusterKey:
        try:
            return ClusterKey.from_text(text, self._cluster)
        except GossipLocalError as error:
            raise LocalError(str(error)) from error

    def _read(self) -> list[ClusterKey]:
        try:
            configured = self._key(self._text)
        except LocalError as error:
            raise SettingsError(f"--cluster-key: {error}") from error
        self._configured = configured.id
        try:
            kept = json.loads(self._path.read_text())
            if (kept["format"], kept["configured"]) == (_FORMAT, configured.id) and kept["keys"]:
                return [ClusterKey.from_root(bytes.fromhex(root)) for root in kept["keys"]]
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SettingsError(
                f"{self._path} cannot be read ({error}): remove it to begin with the set key"
            ) from error
        return [configured]

    def _write(self, ring: Keyring) -> None:
        kept = {"format": _FORMAT, "configured": self._configured, "keys": [key.root.hex() for key in ring]}
        aside = self._path.with_name(self._path.name + ".new")
        handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "w") as file:
            json.dump(kept, file)
            file.flush()
            os.fsync(file.fileno())
        Path(aside).replace(self._path)
