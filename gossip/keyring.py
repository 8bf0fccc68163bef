"""The cluster's keys: the first one seals, every one opens, and they change while the cluster runs.

Rules
1. A key is made from a secret text by scrypt, salted with the cluster label: one guess at a weak text costs an attacker
   as much as it cost us, and the same text makes other keys in another cluster.
2. Each use (gossip, peer calls, transfers) has a key of its own, derived by keyed BLAKE2b: what is signed with one says
   nothing about the others.
3. A key's id is derived too. It is shown, logged and sent in clear; the text and the keys never are.
4. Rotation: `add` everywhere, `use` everywhere, `remove` everywhere. The key in use cannot be removed, and a ring that
   began without a key takes none: half a cluster in clear and half sealed is no cluster.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from gossip.errors import LocalError

#: Bytes of a key's id; it is shown in hex.
KEY_ID_BYTES: Final = 4
#: scrypt's cost (RFC 7914): 16 MiB and about 50 ms, paid once per key and start.
SCRYPT_N: Final = 1 << 14
SCRYPT_R: Final = 8
#: Keys in one ring: a rotation needs two, an interrupted one three.
MAX_KEYS: Final = 8
#: Bytes of a secret text.
MIN_SECRET_BYTES: Final = 8
MAX_SECRET_BYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class ClusterKey:
    """One key. `id`: 8 hex digits, public. `root`: 32 secret bytes, of which every use derives its own."""

    id: str
    root: bytes = field(repr=False)

    @classmethod
    def from_text(cls, text: str, cluster: str) -> ClusterKey:
        """Make the key of a secret text for a cluster; takes about 50 ms.

        :raises LocalError: the text is too short to be a secret, or too long.
        """
        secret = text.encode()
        if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
            raise LocalError(f"a cluster key has {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes, not {len(secret)}")
        salt = b"grapevine cluster " + cluster.encode()
        root = hashlib.scrypt(secret, salt=salt, n=SCRYPT_N, r=SCRYPT_R, p=1, dklen=32, maxmem=64 * 1024 * 1024)
        return cls.from_root(root)

    @classmethod
    def from_root(cls, root: bytes) -> ClusterKey:
        """Make the key of 32 secret bytes. :raises LocalError: they are not 32."""
        if len(root) != 32:
            raise LocalError("the root of a cluster key has 32 bytes")
        return cls(_derive(root, b"key id", KEY_ID_BYTES).hex(), root)

    def derive(self, use: bytes) -> bytes:
        """Give the 32 secret bytes for one use, named by at most 16 bytes."""
        return _derive(self.root, use, 32)


def _derive(root: bytes, use: bytes, size: int) -> bytes:
    return hashlib.blake2b(key=root, person=use, digest_size=size).digest()


class Keyring:
    """All keys of this node, the one that seals first. Empty: the cluster talks in clear."""

    def __init__(self, keys: Iterable[ClusterKey] = ()) -> None:
        self._keys: tuple[ClusterKey, ...] = ()
        for key in keys:
            self._append(key)

    def __iter__(self) -> Iterator[ClusterKey]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def first(self) -> ClusterKey | None:
        """The key that seals, None in a cluster without keys."""
        return self._keys[0] if self._keys else None

    @property
    def ids(self) -> tuple[str, ...]:
        """Public ids, that of the sealing key first."""
        return tuple(key.id for key in self._keys)

    def get(self, key_id: str) -> ClusterKey | None:
        """Give the key with that id."""
        return next((key for key in self._keys if key.id == key_id), None)

    def fill(self, keys: Iterable[ClusterKey]) -> None:
        """Replace all keys, for whoever keeps the ring elsewhere. :raises LocalError: too many; nothing is changed."""
        self._keys = Keyring(keys)._keys

    def add(self, key: ClusterKey) -> bool:
        """Open with this key too, from now on; False if it is in the ring already.

        :raises LocalError: the cluster has no keys, or the ring is full.
        """
        if not self._keys:
            raise LocalError("this cluster talks in clear: a first key is set when its nodes start, not while they run")
        return self._append(key)

    def use(self, key_id: str) -> None:
        """Seal with this key from now on. :raises LocalError: it is not in the ring."""
        chosen = self._known(key_id)
        self._keys = (chosen, *(key for key in self._keys if key.id != key_id))

    def remove(self, key_id: str) -> None:
        """Forget a key. :raises LocalError: it is not in the ring, or it is the one that seals."""
        if self._known(key_id) is self._keys[0]:
            raise LocalError(f"key {key_id} is in use: use another one before you remove it")
        self._keys = tuple(key for key in self._keys if key.id != key_id)

    def _append(self, key: ClusterKey) -> bool:
        if self.get(key.id) is not None:
            return False
        if len(self._keys) >= MAX_KEYS:
            raise LocalError(f"the ring holds {MAX_KEYS} keys already: remove those that are out of use")
        self._keys = (*self._keys, key)
        return True

    def _known(self, key_id: str) -> ClusterKey:
        found = self.get(key_id)
        if found is None:
            raise LocalError(f"no key {key_id} in the ring, which has {', '.join(self.ids) or 'none'}")
        return found
