"""The table of faults in docs/kv.md names tests that are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOT_TESTS = re.compile(r"^(tests/|test_|scripts/|f$|l$|n$|e$|--)|\.py$")


def test_every_test_that_the_table_of_faults_names_is_there() -> None:
    text = (ROOT / "docs/kv.md").read_text()
    table = text.split("## What goes wrong, and the test of it")[1]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "`" in line]
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    known = set(re.findall(r"def test_(\w+)\(", sources))
    assert len(rows) >= 20
    for row in rows:
        names = [name for name in re.findall(r"`([^`]+)`", row) if not NOT_TESTS.search(name)]
        named = [name.split("[")[0] for name in names if name.split("[")[0] not in ("", "...")]
        assert named, row
        for name in named:
            wanted = name.removesuffix("...").rstrip("_")
            exact = wanted in known
            assert exact or (name.endswith("...") and any(test.startswith(wanted) for test in known)), name
