"""The routing core is deterministic: no clock, socket, loop or randomness but those it is given."""

from __future__ import annotations

import ast
from pathlib import Path

import node

ROOT = Path(node.__file__).parent
FILES = [
    *(ROOT / f"{name}.py" for name in (
        "chunks", "wire", "load", "models", "view", "plan", "decide", "eligible", "explain", "meter", "window",
        "digest", "peerprefix", "sends", "roster", "hits", "counted_hits",
    )),
    *(ROOT / "prompt").glob("*.py"),
    *(ROOT / "policy").glob("*.py"),
    *(ROOT / "emulator").glob("*.py"),
]  # fmt: skip
FORBIDDEN = {"asyncio", "socket", "time", "datetime", "threading", "logging", "os", "secrets", "uuid"}


def test_no_core_module_imports_a_clock_a_socket_a_loop_or_a_log() -> None:
    for path in FILES:
        for statement in ast.walk(ast.parse(path.read_text())):
            if isinstance(statement, ast.Import):
                names = {alias.name.partition(".")[0] for alias in statement.names}
            elif isinstance(statement, ast.ImportFrom):
                names = {(statement.module or "").partition(".")[0]}
            else:
                continue
            assert not names & FORBIDDEN, path


def test_randomness_is_only_drawn_from_the_generator_that_is_given() -> None:
    for path in FILES:
        for part in ast.walk(ast.parse(path.read_text())):
            if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "random":
                assert part.attr == "Random", path


def test_nothing_rests_on_the_builtin_hash() -> None:
    """`hash()` differs between processes: nothing that nodes exchange may rest on it."""
    for path in FILES:
        for part in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id == "hash"), path
