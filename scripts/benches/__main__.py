"""Command line of the benches: `NAME [options]`, `all`, or `peers install`."""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
from types import ModuleType

import benches
from benches import peers
from benches.document import DOCUMENT, write
from benches.result import Result, say


def bench_names() -> list[str]:
    """Every module of this package that has a `run`."""
    names = sorted(module.name for module in pkgutil.iter_modules(benches.__path__) if module.name != "__main__")
    return [name for name in names if hasattr(_module(name), "run")]


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"benches.{name}")


def _run(name: str, options: argparse.Namespace) -> Result:
    say(f"{name}{' (quick)' if options.quick else ''}")
    result: Result = _module(name).run(options)
    return result


def _parser(names: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Measures what docs/benchmarks.md reports.")
    commands = parser.add_subparsers(dest="bench", required=True, metavar="NAME")
    commands.add_parser("peers", help="Installs what benches compare with: `peers install`.")
    for name in [*names, "all"]:
        text = f"every bench, written to {DOCUMENT}" if name == "all" else (_module(name).__doc__ or "").split("\n")[0]
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--json", action="store_true", help="one JSON object on standard output")
        command.add_argument("--quick", action="store_true", help="under a minute: fewer repeats, smaller sizes")
        if name != "all":
            _module(name).add_arguments(command)
    return parser


def main() -> int:
    """Run; 0 when it measured, whatever the figures."""
    if sys.argv[1:2] == ["peers"]:
        return peers.main(sys.argv[2:])
    names = bench_names()
    parser = _parser(names)
    options = parser.parse_args()
    # Each bench has options of its own, some by the same name: `all` runs every one with its defaults.
    asked = [parser.parse_args([name, *["--quick"] * options.quick]) for name in names]
    results = [_run(each.bench, each) for each in (asked if options.bench == "all" else [options])]
    if options.json:
        found = [result.as_json() for result in results]
        print(json.dumps(found if options.bench == "all" else found[0]))
    if options.bench == "all":
        write(results, ["scripts/bench", *sys.argv[1:]])
        say(f"written: {DOCUMENT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
