"""What `scripts/audit` runs: pip-audit over the pinned lists, and a verdict that does not take silence for health.

pip-audit calls a version that its database does not know "skipped" and ends well. Where the database cannot be reached
that would be all of them, so one version is asked about first.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

#: Exit statuses.
WELL, FOUND, UNREACHABLE = 0, 1, 3
#: Seconds for one list.
LIMIT_S = 600.0
_PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;+]+)")


def pins(text: str) -> list[str]:
    """The `name==version` lines of a list; a local part of a version (`+cpu`) is no other release."""
    return [f"{found[1]}=={found[2]}" for line in text.splitlines() if (found := _PIN.match(line))]


def judge(report: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What is known against the versions, and which could not be looked up."""
    found = [
        f"{item['name']} {item['version']}: {weakness['id']}"
        + (
            f", mended in {', '.join(weakness['fix_versions'])}"
            if weakness.get("fix_versions")
            else ", no mended version"
        )
        for item in report["dependencies"]
        for weakness in item.get("vulns", [])
    ]
    unknown = [item["name"] for item in report["dependencies"] if "skip_reason" in item]
    return found, unknown


def ask(pip_audit: str, wanted: Iterable[str]) -> dict[str, Any]:
    """The report of pip-audit on these versions. Raises `RuntimeError` when there is none."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed:
        listed.write("\n".join(wanted) + "\n")
        listed.flush()
        options = ("--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json", "--desc", "off")
        done = subprocess.run(
            [pip_audit, *options, "-r", listed.name], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise RuntimeError((done.stderr.strip().splitlines() or ["pip-audit said nothing"])[-1]) from None
    return report


def main(arguments: Sequence[str]) -> int:
    """PIP_AUDIT FOLDER: audit every list of the folder."""
    pip_audit, folder = arguments
    lists = {path.name: pins(path.read_text()) for path in sorted(Path(folder).glob("*.txt"))}
    try:
        first = next(iter(lists.values()))[:1]
        if judge(ask(pip_audit, first))[1] == [first[0].split("==")[0]]:
            print("NOT AUDITED: the advisory database cannot be reached from here", file=sys.stderr)
            return UNREACHABLE
        status = WELL
        for name, wanted in lists.items():
            found, unknown = judge(ask(pip_audit, wanted))
            for line in found:
                print(f"{name}: {line}")
            if unknown:
                print(f"{name}: not looked up: {', '.join(unknown)}")
            if found or unknown:
                status = FOUND
            print(f"{name}: {len(wanted)} versions, {len(found)} weaknesses known", file=sys.stderr)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"NOT AUDITED: {error}", file=sys.stderr)
        return UNREACHABLE
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
