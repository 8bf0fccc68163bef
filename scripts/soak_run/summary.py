"""What a soak found, for people: requests, and how much each process held in the second and the last third. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def summary(report: Mapping[str, Any]) -> Iterator[str]:
    """Lines about a report of `soak_run`."""
    failed = sum(report["failures"].values())
    yield (
        f"{report['requests']} requests in {report['minutes']:g} minutes, {report['cut']} cut by their clients, "
        f"{report['pulls']} with pulls ({report['pulled_blocks']} blocks), {failed} failed, {report['differ']} differed"
    )
    for name, (middle, last) in report["second_and_last_third"].items():
        if name.endswith("_mib"):
            yield f"{name}: {middle:.0f} MiB, at the end {last:.0f} MiB"
