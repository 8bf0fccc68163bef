"""The wheel with the gossip core compiled (`setup.py`): what is in it, and that it does what the sources do."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ecosystem.building import BUILD_S, ROOT, backend, copy_sources, run, surroundings

#: Modules that are called for every datagram, and some of those that stay as they are.
HOT = {"gossip/decode", "gossip/endpoint", "gossip/row_table", "gossip/simulator/delivery"}
SHELL = {"gossip/agent", "gossip/build", "gossip/errors"}
#: Tests of what is compiled, by itself and behind real sockets.
TESTS = (
    "agent", "chaos", "coordinates", "envelope", "heartbeat", "membership", "parts", "planes", "prober", "row_table",
    "sealed_agents", "simulator", "slow_bounds", "slow_map", "wire",
)  # fmt: skip
#: Imports the core first, so that nothing that pytest does to the path can bring another one.
PYTEST = (
    "import sys, pytest; from gossip.build import is_compiled as ok; assert ok(); sys.exit(pytest.main(sys.argv[1:]))"
)
#: Tells everything that happens in a story of faults, as a digest.
STORY = """
import hashlib, json, sys
from gossip.build import is_compiled
from gossip.simulator.chaos import Chaos

chaos, told, nodes = Chaos(int(sys.argv[1]), 12, 90.0), hashlib.sha256(), {}

def heard(node, event):
    nodes[node.serial] = node
    if node.recording is None:
        node.recording = []
    told.update(repr((chaos.sim.now, node.name, event)).encode())

chaos.sim.listener = heard
told.update(repr(chaos.run()).encode())
datagrams = 0
for serial, node in sorted(nodes.items()):
    told.update(repr((serial, node.bytes_in, node.bytes_out, node.recording)).encode())
    datagrams += len(node.recording)
print(json.dumps({"compiled": is_compiled(), "datagrams": datagrams, "digest": told.hexdigest()}))
"""

pytestmark = pytest.mark.timeout(3 * BUILD_S)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gv-") as made:
        yield Path(made)


@pytest.fixture(scope="module")
def wheel(folder: Path) -> Path:
    compiler = sysconfig.get_config_var("CC") or "cc"
    if shutil.which(compiler.split()[0]) is None or not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("no C compiler, or no headers of Python, here")
    if importlib.util.find_spec("mypyc") is None:
        pytest.skip("mypy, which compiles, is not installed here")
    return backend("wheel", copy_sources(folder / "tree"), folder, surroundings(GRAPEVINE_COMPILE="1"))


@pytest.fixture(scope="module")
def compiled(folder: Path, wheel: Path) -> dict[str, str]:
    """The environment in which Python finds what the wheel holds."""
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "installed")
    # Safe: Python would put the folder that it is started in before that, and it is the one with the sources.
    return surroundings(PYTHONPATH=f"{folder / 'installed'}:{ROOT / 'scripts'}", PYTHONSAFEPATH="1")


def test_the_wheel_is_for_this_platform_and_holds_the_core_compiled_beside_its_sources(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        held = packed.namelist()
    machine_code = {name.partition(".")[0] for name in held if name.endswith(".so")}
    assert machine_code > HOT and not machine_code & SHELL
    assert {f"{name}.py" for name in machine_code} - set(held) == {"gossip__mypyc.py"}, (
        "one library, and a source for each"
    )
    assert not wheel.name.endswith("-any.whl") and not [name for name in held if name.endswith((".c", ".h"))]


def test_it_says_that_it_is_compiled_and_needs_nothing_more_to_run(compiled: dict[str, str], folder: Path) -> None:
    code = "import sys, node.cli; assert not {'mypyc', 'librt'} & set(sys.modules); node.cli.main()"
    told = json.loads(run(sys.executable, "-c", code, "version", "--json", cwd=folder, env=compiled))
    assert told["compiled"] is True
    plain = surroundings(PYTHONPATH=f"{ROOT}")
    assert json.loads(run(sys.executable, "-c", code, "version", "--json", cwd=folder, env=plain))["compiled"] is False


def test_a_story_is_the_same_to_the_byte(compiled: dict[str, str], folder: Path) -> None:
    for seed in ("3", "4", "5"):
        ours, plain = (
            json.loads(run(sys.executable, "-c", STORY, seed, cwd=folder, env=env))
            for env in (compiled, surroundings(PYTHONPATH=f"{ROOT}"))
        )
        assert (ours.pop("compiled"), plain.pop("compiled")) == (True, False)
        assert ours == plain and ours["datagrams"] > 10_000


def test_the_tests_of_the_core_pass(compiled: dict[str, str]) -> None:
    files = [f"tests/gossip/test_{name}.py" for name in TESTS]
    options = ("-q", "-x", "-p", "no:cacheprovider", "-m", "not plain")
    said = run(sys.executable, "-c", PYTEST, *options, *files, cwd=ROOT, env=compiled)
    passed = re.search(r"(\d+) passed", said)
    assert passed is not None and int(passed[1]) > 250, said


def refused(*command: str, tree: Path, **own: str) -> str:
    done = subprocess.run(
        [sys.executable, "setup.py", *command],
        cwd=tree, env=surroundings(**own), capture_output=True, text=True, timeout=BUILD_S, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


def test_what_cannot_be_compiled_is_refused_and_not_left_out(tmp_path: Path) -> None:
    tree = copy_sources(tmp_path / "tree")
    assert "GRAPEVINE_COMPILE is 1 to compile or 0 not to, but not 'yes'" in refused(
        "bdist_wheel", tree=tree, GRAPEVINE_COMPILE="yes"
    )
    assert "there is no no-such-compiler: install" in refused(
        "bdist_wheel", tree=tree, GRAPEVINE_COMPILE="1", CC="no-such-compiler"
    )
    for command in (("build_ext", "--inplace"), ("editable_wheel",)):
        assert "an editable installation would run" in refused(*command, tree=tree, GRAPEVINE_COMPILE="1")
    assert not list(tree.rglob("*.so"))


def test_the_compiler_is_the_one_that_is_pinned() -> None:
    asked = re.search(r'^COMPILER = "(.+)"$', (ROOT / "setup.py").read_text(), re.MULTILINE)
    assert asked is not None
    assert re.search(rf"^{re.escape(asked[1])} ", (ROOT / "requirements" / "dev.txt").read_text(), re.MULTILINE)
