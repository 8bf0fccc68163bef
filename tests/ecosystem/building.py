"""Builds what is published from a copy of the sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("node", "gossip", "kvmigrate")
#: Seconds for one step of building or installing, on a machine that is busy elsewhere.
BUILD_S = 500.0
#: What pip says when there is no index to ask, in which case nothing can be said about the wheel.
OFFLINE = ("Failed to establish a new connection", "Temporary failure in name resolution", "Network is unreachable")
#: Settings of the surroundings that a build and what is built must not see.
FOREIGN = ("PYTHONPATH", "PIP_CONSTRAINT", "GRAPEVINE_COMPILE")


def surroundings(**own: str) -> dict[str, str]:
    """Our environment without what must not be seen, and with what a step needs."""
    return {name: value for name, value in os.environ.items() if name not in FOREIGN} | own


def run(*command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """What a command prints; the test is skipped where it finds no package index."""
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
        cwd=cwd,
        env=surroundings() if env is None else env,
    )
    told = done.stdout + done.stderr
    if done.returncode and any(text in told for text in OFFLINE):
        pytest.skip("pip reaches no package index here")
    assert done.returncode == 0, told[-4000:]
    return done.stdout


def backend(step: str, source: Path, target: Path, env: Mapping[str, str] | None = None) -> Path:
    """What the build backend of pyproject.toml makes of a source tree: `sdist` or `wheel`."""
    code = f"import setuptools.build_meta as made; print(made.build_{step}({str(target)!r}))"
    return target / run(sys.executable, "-c", code, cwd=source, env=env).split()[-1]


def copy_sources(tree: Path) -> Path:
    """What a source distribution is made of."""
    tree.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tree
