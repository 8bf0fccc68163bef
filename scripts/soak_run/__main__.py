"""Command line of the soak: three nodes with real engines and small pools, asked at random for some minutes."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from localcluster import LocalCluster

from soak_run.load import Load
from soak_run.samples import Sample, look, processes, shared_files
from soak_run.summary import summary
from soak_run.verdict import NOTHING_AT_THE_END, faults, thirds

NAMES = ("north", "east", "south")
MODEL = "SmolLM2-135M-Instruct"
EMULATED = (
    f"{shlex.join((sys.executable, '-c', 'from node.cli import main; main()'))} emulate --preset smollm2-cpu "
    f"--served-model-name {MODEL} --uds {{uds}} --link-socket {{link}} --kv-block-bytes 16384"
)
NODE_ARGS = {
    "real": ("--kv-pool-gib", "0.3"),
    "emulated": ("--kv-pool-gib", "0.001", "--engine-command", EMULATED),
}
"""Pools that a few documents fill."""
ENGINE_ARGS = (
    *("--dtype", "float32", "--max-model-len", "2048", "--enforce-eager"),
    *("--num-gpu-blocks-override", "64"),  # its own cache holds a few documents too: the others load or are pulled
)
#: What vLLM keeps on its own account would hide what we keep: a primitive of oneDNN for each length of a step that
#: comes by (1,024 of them), and heap that glibc does not give back. Here few are kept, and large blocks go back.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": "262144",
    "MALLOC_TRIM_THRESHOLD_": "262144",
}
CLIENTS = 4
LOOK_EVERY_S = 5.0
QUIET_S = 30.0
"""How long what a client left behind may take to end: a pull takes 15 s at most."""
SERIES_EVERY_S = 60.0


def main() -> int:
    """Run; 1 when something is not as it should be."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long to ask (30)")
    parser.add_argument("--seed", type=int, default=1, help="of the requests (1)")
    parser.add_argument(
        "--engines", choices=("real", "emulated"), default="real", help="emulated: to try the soak itself"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gv-soak-") as workdir:
        report = asyncio.run(_soak(Path(workdir), options.minutes * 60, options.seed, options.engines))
    if options.json:
        print(json.dumps(report))
    for line in summary(report):
        _say(line)
    for line in report["faults"]:
        _say(f"FAULT: {line}")
    _say("ok" if not report["faults"] else "not ok")
    return 1 if report["faults"] else 0


Report = dict[str, Any]


async def _soak(workdir: Path, seconds: float, seed: int, engines: str) -> Report:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # or the nodes would stay behind
    cluster = LocalCluster(
        workdir,
        NAMES,
        args=("--no-mdns", "--cluster", "soak", "--run-dir", str(workdir / "run"), *NODE_ARGS[engines]),
        engine_args=ENGINE_ARGS if engines == "real" else (),
        env=ENVIRONMENT,
    )
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=180)) as session:
        try:
            await cluster.start_all()
            await cluster.wait_ready(session)
            report = await _watched(cluster, session, seconds, seed)
            running = processes(cluster)
            files = shared_files(running)
        finally:
            await cluster.stop_all()
    report["faults"] += [f"process {process.pid} is left" for process in running if process.is_running()]
    report["faults"] += [f"{path} is left" for path in sorted(files) if path.exists()]
    return report


async def _watched(cluster: LocalCluster, session: aiohttp.ClientSession, seconds: float, seed: int) -> Report:
    load = Load(cluster, session, MODEL, random.Random(seed))
    samples: list[Sample] = [await look(cluster, session)]
    until = time.monotonic() + seconds
    async with asyncio.TaskGroup() as tasks:  # who is stopped stops them too, while the session is still open
        asking = tasks.create_task(load.run(CLIENTS, lambda: time.monotonic() >= until))
        while not asking.done():
            await asyncio.wait([asking], timeout=LOOK_EVERY_S)
            samples.append(await look(cluster, session))
            _say(
                f"{until - time.monotonic():6.0f} s left, {load.tally.requests} requests, {load.tally.pulls} with pulls"
            )
    end = await _settled(cluster, session)
    figures = {name: [round(value, 1) for value in thirds(name, samples)] for name in sorted(samples[0])}
    tally = load.tally
    each = max(1, round(SERIES_EVERY_S / LOOK_EVERY_S))
    return {
        "minutes": round(seconds / 60, 1),
        "requests": tally.requests,
        "cut": tally.cut,
        "pulls": tally.pulls,
        "pulled_blocks": tally.pulled_blocks,
        "differ": tally.differ,
        "failures": dict(tally.failures),
        "second_and_last_third": figures,
        "series": {name: [round(sample[name], 1) for sample in samples[::each]] for name in sorted(samples[0])},
        "end": end,
        "faults": faults(samples, end, tally),
    }


async def _settled(cluster: LocalCluster, session: aiohttp.ClientSession) -> Sample:
    """A last look, when all is over or should be."""
    give_up = time.monotonic() + QUIET_S
    while True:
        sample = await look(cluster, session)
        if not any(value for name, value in sample.items() if name.endswith(NOTHING_AT_THE_END)):
            return sample
        if time.monotonic() > give_up:
            return sample
        await asyncio.sleep(1.0)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
