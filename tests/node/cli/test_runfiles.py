"""The nodes of a host that a command finds by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from node import dirs, runfiles
from node.errors import SettingsError
from node.settings import Settings, make_settings


def test_a_name_runs_once_on_a_host(told: Settings, tmp_path: Path) -> None:
    other_state = make_settings(name="a", state_dir=tmp_path / "other", run_dir=told.run_dir)
    with runfiles.claim(told, "http://x"):
        with pytest.raises(SettingsError, match="already runs"):
            runfiles.claim(other_state, "http://y")
        assert [(node.name, node.url, node.pid) for node in runfiles.running_nodes(told.state_dir)] == [
            ("a", "http://x", os.getpid())
        ]
    assert runfiles.running_nodes(told.state_dir) == []
    runfiles.claim(other_state, "http://y").release()


def test_a_run_file_of_a_killed_node_is_not_believed(told: Settings) -> None:
    code = f"""
import os, signal
from node import dirs, runfiles
from node.settings import make_settings
runfiles.claim(make_settings(name="a", state_dir={str(told.state_dir)!r}, run_dir={str(told.run_dir)!r}), "http://x")
os.kill(os.getpid(), signal.SIGKILL)
"""
    env = {**os.environ, "PYTHONPATH": str(Path(runfiles.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == -9
    assert (told.state_dir / "running" / "a.json").exists()
    assert runfiles.running_nodes(told.state_dir) == []
    with runfiles.claim(told, "http://y"):
        assert [node.url for node in runfiles.running_nodes(told.state_dir)] == ["http://y"]


def test_the_node_of_the_systems_service_is_found_by_other_users_while_it_runs(
    told: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dirs, "SERVICE_STATE_DIR", told.state_dir)
    monkeypatch.setattr(dirs, "default_state_dir", lambda: tmp_path / "mine")
    with runfiles.claim(told, "http://x"):
        assert [node.url for node in runfiles.running_nodes()] == ["http://x"]
        assert runfiles.running_nodes(tmp_path / "other") == []
        mine = make_settings(name="b", state_dir=tmp_path / "mine", run_dir=told.run_dir)
        with runfiles.claim(mine, "http://y"):
            assert [node.url for node in runfiles.running_nodes()] == ["http://y"]
        (record,) = (told.state_dir / "running").glob("*.json")
        gone = {**json.loads(record.read_text()), "pid": 2**22 + 1}
        record.write_text(json.dumps(gone))
        assert runfiles.running_nodes() == []


def test_a_broken_run_file_harms_nobody(told: Settings) -> None:
    directory = told.state_dir / "running"
    directory.mkdir(parents=True)
    (directory / "x.json").write_text("{")
    (directory / "y.json").write_text('{"name": "y"}')
    (directory / "z.json").write_text("[1]")
    assert runfiles.running_nodes(told.state_dir) == []
