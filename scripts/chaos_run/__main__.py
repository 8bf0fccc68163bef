"""Command line of `scripts/chaos`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Coroutine
from pathlib import Path

from chaos_run import network
from chaos_run.cluster import NotReady, names
from chaos_run.engines import KINDS
from chaos_run.plan import PlanConfig, What, make_plan
from chaos_run.report import Report
from chaos_run.run import planned, rolling
from chaos_run.stage import Scene

MOST_NODES = 20


def main() -> int:
    """Run; 0 only when nothing was lost, doubled, wrong or leaked."""
    options = _options()
    why_not = "" if os.environ.get(network.INSIDE) else network.enter(["-m", "chaos_run", *sys.argv[1:]])
    world = network.make(options.nodes, why_not)
    if world.no_cuts:
        _say(f"links cannot be cut here: {world.no_cuts}")
    seconds = options.minutes * 60
    folder = Path(tempfile.mkdtemp(prefix="gvchaos-", dir=options.folder))
    try:
        report = asyncio.run(_until_told(_run(options, seconds, folder, world)))
    except NotReady as error:
        _say(str(error))
        return 1
    except asyncio.CancelledError:
        _say(f"ended by SIGTERM: every process of the run has been ended; logs are in {folder}")
        return 1
    for line in report.faults():
        _say(line)
    if report.good and not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        _say(f"logs and journals are in {folder}")
    if options.json:
        print(json.dumps(report.figures))
    else:
        for name, value in report.figures.items():
            print(f"{name:22} {value}")
    return 0 if report.good else 1


async def _until_told(run: Coroutine[None, None, Report]) -> Report:
    """Do it; SIGTERM ends it in order, with everything that it has started."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await run


def _run(
    options: argparse.Namespace, seconds: float, folder: Path, world: network.Network
) -> Coroutine[None, None, Report]:
    engines = KINDS[options.engines]
    scene = Scene(engines, options.nodes, options.seed, folder, world, _say)
    if options.rolling:
        return rolling(scene, seconds, options.rate)
    leave_out = {What.CUT_LINK, What.CUT_NODE} if world.no_cuts else set()
    leave_out |= {what for what in What if what.value in options.without}
    if not engines.journals:
        leave_out.add(What.FILL)  # whose answers nobody knows
    config = PlanConfig(every_s=options.every, rest_s=engines.rest_s)
    plan = make_plan(names(options.nodes), seconds, options.seed, config, leave_out)
    return planned(scene, plan, seconds, options.rate or engines.rate)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/chaos",
        description="Breaks a cluster under load after a seeded plan and checks every byte of every answer. Status 0: "
        "nothing was wrong, lost, computed twice or leaked. docs/chaos.md explains it.",
    )
    parser.add_argument("--engines", choices=sorted(KINDS), default="emulated")
    parser.add_argument("--nodes", type=int, default=4, help=f"3 to {MOST_NODES}; 4 unless told otherwise")
    parser.add_argument("--minutes", type=float, default=1.0, help="of load; 1 unless told otherwise")
    parser.add_argument("--seed", type=int, default=1, help="of plan and requests")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--every", type=float, default=PlanConfig().every_s, help="mean seconds between two strikes")
    parser.add_argument("--rate", type=float, help="requests a second for each node")
    parser.add_argument(
        "--rolling", action="store_true", help="instead of a plan: restart each node in turn at 70 %% load"
    )
    parser.add_argument(
        "--without", nargs="*", default=[], choices=[what.value for what in What], help="kinds to leave out"
    )
    parser.add_argument("--folder", type=Path, help="where logs and journals go; a short path")
    parser.add_argument("--keep", action="store_true", help="keep logs and journals of a good run too")
    options = parser.parse_args()
    if not 3 <= options.nodes <= MOST_NODES:
        parser.error(f"--nodes: use 3 to {MOST_NODES}")
    return options


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
