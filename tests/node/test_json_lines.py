"""What stays tells a script in JSON, line by line, what is up: `grapevine emulate --json` and `start --json`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chaos_run.engines import GRAPEVINE
from localcluster import free_ports

ROOT = Path(__file__).parents[2]
#: Seconds for a process to say something, on a machine that is busy elsewhere.
LIMIT_S = 120.0


@contextlib.contextmanager
def running(*words: str, folder: str) -> Iterator[Iterator[dict[str, Any]]]:
    """What a command says, read as JSON; ended in order, and it ends well."""
    own = {"GRAPEVINE_STATE_DIR": f"{folder}/state", "GRAPEVINE_RUN_DIR": f"{folder}/run"}
    process = subprocess.Popen(
        [*GRAPEVINE, *words, "--json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT,
        env={**os.environ, **own, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"},
    )  # fmt: skip
    late = threading.Timer(LIMIT_S, process.kill)
    late.start()
    try:
        assert process.stdout is not None
        yield (json.loads(line) for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
    finally:
        late.cancel()
        process.kill()
        process.communicate()


def test_a_script_starts_an_engine_and_a_node_and_learns_how_the_next_host_joins() -> None:
    (port,) = free_ports(1)
    with (
        tempfile.TemporaryDirectory(prefix="gv-") as folder,
        running("emulate", "--served-model-name", "demo", "--port", "0", folder=folder) as engine,
    ):
        up = next(engine)
        assert (up["event"], up["models"]) == ("started", ["demo"])
        words = ("start", "--port", str(port), "--no-mdns", "--no-kv", "--engine-url", up["url"])
        with running(*words, folder=folder) as node:
            events = [one := next(node)]
            while one["event"] != "started":
                events.append(one := next(node))
            assert one["url"] == f"http://127.0.0.1:{port}" and one["join"].startswith("grapevine start --port")
            while "serves demo" not in one.get("text", ""):
                events.append(one := next(node))
            assert {event["event"] for event in events} == {"told", "started"}
