"""The sdist, the wheel made of it, and a node started from that wheel in an environment that holds nothing else."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import audit
import pytest
from localcluster import free_ports

from node import __version__
from node.http.page import page_files
from tests.ecosystem.building import BUILD_S, PACKAGES, ROOT, backend, copy_sources, run

#: Seconds for a node to serve, on a machine that is busy elsewhere.
START_S = 120.0

#: The first test that needs them waits for the environment too.
pytestmark = pytest.mark.timeout(3 * BUILD_S)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    # A short path: sockets lie in it.
    with tempfile.TemporaryDirectory(prefix="gv-") as made:
        yield Path(made)


@pytest.fixture(scope="module")
def sdist(folder: Path) -> Path:
    return backend("sdist", copy_sources(folder / "tree"), folder)


@pytest.fixture(scope="module")
def wheel(folder: Path, sdist: Path) -> Path:
    with tarfile.open(sdist) as packed:
        packed.extractall(folder, filter="data")
    return backend("wheel", folder / sdist.name.removesuffix(".tar.gz"), folder)


@pytest.fixture(scope="module")
def bin_folder(folder: Path, wheel: Path) -> Path:
    """The programs of an environment made for this: the wheel and what it asks for, in the versions of our list."""
    python = folder / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", folder / "venv")
    versions = folder / "versions.txt"
    versions.write_text("\n".join(audit.pins((ROOT / "requirements" / "cpu.txt").read_text())))
    run(python, "-m", "pip", "install", "--quiet", "--no-input", "--constraint", versions, wheel)
    return python.parent


def test_the_sdist_and_the_wheel_made_of_it_hold_every_file_of_the_packages(sdist: Path, wheel: Path) -> None:
    assert (sdist.name, wheel.name) == (
        f"vllm_grapevine-{__version__}.tar.gz",
        f"vllm_grapevine-{__version__}-py3-none-any.whl",
    )
    with zipfile.ZipFile(wheel) as packed:
        held = set(packed.namelist())
    ours = {str(path.relative_to(ROOT)) for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    ours |= {f"node/page/{name}" for name in page_files()} | {f"{name}/py.typed" for name in PACKAGES}
    assert ours - held == set()
    assert {name.split("/")[0] for name in held} == {*PACKAGES, f"vllm_grapevine-{__version__}.dist-info"}


def test_the_installed_command_tells_its_version_and_its_commands(bin_folder: Path) -> None:
    told = json.loads(run(bin_folder / "grapevine", "version", "--json", cwd=bin_folder))
    assert (told["grapevine"], told["vllm"]) == (__version__, None)
    assert "start" in run(bin_folder / "grapevine", "--help")


def test_a_node_of_the_wheel_serves_through_an_emulated_engine(bin_folder: Path, folder: Path) -> None:
    (port,) = free_ports(1)
    log = folder / "node.log"
    engine = f"{bin_folder / 'grapevine'} emulate --served-model-name demo --uds {{uds}} --link-socket {{link}}"
    command = [
        str(bin_folder / "grapevine"), "start", "--name", "w", "--port", str(port), "--no-mdns",
        "--kv-pool-gib", "0.01", "--run-dir", str(folder / "run"), "--state-dir", str(folder / "state"),
        "--engine-command", engine,
    ]  # fmt: skip
    env = {"PATH": f"{bin_folder}:/usr/bin:/bin", "HOME": str(folder)}
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output, env=env) as node:
        try:
            until = time.monotonic() + START_S
            while not served(port):
                assert node.poll() is None and time.monotonic() < until, log.read_text()
                time.sleep(0.2)
            body = json.dumps({"model": "demo", "prompt": "Hello", "max_tokens": 3}).encode()
            told = json.loads(get(port, "/v1/completions", body))
            assert told["usage"]["completion_tokens"] == 3
            assert b"<title>" in get(port, "/")
            assert json.loads(get(port, "/gossip/state"))["kv"]["enabled"] is True
            node.send_signal(signal.SIGTERM)
            assert node.wait(START_S) == 0, log.read_text()
        finally:
            node.kill()


def get(port: int, path: str, body: bytes | None = None) -> bytes:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, {"Content-Type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
        return bytes(answer.read())


def served(port: int) -> bool:
    try:
        return b'"w"' in get(port, "/readyz")
    except OSError:
        return False
