"""What is installed is pinned, checked by hashes, enough for what the project declares, and free to be used with it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import audit
import pytest

ROOT = Path(__file__).parents[2]
LISTS = sorted((ROOT / "requirements").glob("*.txt"))
HASHED = [path for path in LISTS if path.name != "torch.txt"]
#: Words of a licence that ask nothing of a work that uses the package unchanged beyond Apache-2.0's own terms.
FREE = re.compile(
    r"0BSD|Apache|BSD|BSL-1\.0|CC0|CNRI-Python|DFSG|HPND|ISC|LGPL|MIT|Mozilla Public|MPL|PSF|Python Software "
    r"Foundation|Unlicense|Zlib|AFL",
    re.IGNORECASE,
)
#: Packages whose metadata do not say it, or whose licence is none of these, with what was found and why it will do.
LOOKED_AT = {
    "intel-cmplr-lib-ur": "Intel Simplified Software License: free use; for CPU engines, never shipped by us",
    "intel-openmp": "Intel Simplified Software License: free use; for CPU engines, never shipped by us",
    "oss-harmony": "no field; Apache-2.0 in its LICENSE",
    "prometheus-fastapi-instrumentator": "says only OSI Approved; ISC in its LICENSE",
    "setuptools": "no field in older versions; MIT in its LICENSE",
}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(path: Path) -> dict[str, str]:
    return dict(pin.split("==") for pin in audit.pins(path.read_text()))


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.name)
def test_every_line_is_one_exact_version(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if re.match(r"[A-Za-z0-9]", line)]
    assert lines and len(audit.pins(path.read_text())) == len(lines)
    assert len(pinned(path)) == len(lines), "a name is there twice"


@pytest.mark.parametrize("path", HASHED, ids=lambda path: path.name)
def test_every_version_has_the_hashes_of_its_files(path: Path) -> None:
    entries = re.split(r"^(?=[A-Za-z0-9])", path.read_text(), flags=re.MULTILINE)[1:]
    bare = [entry.split()[0] for entry in entries if not re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry)]
    assert bare == []


def test_the_lists_hold_everything_that_the_project_declares() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    held = {canonical(name) for path in LISTS if path.name in ("cpu.txt", "dev.txt") for name in pinned(path)}
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *extras["cpu"], *extras["dev"]]
    names = {canonical(re.split(r"[<>=!~\[; ]", need)[0]) for need in declared}
    assert names - held == set()


def licence(name: str) -> str:
    """What the metadata of an installed package say of it."""
    told = importlib.metadata.metadata(name)
    classifiers = [line for line in told.get_all("Classifier") or [] if line.startswith("License ::")]
    text = told.get("License-Expression") or " ".join(classifiers) or (told.get("License") or "")[:200]
    return str(text)


def test_every_licence_lets_it_be_used_with_ours() -> None:
    unclear = {}
    for path in HASHED:
        for name in pinned(path):
            try:
                text = licence(name)
            except importlib.metadata.PackageNotFoundError:
                continue  # of another environment, or of another platform
            strict = re.search(r"(?<!L)\bA?GPL", text)
            if (strict or not FREE.search(text)) and canonical(name) not in LOOKED_AT:
                unclear[name] = text
    assert unclear == {}


def test_an_audit_takes_silence_for_no_health() -> None:
    known = {"name": "a", "version": "1", "vulns": [{"id": "X-1", "fix_versions": ["2"]}]}
    silent = {"name": "b", "skip_reason": "not found"}
    assert audit.judge({"dependencies": [known, silent]}) == (["a 1: X-1, mended in 2"], ["b"])
    assert audit.pins("a==1 \\\n    --hash=sha256:00\n# b==2\nc==3+cpu\n") == ["a==1", "c==3"]


@pytest.mark.parametrize(
    ("report", "status"),
    [
        ([{"name": "a", "version": "1", "vulns": []}], audit.WELL),
        ([{"name": "a", "version": "1", "vulns": [{"id": "X", "fix_versions": []}]}], audit.FOUND),
        ([{"name": "a", "skip_reason": "not found"}], audit.UNREACHABLE),
        (None, audit.UNREACHABLE),
    ],
)
def test_the_verdict_of_an_audit(tmp_path: Path, report: list[object] | None, status: int) -> None:
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "x.txt").write_text("a==1\n")
    told = tmp_path / "told.json"
    told.write_text("" if report is None else json.dumps({"dependencies": report}))
    tool = tmp_path / "pip-audit"
    tool.write_text(f"#!/bin/sh\ncat {told}\n")
    tool.chmod(0o755)
    assert audit.main([str(tool), str(tmp_path / "lists")]) == status


def test_the_scripts_are_programs() -> None:
    for name in ("audit", "lock", "test", "quickstart", "bench", "chaos", "fuzz"):
        path = ROOT / "scripts" / name
        assert os.access(path, os.X_OK), name
        if path.read_text().startswith("#!/usr/bin/env bash"):
            assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
