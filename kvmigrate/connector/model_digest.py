"""A digest of a model's files that is quick enough to take at every engine start.

Reading 100 GB to hash it would double the start-up time, so large files are sampled: size, both ends, and evenly
spaced pieces between. Two checkpoints of the same architecture (a fine-tune, another revision, another quantization)
differ in nearly every tensor, hence in nearly every sample.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PIECE_BYTES = 64 * 1024
PIECES = 16
SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".gguf", ".json"})
"""Weights and their configuration. Tokenizers are JSON too: a different tokenizer makes different token ids, hence
different block hashes, so including it only costs a match that could not have been used."""


def digest_of_model(directory: Path) -> str:
    """Hex digest of the model files in `directory`; empty when it holds none. Raises OSError when unreadable."""
    files = sorted(path for path in directory.iterdir() if path.suffix in SUFFIXES and path.is_file())
    if not files:
        return ""
    total = hashlib.blake2b(digest_size=16)
    for path in files:
        total.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            for piece in _pieces(file, path.stat().st_size):
                total.update(piece)
    return total.hexdigest()


def _pieces(file: BinaryIO, size: int) -> Iterator[bytes]:
    if size <= PIECE_BYTES * PIECES:
        yield file.read()
        return
    last = size - PIECE_BYTES
    for index in range(PIECES):
        file.seek(last * index // (PIECES - 1))
        yield file.read(PIECE_BYTES)
