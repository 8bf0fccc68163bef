"""docs/benchmarks.md: a block per bench between two marks, written from its JSON; the prose around it stays."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from pathlib import Path

from benches.result import Result, Target, meets
from benches.trace_scale import SCALES

DOCUMENT = Path("docs/benchmarks.md")
_TITLE = """# Benchmarks

Everything here comes from `scripts/bench`, on the machine and the day that each block names.
"""


def write(results: Sequence[Result], command: Sequence[str]) -> None:
    """Replace the blocks of these benches, or add them at the end."""
    text = DOCUMENT.read_text() if DOCUMENT.exists() else _TITLE
    for result in results:
        begin, end = f"<!-- bench {result.bench} -->", f"<!-- end {result.bench} -->"
        block = f"{begin}\n{render(result, command)}{end}"
        if begin in text:
            text = text[: text.index(begin)] + block + text[text.index(end) + len(end) :]
        else:
            text = f"{text.rstrip()}\n\n## {result.bench}\n\n{block}\n"
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(text)


def render(result: Result, command: Sequence[str]) -> str:
    """Give date, machine, command, the table of figures by size, and the notes."""
    m = result.machine
    lines = [
        f"{datetime.date.today().isoformat()}, `{' '.join(command)}`, {m['cpu']}, {m['cores']} cores,"
        f" {m['memory_gb']} GB, {m['system']}, Python {m['python']}, load {m['load_1min']} by others at the start"
        f" (yardstick {m['yardstick_cpu_s']} CPU s).",
        "",
        *_table(result),
        "",
        *(f"- {note}" for note in result.notes),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _table(result: Result) -> list[str]:
    """One row per figure without its size, one column per size; a figure that misses its target is bold."""
    cells = {split(name): value for name, value in result.figures.items()}
    sizes = sorted({size for _, size in cells}, key=_magnitude)
    names = list(dict.fromkeys(name for name, _ in cells))
    lines = ["| figure | " + " | ".join(size or "-" for size in sizes) + " | target |", "|---" * (len(sizes) + 2) + "|"]
    for name in names:
        row = [_cell(cells.get((name, size)), result.targets.get(_joined(name, size))) for size in sizes]
        aims = [(size, result.targets[_joined(name, size)]) for size in sizes if _joined(name, size) in result.targets]
        said = ", ".join(f"{size} {op} {value:g}".strip() for size, (op, value) in aims)
        lines.append(f"| `{name}` | {' | '.join(row)} | {said} |")
    return lines


def split(name: str) -> tuple[str, str]:
    """Split `row_age_p50_s_n100` into the figure and its size, empty without one.

    A size is `n100` nodes, `64k` or `1m` bytes, or a trace at a load: `conversation_50`.
    """
    replayed = re.fullmatch(rf"(.+)_((?:{'|'.join(SCALES)})_\d+)", name)
    if replayed is not None:
        return replayed[1], replayed[2]
    stem, _, last = name.rpartition("_")
    return (stem, last) if re.fullmatch(r"n\d+|\d+[km]", last) else (name, "")


def _magnitude(size: str) -> tuple[str, int, int]:
    """Order of the columns."""
    trace, _, load = size.rpartition("_")
    if trace:
        return (trace, 0, int(load))
    return ("", "km".find(size[-1:]) if size else -1, int(size.strip("nkm") or 0))


def _joined(name: str, size: str) -> str:
    return f"{name}_{size}" if size else name


def _cell(value: float | None, target: Target | None) -> str:
    if value is None:
        return ""
    return f"{value:g}" if target is None or meets(value, target) else f"**{value:g}**"
