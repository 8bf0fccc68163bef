"""`scripts/test` as a whole: what it exits with, and what its last lines say, whichever of its three parts fails."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SET_UP = """
ROOT={root}
VENV=$ROOT/venv
say() {{ printf '%s\\n' "$*" >&2; }}
prepare_environment() {{ :; }}
prepare_side() {{ :; }}
prepare_chromium() {{ :; }}
"""
PYTEST = """#!/usr/bin/env bash
# In place of pytest: fails where its arguments are those of the part named in $FAILS.
echo "part $*"
[[ -n "$FAILS" && "${*:3}" == "$FAILS" ]] || exit 0
echo "____ $FAILS failed" >>"$2"
exit 1
"""
PARTS = ("tests/e2e", "tests/node", "tests --ignore tests/e2e --ignore tests/node")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """`scripts/test` with nothing to set up, and tools that only say what they were asked."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "test", tmp_path / "scripts" / "test")
    (tmp_path / "scripts" / "_env.sh").write_text(SET_UP.format(root=tmp_path))
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    for name, text in (("ruff", "#!/bin/sh\n"), ("mypy", "#!/bin/sh\n"), ("pytest", PYTEST)):
        tool = tmp_path / "venv" / "bin" / name
        tool.write_text(text)
        tool.chmod(0o755)
    return tmp_path


def run(checkout: Path, *arguments: str, fails: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [checkout / "scripts" / "test", *arguments],
        env={"PATH": "/usr/bin:/bin", "FAILS": fails, "TMPDIR": str(checkout)},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_run_in_which_all_parts_pass_exits_with_0(checkout: Path) -> None:
    done = run(checkout)
    assert done.returncode == 0, done.stderr
    assert all(f"{part}\n" in done.stdout for part in PARTS)
    assert "what failed" not in done.stdout


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_fails_is_the_exit_status_and_is_told_at_the_end(checkout: Path, part: str) -> None:
    done = run(checkout, fails=part)
    assert done.returncode == 1
    assert all(f"{each}\n" in done.stdout for each in PARTS), "the other parts run all the same"
    assert done.stdout.endswith(f"==== what failed\n____ {part} failed\n")


def test_arguments_are_for_pytest(checkout: Path) -> None:
    done = run(checkout, "tests/gossip", "-k", "x")
    assert (done.returncode, done.stdout) == (0, "part tests/gossip -k x\n")


def test_nothing_is_left_behind(checkout: Path) -> None:
    before = set(checkout.iterdir())
    run(checkout, fails="tests/node")
    assert set(checkout.iterdir()) == before
