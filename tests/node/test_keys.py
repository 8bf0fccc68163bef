"""The ring of a node: its file, and what a restart, a new setting or damage makes of it."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from gossip import ClusterKey
from node.errors import LocalError, SettingsError
from node.keys import USE_PEER_CALLS, NodeKeys
from node.settings import make_settings
from tests.node.fakes.cluster import cluster


async def loaded(tmp_path: Path, text: str = "first secret") -> NodeKeys:
    settings = make_settings(name="a", state_dir=tmp_path, run_dir=tmp_path / "run", cluster_key=text)
    settings.node_dir.mkdir(parents=True, exist_ok=True)
    keys = NodeKeys(settings)
    await keys.load()
    return keys


def key_id(text: str) -> str:
    return ClusterKey.from_text(text, "default").id


def file_of(tmp_path: Path) -> Path:
    return tmp_path / "nodes" / "a" / "keyring"


async def test_what_a_node_keeps_is_for_its_user_alone_whoever_made_the_directory() -> None:
    async with cluster() as nodes:
        kept = nodes.settings("a").node_dir
        kept.mkdir(parents=True, mode=0o755)
        await nodes.add("a", cluster_key="a long enough key")
        assert kept.stat().st_mode & 0o777 == 0o700


async def test_without_a_key_the_ring_is_empty_and_takes_none(tmp_path: Path) -> None:
    keys = await loaded(tmp_path, "")
    assert keys.secrets(USE_PEER_CALLS) == ()
    with pytest.raises(LocalError, match="in clear"):
        await keys.add("some secret")
    assert not file_of(tmp_path).exists()


async def test_a_rotation_survives_a_restart_with_the_old_setting(tmp_path: Path) -> None:
    keys = await loaded(tmp_path)
    told: list[tuple[str, ...]] = []
    keys.subscribe(lambda: told.append(keys.ring.ids))
    second = await keys.add("second secret")
    keys.use(second)
    keys.remove(key_id("first secret"))
    assert told[-1] == (second,) == (await loaded(tmp_path)).ring.ids
    assert len(told) == 3
    assert stat.S_IMODE(file_of(tmp_path).stat().st_mode) == 0o600
    assert "secret" not in file_of(tmp_path).read_text()


async def test_a_new_key_in_the_settings_replaces_the_ring(tmp_path: Path) -> None:
    keys = await loaded(tmp_path)
    await keys.add("second secret")
    assert (await loaded(tmp_path, "third secret")).ring.ids == (key_id("third secret"),)


async def test_the_rotated_key_set_where_the_node_is_started_is_the_ring(tmp_path: Path) -> None:
    keys = await loaded(tmp_path)
    keys.use(await keys.add("second secret"))
    assert (await loaded(tmp_path, "second secret")).ring.ids == (key_id("second secret"),)


async def test_a_refused_change_leaves_ring_and_file_alone(tmp_path: Path) -> None:
    keys = await loaded(tmp_path)
    for change in (keys.use, keys.remove):
        with pytest.raises(LocalError, match="no key"):
            change("00000000")
    with pytest.raises(LocalError, match="8 to 1024"):
        await keys.add("short")
    assert keys.ring.ids == (key_id("first secret"),)
    assert not file_of(tmp_path).exists()


async def test_a_ring_that_cannot_be_written_does_not_change(tmp_path: Path) -> None:
    keys = await loaded(tmp_path)
    file_of(tmp_path).with_name("keyring.new").mkdir()
    with pytest.raises(LocalError, match="cannot be written"):
        await keys.add("second secret")
    assert keys.ring.ids == (key_id("first secret"),)


@pytest.mark.parametrize("damage", ["", "{", json.dumps({"format": 1}), json.dumps([])])
async def test_a_damaged_file_is_named_and_never_guessed(tmp_path: Path, damage: str) -> None:
    await (await loaded(tmp_path)).add("second secret")
    file_of(tmp_path).write_text(damage)
    with pytest.raises(SettingsError, match="keyring cannot be read"):
        await loaded(tmp_path)


async def test_a_key_that_is_no_secret_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--cluster-key"):
        await loaded(tmp_path, "short")
