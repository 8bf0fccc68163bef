"""Profiles: what was written is read again, and what cannot be one is refused with the reason."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.emulator import profile
from node.emulator.config import PRESETS
from node.errors import LocalError

GOOD = {"name": "mine", "timing": {"step_s": 0.01, "prefill_s": 1e-4}}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_profile_that_was_written_is_read_again(tmp_path: Path, name: str) -> None:
    path = tmp_path / "engine.json"
    path.write_text(profile.as_json(PRESETS[name]))
    assert profile.read(path) == PRESETS[name]


def test_what_is_left_out_has_the_default() -> None:
    config = profile.from_json(json.dumps(GOOD))
    assert config.block_size == 16 and config.timing.decode_s == 0.0


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"block_sise": 16}, "unknown block_sise"),
        ({"block_size": "16"}, "block_size must be a whole number"),
        ({"block_size": True}, "block_size must be a whole number"),
        ({"name": ""}, "name is missing"),
        ({"enable_prefix_caching": 1}, "must be true or false"),
        ({"timing": None}, "timing must be a JSON object"),
        ({"timing": {"step_s": 0.01}}, "prefill_s missing"),
        ({"timing": {"step_s": "fast", "prefill_s": 1}}, "step_s must be a number"),
        ({"timing": {"step_s": float("nan"), "prefill_s": 1}}, "step_s must be between"),
        ({"kv_tokens": 10}, "less than one request"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, changed: dict[str, object], why: str) -> None:
    path = tmp_path / "engine.json"
    path.write_text(json.dumps({**GOOD, **changed}))
    with pytest.raises(LocalError, match=why) as error:
        profile.read(path)
    assert str(path) in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match=r"nobody\.json: No such file"):
        profile.read(tmp_path / "nobody.json")


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner)
       | st.dictionaries(st.sampled_from([*sorted(profile._CONFIG), "step_s", "prefill_s"]), inner)))  # fmt: skip
def test_no_other_error_comes_of_any_json(value: object) -> None:
    with contextlib.suppress(LocalError):
        profile.from_json(json.dumps(value))
