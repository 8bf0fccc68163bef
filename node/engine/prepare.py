"""What must be there before vLLM is started: vLLM itself, the model, a free socket."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from node import dirs, model_store
from node.engine.command import EngineCommand, Host, build_command, own_command, vllm_version
from node.engine.failure import NO_VLLM, CannotStart, Cause, Failure
from node.settings import Settings

#: Seconds to find out whether somebody listens on a socket of this host.
LISTENER_TIMEOUT_S = 1.0


async def prepare_engine(settings: Settings, say: Callable[[str], None]) -> EngineCommand:
    """The command for the engine of these settings: the user's own, else vLLM's.

    Raises `CannotStart`, `ModelStoreError` or `SettingsError`.
    """
    if not settings.engine_command:
        return await prepare_vllm(settings, say)
    command = own_command(settings, os.environ)
    _clear_the_way(settings, command)
    say(f"starting {command.argv[0]}")
    return command


async def prepare_vllm(settings: Settings, say: Callable[[str], None]) -> EngineCommand:
    """The command for the engine of these settings; fetches the default model when no other is named.

    Raises `CannotStart`, `ModelStoreError` or `SettingsError`.
    """
    if vllm_version() is None:
        raise CannotStart(NO_VLLM)
    named = settings.model
    model = find_model(named) if named else str(await model_store.fetch_default_model(say))
    command = build_command(settings, model, Host.here())
    _clear_the_way(settings, command)
    say("starting vLLM")
    return command


def _clear_the_way(settings: Settings, command: EngineCommand) -> None:
    if command.address.socket is not None:
        dirs.private_dir(settings.run_dir)
        remove_stale_socket(command.address.socket)


def find_model(model: str) -> str:
    """The model as vLLM is to be told. Raises `CannotStart` when it can only be a directory and there is none."""
    path = Path(model).expanduser()
    if looks_like_path(model) and not path.is_dir():
        text = (
            f"the model {model} does not exist: --model takes a directory with a config.json, or the name of a "
            "repository (owner/name)"
        )
        raise CannotStart(Failure(Cause.NO_MODEL, text, permanent=True))
    return str(path) if model.startswith("~") else model


def looks_like_path(model: str) -> bool:
    """Whether `model` can only be meant as a directory: `owner/name` and `name` may be repositories."""
    return model.startswith(("/", "./", "../", "~")) or model.count("/") > 1


def remove_stale_socket(path: Path) -> None:
    """Remove the socket file that a killed engine left; vLLM does not. Raises `CannotStart` when it is in use."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise CannotStart(
                Failure(Cause.TAKEN, f"{path} is in the way of the engine's socket: remove it", permanent=True)
            )
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(LISTENER_TIMEOUT_S)
        try:
            client.connect(str(path))
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            return
    raise CannotStart(
        Failure(Cause.TAKEN, f"another process listens on the engine's socket {path}: end it or change --name")
    )
