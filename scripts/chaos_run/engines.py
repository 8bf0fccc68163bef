"""The two kinds of engines that a run may have: what starts them, how long that takes, and whose answers are known."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from chaos_run.asks import MODEL

#: How `grapevine` is started, so that it is the one of this tree.
GRAPEVINE = (sys.executable, "-c", "from node.cli import main; main()")
PRESET = "smollm2-cpu"
#: Bytes that stand for a KV block, and the size of a pool: so small that a few hundred requests fill it.
BLOCK_BYTES, POOL_GIB = 16_384, 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """One kind. Times in seconds."""

    name: str
    #: Options of `grapevine start`, by the file in which the engine may note what it does.
    options: Callable[[Path], tuple[str, ...]]
    #: What comes after `--`.
    arguments: tuple[str, ...] = ()
    #: For all nodes together to become ready, and for one while all others run.
    all_ready_s: float
    one_ready_s: float
    #: For a node that was disturbed to be well again (`plan.PlanConfig.rest_s`).
    rest_s: float
    #: Requests a second for each node: about half of what an engine can do.
    rate: float
    #: The engines write journals (`node.emulator.serve.journal`).
    journals: bool
    env: dict[str, str] = field(default_factory=dict)


def _emulated(journal: Path) -> tuple[str, ...]:
    engine = (
        f"{shlex.join(GRAPEVINE)} emulate --preset {PRESET} --served-model-name {MODEL} --uds {{uds}} "
        f"--link-socket {{link}} --kv-block-bytes {BLOCK_BYTES} --journal {shlex.quote(str(journal))}"
    )
    return ("--engine-command", engine, "--kv-pool-gib", str(POOL_GIB))


EMULATED = Engines(
    name="emulated", options=_emulated, all_ready_s=120.0, one_ready_s=60.0, rest_s=8.0, rate=0.5, journals=True
)
#: vLLM with the default model. In float32, where a carried answer does not differ by rounding from a whole one.
REAL = Engines(
    name="real",
    options=lambda _: ("--served-model-name", MODEL, "--kv-pool-gib", "1"),
    arguments=("--dtype", "float32", "--max-model-len", "4096", "--enforce-eager"),
    all_ready_s=420.0,
    one_ready_s=300.0,
    rest_s=90.0,
    rate=0.1,
    journals=False,
)
KINDS = {kind.name: kind for kind in (EMULATED, REAL)}
