"""Runs the random fault stories of `gossip.simulator.chaos` for many seeds; prints a line per failure and a summary.

    python scripts/sweep_gossip.py --seeds 1-500 --seconds 120

A failing seed is repeated, alone, with `--seeds N`; it fails in the same way. Exit 1 if any failed.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from gossip.simulator.chaos import Chaos


def main() -> int:
    """Sweep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1-100", help="first-last, or one")
    parser.add_argument("--seconds", type=float, default=90.0, help="virtual seconds of faults in each story")
    parser.add_argument("--sizes", default="3,4,5,8,13,21", help="cluster sizes, taken in turn")
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    sizes = [int(size) for size in options.sizes.split(",")]
    total: Counter[str] = Counter()
    failed, slowest, began = [], 0.0, time.process_time()
    for seed in range(int(first), int(last or first) + 1):
        chaos = Chaos(seed, sizes[seed % len(sizes)], options.seconds)
        try:
            outcome = chaos.run()
        except AssertionError:
            failed.append(seed)
            print(f"seed {seed}, {sizes[seed % len(sizes)]} nodes: {traceback.format_exc(limit=-1).strip()[-600:]}")
            continue
        total.update(outcome.counts)
        slowest = max(slowest, outcome.calm_s)
    print(
        f"{dict(total)}\nslowest agreement {slowest:.1f} s, {time.process_time() - began:.0f} CPU s, failed: {failed}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
