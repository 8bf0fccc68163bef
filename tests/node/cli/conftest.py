"""A command that is typed, and a node on loopback that answers as told."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from node.cli import main
from node.settings import Settings, make_settings
from tests.node.cli.said import EXPLAINED, RECENT, STATE


@pytest.fixture
def answers() -> dict[str, tuple[int, object]]:
    return {
        "/gossip/state": (200, STATE),
        "/gossip/members": (200, {"cluster": "home", "self": "a", "members": [{"name": "a", "state": "alive"}]}),
        "/v1/models": (200, {"data": [{"id": "SmolLM2"}]}),
        "/route/explain": (200, EXPLAINED),
        "/route/recent?limit=20": (200, RECENT),
    }


@pytest.fixture
def asked() -> list[tuple[str, Any]]:
    return []


@pytest.fixture
def url(answers: Mapping[str, tuple[int, object]], asked: list[tuple[str, Any]]) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            asked.append((self.path, json.loads(body or b"null")))
            status, answer = answers[self.path]
            content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET  # noqa: N815 - the name that http.server looks for

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def told(tmp_path: Path) -> Settings:
    return make_settings(name="a", state_dir=tmp_path / "state", run_dir=tmp_path / "run")


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Result]:
    env: dict[str, str | None] = {
        "GRAPEVINE_STATE_DIR": str(tmp_path / "state"),
        "COLUMNS": "200",
        "GRAPEVINE_NODE": None,
    }

    def call(*args: str, **more: Any) -> Result:
        return CliRunner().invoke(main, list(args), env=env | more.pop("env", {}), prog_name="grapevine", **more)

    return call
