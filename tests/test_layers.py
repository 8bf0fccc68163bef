"""The layers: gossip and kvmigrate know nothing of node or of each other, and the cores know no clock or socket."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {"gossip": {"node", "kvmigrate"}, "kvmigrate": {"node", "gossip"}}
IMPURE = {"asyncio", "socket", "time", "random", "threading", "subprocess", "selectors", "aiohttp", "logging"}
CORES = (
    "node/engine/lifecycle.py",
    "node/engine/pace.py",
    "node/line.py",
    "node/forecast.py",
    "node/bookings.py",
    "node/circuits.py",
    "node/outlook.py",
    "node/oversize.py",
    "kvmigrate/connector/scheduler.py",
    "kvmigrate/connector/mirror.py",
)
"""Cores that no purity test beside them covers (gossip, kvmigrate and node/routing have one)."""


def files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def imports(path: Path) -> Iterator[str]:
    """Top-level names of the packages that a file imports."""
    for statement in ast.walk(ast.parse(path.read_text())):
        if isinstance(statement, ast.Import):
            yield from (alias.name.split(".")[0] for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.level == 0:
            yield str(statement.module).split(".")[0]


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_layer_imports_nothing_above_or_beside_it(package: str) -> None:
    for path in files(ROOT / package):
        assert not FORBIDDEN[package] & set(imports(path)), path


def test_only_the_connector_imports_vllm_or_torch() -> None:
    for package in ("node", "gossip", "kvmigrate"):
        for path in files(ROOT / package):
            if "connector" not in path.parts and "model_store" not in path.parts:
                assert not {"vllm", "torch", "transformers"} & set(imports(path)), path


@pytest.mark.parametrize("core", CORES)
def test_a_core_knows_no_clock_no_socket_and_no_randomness_of_its_own(core: str) -> None:
    for path in files(ROOT / core):
        assert not (IMPURE - {"random"}) & set(imports(path)), path
        assert set(random_names(path)) <= {"Random"}, path


def random_names(path: Path) -> Iterator[str]:
    """What a file uses of the module `random`: only the type `Random` of a parameter is allowed."""
    for part in ast.walk(ast.parse(path.read_text())):
        if isinstance(part, ast.ImportFrom) and part.module == "random":
            yield from (alias.name for alias in part.names)
        elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "random":
            yield part.attr
