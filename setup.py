"""Compiles the gossip core with mypyc, where `GRAPEVINE_COMPILE=1` asks for it; everything else is in pyproject.toml.

Python stays the one source, and what is built without that setting is the same for every platform. Rules:

1. All of `COMPILED` or nothing: where it cannot be built, the installation fails and says why.
2. Into a wheel only, from an empty folder: what was compiled never lies beside a source that may be edited.
3. Compiled and plain do the same (`tests/ecosystem/test_compiled.py`). What is written in such a module must not rest
   on the identity of tuples, which are kept as their fields; on generator expressions that are not used up at once,
   for they are; on enums with a constructor; or on methods that are replaced at run time.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError

SWITCH = "GRAPEVINE_COMPILE"
#: The compiler; the same version as in requirements/dev.txt.
COMPILER = "mypy==2.4.1"
#: What of the package stays as it is: the shell and its files, exceptions (mypyc makes none of Python's), what is rare.
PLAIN = {
    "__init__", "agent", "boot", "build", "chaos", "checkers", "checks", "discovery", "errors", "keyring", "report",
    "seeds", "snapshot", "sockets", "streams",
}  # fmt: skip
#: The rest: the protocol, and the simulator that it is tried in.
COMPILED = sorted(str(path) for path in Path("gossip").rglob("*.py") if path.stem not in PLAIN)
#: Without our settings for mypy and the types of dependencies, so that it comes out the same wherever it is built.
OPTIONS = ("--config-file=", "--ignore-missing-imports", "--python-version=3.11")


class Build(build):
    """Builds in a folder of its own (rule 2)."""

    def initialize_options(self) -> None:
        """Make that folder; it goes with the process."""
        super().initialize_options()
        self._folder = tempfile.TemporaryDirectory(prefix="grapevine-build-")
        self.build_base = self._folder.name


class Compile(build_ext):
    """Lets mypyc say what there is to build: it is not there yet when pip asks what building needs."""

    def finalize_options(self) -> None:
        """Translate to C, into the folder of the build."""
        if self.inplace or self.editable_mode:
            raise BaseError(
                f"{SWITCH} is for wheels: an editable installation would run what was compiled before an edit"
            )
        require_compiler()
        try:
            from mypyc.build import mypycify
        except ImportError:
            raise BaseError(f"{SWITCH} needs {COMPILER}; pip brings it unless --no-build-isolation is given") from None
        self.distribution.ext_modules = mypycify(
            [*OPTIONS, *COMPILED],
            opt_level="3",
            debug_level="0",
            group_name="gossip",
            target_dir=str(Path(self.get_finalized_command("build").build_base) / "c"),
        )
        super().finalize_options()


def require_compiler() -> None:
    """Look, before a minute of work. :raises BaseError: there is no C compiler, or no header of Python for it."""
    command = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    header = Path(sysconfig.get_path("include"), "Python.h")
    missing = (
        command.split()[0] if shutil.which(command.split()[0]) is None else header if not header.exists() else None
    )
    if missing is not None:
        mend = "install them (Debian, Ubuntu: sudo apt install gcc python3-dev), or leave the setting out"
        raise BaseError(f"{SWITCH} needs a C compiler and Python's headers, and there is no {missing}: {mend}")


def asked() -> bool:
    """Whether to compile. :raises BaseError: the setting says neither."""
    said = os.environ.get(SWITCH, "0")
    if said not in ("0", "1"):
        raise BaseError(f"{SWITCH} is 1 to compile or 0 not to, but not {said!r}")
    return said == "1"


def options() -> dict[str, Any]:
    """What compiling adds to the build."""
    names = (path.removesuffix(".py").replace("/", ".") for path in COMPILED)
    return {
        "setup_requires": [COMPILER],
        "ext_modules": [Extension(name, []) for name in names],
        "cmdclass": {"build": Build, "build_ext": Compile},
    }


setup(**(options() if asked() else {}))
