"""How this package was built: as it stands, or with its core compiled (`setup.py`)."""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES

from gossip import endpoint


def is_compiled() -> bool:
    """Whether the core is machine code. All of it or nothing is."""
    return endpoint.__file__.endswith(tuple(EXTENSION_SUFFIXES))
