"""What nvidia-smi prints, read. Both functions are pure; its output is taken as it is documented by NVIDIA."""

from __future__ import annotations

import re

from node.doctor.facts import Gpu

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_LINK = re.compile(r"NV\d+|PIX|PXB|PHB|NODE|SYS")


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Lines of ``index, name, memory.total, driver_version`` (csv, no header, no units).

    :raises ValueError: a line is of another form.
    """
    found = []
    for line in text.strip().splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 4 or not fields[0].isdigit():
            raise ValueError(f"nvidia-smi said {line[:80]!r}")
        memory = int(fields[2]) if fields[2].isdigit() else 0  # "[N/A]" where it is shared with the CPU
        found.append(Gpu(int(fields[0]), fields[1], memory, fields[3]))
    return tuple(found)


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """The matrix of ``nvidia-smi topo -m``: a pair of GPUs, lower index first -> its link. What is odd is left out."""
    links: dict[tuple[int, int], str] = {}
    columns: list[str] = []
    for line in _ESCAPES.sub("", text).splitlines():
        words = line.split()
        if not words:
            continue
        if not columns:
            columns = [word for word in words if word.startswith("GPU") and word[3:].isdigit()]
        elif words[0].startswith("GPU") and words[0][3:].isdigit():
            row = int(words[0][3:])
            for name, link in zip(columns, words[1:], strict=False):
                other = int(name[3:])
                if row < other and _LINK.fullmatch(link):
                    links[row, other] = link
    return links
