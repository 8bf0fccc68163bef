"""A short run, as a user would start it: real processes, real signals, real cuts where the kernel allows them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def chaos(*options: str) -> tuple[dict[str, float], str]:
    """Run it; the figures of a good run, and what it said."""
    command = [sys.executable, "-m", "chaos_run", "--seed", "3", "--json", *options]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    for name in ("wrong_answers", "client_errors", "duplicate_decodes", "leaks", "strikes_failed"):
        assert figures[name] == 0, done.stderr
    assert figures["right"] + figures["entry_lost"] == figures["requests"] > 20
    return figures, done.stderr


@pytest.mark.timeout(400)
def test_half_a_minute_of_chaos_loses_nothing() -> None:
    figures, said = chaos("--nodes", "4", "--minutes", "0.6", "--every", "2", "--rate", "0.4")
    done = figures["kills"] + figures["stops"] + figures["drains"] + figures["restarts"]
    assert figures["kills"] >= 1 and done >= 2, said


@pytest.mark.timeout(600)
def test_a_rolling_restart_loses_nothing_and_nobody() -> None:
    figures, said = chaos("--nodes", "3", "--minutes", "0.05", "--rolling", "--rate", "0.5")
    assert figures["restarts"] == 3 and figures["entry_lost"] == 0, said
