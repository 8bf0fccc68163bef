"""A short run, as a user would start it: real processes, real signals, real cuts where the kernel allows them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(400)
def test_a_minute_of_chaos_loses_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "chaos_run", "--nodes", "4", "--minutes", "0.6", "--seed", "3", "--every", "2"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"}
    done = subprocess.run(
        [*command, "--json", "--rate", "0.4"], env=env, capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["right"] + figures["entry_lost"] == figures["requests"] > 20
    for name in ("wrong_answers", "client_errors", "duplicate_decodes", "leaks", "strikes_failed"):
        assert figures[name] == 0, done.stderr
    assert figures["kills"] >= 1 and figures["kills"] + figures["stops"] + figures["drains"] + figures["restarts"] >= 2
