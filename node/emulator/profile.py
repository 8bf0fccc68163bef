"""A profile: what one engine on one kind of hardware is like, as a file that `grapevine emulate --profile` reads.

One JSON object with the fields of `EngineConfig` under their names; `timing` is an object of seconds. What is left
out has the default. `scripts/bench fit --save FILE` writes one.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

from node.emulator.config import EngineConfig, Timing
from node.errors import LocalError

_CONFIG = {field.name for field in fields(EngineConfig) if field.init}
_TIMING = {field.name for field in fields(Timing)}
_WHOLE = _CONFIG - {"name", "timing", "enable_prefix_caching"}


def as_json(config: EngineConfig) -> str:
    """The text of a profile's file."""
    timing = {name: float(f"{getattr(config.timing, name):.4g}") for name in sorted(_TIMING)}
    limits = {name: getattr(config, name) for name in sorted(_CONFIG - {"timing"})}
    return json.dumps({**limits, "timing": timing}, indent=2) + "\n"


def read(path: Path) -> EngineConfig:
    """The profile in a file. Raises `LocalError` naming the file and what is wrong with it."""
    try:
        return from_json(path.read_text())
    except OSError as error:
        raise LocalError(f"profile {path}: {error.strerror}") from error
    except LocalError as error:
        raise LocalError(f"profile {path}: {error}") from error


def from_json(text: str) -> EngineConfig:
    """The profile in a text. Raises `LocalError`."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise LocalError(f"not JSON: {error}") from error
    given = _object(given, _CONFIG, "the profile")
    times = _object(given.pop("timing", None), _TIMING, "timing")
    for name, value in times.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise LocalError(f"timing: {name} must be a number of seconds")
    for name, value in given.items():
        if name in _WHOLE and (isinstance(value, bool) or not isinstance(value, int)):
            raise LocalError(f"{name} must be a whole number")
    if not isinstance(given.get("name"), str) or not given["name"]:
        raise LocalError("name is missing: what the profile is called")
    if not isinstance(given.get("enable_prefix_caching", True), bool):
        raise LocalError("enable_prefix_caching must be true or false")
    missing = {"step_s", "prefill_s"} - times.keys()
    if missing:
        raise LocalError(f"timing: {', '.join(sorted(missing))} missing")
    return EngineConfig(timing=Timing(**times), **given)  # type: ignore[arg-type]


def _object(value: object, known: set[str], what: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise LocalError(f"{what} must be a JSON object")
    unknown = value.keys() - known
    if unknown:
        raise LocalError(
            f"{what}: unknown {', '.join(sorted(map(str, unknown)))}; known are {', '.join(sorted(known))}"
        )
    return dict(value)
