"""README's three hosts, as three network namespaces. Skipped, with the reason, where namespaces are not permitted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ecosystem.three_hosts import HOSTS, NOT_PERMITTED

ROOT = Path(__file__).parents[2]
#: Seconds for a story, most of them waiting for a machine that is busy elsewhere.
LIMIT_S = 400.0
ADDRESSES = ["10.77.0.1:8100", "10.77.0.2:8100", "10.77.0.3:8100"]


def story(how: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.ecosystem.three_hosts", how], capture_output=True, text=True, timeout=LIMIT_S,
        check=False, cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"},
    )  # fmt: skip
    if done.returncode == NOT_PERMITTED:
        pytest.skip(f"network namespaces: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr[-6000:]
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize("how", ["join", "zeroconf"])
def test_three_hosts_become_a_cluster_that_survives_one_of_them(how: str) -> None:
    seen = story(how)
    assert ("--join 10.77.0.1:18100" in seen["joined_by"]) == (how == "join")
    assert seen["addresses"] == dict.fromkeys(HOSTS, ADDRESSES)
    assert len(seen["forwarded"]) == 9
    for way, (target, text) in seen["forwarded"].items():
        assert way.endswith(" to " + target) and text == seen["answered_after"]
    assert seen["problems"] == []
