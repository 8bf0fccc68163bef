"""The manifest of a converted model: what its files were when they were made.

A file whose size and time are as written is taken as unchanged; otherwise its SHA-256 decides, and the new time
is written down. So a copied or touched model is used again, and a damaged one never is.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

MANIFEST = "manifest.json"
FORMAT = 1
#: Bytes hashed at once.
CHUNK_BYTES = 1024 * 1024


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, as hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def write_manifest(directory: Path, source_sha256: str) -> None:
    """Describe all files that are in `directory` now."""
    files = {path.name: {**_stamp(path), "sha256": sha256_of(path)} for path in _files(directory)}
    _write(directory, {"format": FORMAT, "source_sha256": source_sha256, "files": files})


def is_whole(directory: Path, source_sha256: str) -> bool:
    """Whether `directory` holds exactly what its manifest says, made from that source."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        if manifest["format"] != FORMAT or manifest["source_sha256"] != source_sha256 or not manifest["files"]:
            return False
        return _check_files(directory, manifest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _check_files(directory: Path, manifest: dict[str, dict[str, dict[str, object]]]) -> bool:
    renewed = False
    for name, told in manifest["files"].items():
        path = directory / name
        stamp = _stamp(path)
        if stamp == {"size": told["size"], "mtime_ns": told["mtime_ns"]}:
            continue
        if stamp["size"] != told["size"] or sha256_of(path) != told["sha256"]:
            return False
        told.update(stamp)
        renewed = True
    if renewed and os.access(directory, os.W_OK):
        _write(directory, manifest)
    return True


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.iterdir()) if path.is_file() and path.name != MANIFEST)


def _stamp(path: Path) -> dict[str, int]:
    found = path.stat()
    return {"size": found.st_size, "mtime_ns": found.st_mtime_ns}


def _write(directory: Path, manifest: object) -> None:
    temporary = directory / f".{MANIFEST}.{os.getpid()}"
    temporary.write_text(json.dumps(manifest, indent=1, sort_keys=True))
    temporary.replace(directory / MANIFEST)
