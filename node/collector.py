"""How often Python's garbage collector looks, in the node's process and in its workers."""

from __future__ import annotations

import gc

#: Objects made before the collector looks for cycles (Python: 700), and how many such looks make a look at older ones.
#: A request makes a few hundred objects and no cycles: the rare ones that errors make can wait.
GC_THRESHOLD = (20_000, 20, 20)


def spare_collector() -> None:
    """Take what was made so far out of the collector's sight: modules and parts that live as long as the process."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLD)
