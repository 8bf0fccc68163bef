"""What a source may say that it has."""

from __future__ import annotations

from . import messages
from .errors import RemoteError


def check_manifest(manifest: messages.Manifest, ranks: int, block_bytes: int) -> list[bytes]:
    """Return the block hashes of a manifest; RemoteError when it is not blocks in order with all their ranks."""
    if len(manifest.entries) % ranks:
        raise RemoteError("transfer: manifest with a part of a block")
    hashes = [entry.block_hash for entry in manifest.entries[::ranks]]
    if len(set(hashes)) != len(hashes):
        raise RemoteError("transfer: manifest names a block twice")
    for place, entry in enumerate(manifest.entries):
        if entry.block_hash != hashes[place // ranks] or entry.rank != place % ranks:
            raise RemoteError("transfer: manifest is out of order")
        if entry.nbytes > block_bytes:
            raise RemoteError("transfer: a block is larger than ours can be")
    return hashes
