"""Runs `with_vllm.py` and `with_scheduler.py` in a process of their own, where vLLM is installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 300.0


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_connector_within_vllms_own_classes() -> None:
    files = [str(Path(__file__).with_name(name)) for name in ("with_vllm.py", "with_scheduler.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout
