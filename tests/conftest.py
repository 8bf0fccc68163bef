"""Property tests draw the same examples on every run, and none of them is timed.

A change is judged by what it changed, not by the luck of the draw; and a busy machine fails no test. To search
further: `scripts/test --hypothesis-profile=search`, which draws anew and ten times as many.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("search", max_examples=1000, deadline=None)
settings.load_profile("fixed")

TOLD_LINES = 80
"""Of each failure, the last lines: what was asserted, and what the test had printed until then."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failures", type=Path, metavar="FILE", help="append every failure, with its traceback, to FILE")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """For `scripts/test`, which runs pytest three times and says at its end what failed in any of them."""
    path: Path | None = config.getoption("--failures")
    if path is None:
        return
    failures = [*terminalreporter.stats.get("failed", ()), *terminalreporter.stats.get("error", ())]
    with path.open("a") as file:
        for report in failures:
            printed = "\n".join(f"--- {title}\n{text}" for title, text in report.sections)
            lines = f"{report.longreprtext}\n{printed}".splitlines()
            file.write("\n".join([f"____ {report.nodeid} ({report.when})", *lines[-TOLD_LINES:], "", ""]))
