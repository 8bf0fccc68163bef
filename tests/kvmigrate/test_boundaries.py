"""The rules about what may import what, kept by reading the imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvmigrate

ROOT = Path(kvmigrate.__file__).parent
PURE = [
    "digest.py",
    "errors.py",
    "fingerprint.py",
    "handshake.py",
    "layout.py",
    "leases.py",
    "lru.py",
    "planner.py",
    "pool_types.py",
    "slot_table.py",
    "spans.py",
    "split.py",
    "wire.py",
    "link/codec.py",
    "link/messages.py",
]
IMPURE = {"asyncio", "socket", "threading", "time", "random", "secrets", "os", "logging"}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("name", PURE)
def test_core_modules_have_no_clock_socket_thread_or_chance(name: str) -> None:
    assert not imports(ROOT / name) & IMPURE


def test_what_the_engine_imports_is_light() -> None:
    code = "import sys, kvmigrate.link, kvmigrate.reader; print(*{'asyncio', 'torch', 'aiohttp'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""
