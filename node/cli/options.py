"""Options of `grapevine start`, made from the fields of `Settings`, and the reader of the configuration file.

Precedence is click's own: a flag, then the environment (`auto_envvar_prefix`), then the file (`default_map`).
Values that depend on the host have no default here; `make_settings` finds them.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import shlex
import tomllib
import typing
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from node.settings import Settings

if typing.TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:  # older versions of click are not generic
    _ParamType = click.ParamType

PREFIX = "GRAPEVINE"
#: Keys whose several values may follow one flag, as in vLLM: `--join a:1 b:2`.
LISTS = ("join", "served_model_name", "api_key", "cors_origin")
#: Largest configuration file, bytes.
MAX_FILE_BYTES = 1024 * 1024


class Words(_ParamType):
    """One item of a list; in the environment, items are separated by commas or blanks."""

    name = "text"

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        """The items of an environment variable."""
        return [word for word in re.split(r"[,\s]+", rv) if word]


class ShellWords(_ParamType):
    """Words quoted as in a shell, or a list of them."""

    name = "arguments"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """The words."""
        if isinstance(value, list | tuple):
            return tuple(str(word) for word in value)
        try:
            return tuple(shlex.split(value))
        except ValueError as error:
            self.fail(f"{value!r}: {error}; quote it as in a shell", param, ctx)


@cache
def kinds() -> dict[str, type]:
    """The type of each key's values; `tuple` for a list of texts."""
    hints = typing.get_type_hints(Settings)
    return {item.name: typing.get_origin(hints[item.name]) or hints[item.name] for item in dataclasses.fields(Settings)}


def settings_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with one option for each key and with `--config`."""
    for item in reversed(dataclasses.fields(Settings)):
        command = _option(item)(command)
    return click.option(
        "--config",
        type=click.Path(dir_okay=False, path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=_load,
        help="TOML file with the same keys (gossip-port = 7000); flags and environment win over it.",
    )(command)


def split_arguments(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """What is ours and what comes after `--`; a list flag is repeated before each of its values."""
    words = list(args)
    cut = words.index("--") if "--" in words else len(words)
    own: list[str] = []
    list_flag = ""
    for word in words[:cut]:
        if word.startswith("-"):
            name = word.removeprefix("--").replace("-", "_")
            list_flag = word if name in LISTS else ""
            own.append(word)
        elif list_flag and own[-1] != list_flag:
            own += [list_flag, word]
        else:
            own.append(word)
    return own, words[cut + 1 :]


def origin_of(ctx: click.Context, error: click.BadParameter) -> str:
    """Where a refused value came from, for its message: empty for a flag."""
    name = error.param.name if error.param is not None else None
    if name is None:
        return ""
    source = ctx.get_parameter_source(name)
    if source is ParameterSource.ENVIRONMENT:
        return f" (from the environment, {PREFIX}_{name.upper()})"
    if source is ParameterSource.DEFAULT_MAP:
        return f" (from {ctx.meta.get('grapevine.config')})"
    return ""


def _option(item: dataclasses.Field[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    about, kind, name = item.metadata, kinds()[item.name], item.name.replace("_", "-")
    flags = f"--{name}/--no-{name}" if kind is bool else f"--{name}"
    shown: dict[str, Any] = {"help": about["text"], "metavar": about["metavar"] or None, "default": item.default}
    if about["derived"]:
        shown |= {"default": None, "help": f"{about['text']}  [default: {about['derived']}]"}
    elif item.default not in ("", ()):
        shown["show_default"] = True
    if item.name == "engine_args":
        shown |= {"type": ShellWords(), "default": ()}
    elif kind is tuple:
        shown |= {"type": Words(), "multiple": True}
    elif about["choices"]:
        shown["type"] = click.Choice(about["choices"])
    elif kind is Path:
        shown["type"] = click.Path(path_type=Path)
    elif kind is not bool:
        shown["type"] = kind
    return click.option(flags, item.name, **shown)


def _load(ctx: click.Context, param: click.Parameter, path: Path | None) -> None:
    if path is not None:
        ctx.meta["grapevine.config"] = path
        ctx.default_map = read_config(path)


def read_config(path: Path) -> dict[str, Any]:
    """The keys of a configuration file. Raises `click.BadParameter` with what to do."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise click.BadParameter(f"{path} has more than {MAX_FILE_BYTES} bytes")
        loaded = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise click.BadParameter(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise click.BadParameter(f"{path} is no TOML: {error}") from error
    values: dict[str, Any] = {}
    for key, value in loaded.items():
        name = key.replace("-", "_")
        if name not in kinds():
            raise click.BadParameter(f"{path}: unknown key {key!r}{_suggestion(name)}")
        if name in values:
            raise click.BadParameter(f"{path}: {key!r} is there twice, with a dash and with an underscore: keep one")
        values[name] = _checked(path, key, name, value)
    return values


def _checked(path: Path, key: str, name: str, value: Any) -> Any:
    kind = kinds()[name]
    if kind is tuple:
        if isinstance(value, str):
            return value if name == "engine_args" else Words().split_envvar_value(value)
        good = isinstance(value, list) and all(isinstance(word, str) for word in value)
        wanted = 'a list of texts, such as ["a", "b"]'
    elif kind is bool:
        good, wanted = isinstance(value, bool), "true or false"
    elif kind in (int, float):
        allowed = (int, float) if kind is float else (int,)
        good, wanted = isinstance(value, allowed) and not isinstance(value, bool), "a number"
    else:
        good, wanted = isinstance(value, str), "a text in quotes"
    if not good:
        raise click.BadParameter(f"{path}: {key} must be {wanted}, not {value!r}")
    return value


def _suggestion(name: str) -> str:
    near = difflib.get_close_matches(name, kinds(), n=1, cutoff=0.6)
    if near:
        return f": did you mean {near[0].replace('_', '-')!r}?"
    return f"; known keys: {', '.join(sorted(known.replace('_', '-') for known in kinds()))}"
