"""The incarnation: one integer that orders everything said about a node.

Rules
1. The high bits are the boot counter, persisted by the node and raised at each start (`gossip.boot`).
2. The low 16 bits count the refutations within that boot. A later boot therefore beats every accusation against an
   earlier one at once, without having to hear of it first.
3. A node that hears an accusation at or above its own incarnation moves above it. If the accusation is from a *later*
   boot than its own (the counter file was lost), it takes a whole new boot, because rows and slow state of that other
   life may still be around under the boot number that was accused.

Public views show the boot counter as `incarnation`; rows and slow state belong to a boot, not to a refutation.
"""

from __future__ import annotations

from typing import Final

REFUTATION_BITS: Final = 16
_REFUTATION_MASK: Final = (1 << REFUTATION_BITS) - 1


def first(boot: int) -> int:
    """Give the incarnation with which a boot starts."""
    return boot << REFUTATION_BITS


def boot_of(incarnation: int) -> int:
    """Give the boot counter within an incarnation."""
    return incarnation >> REFUTATION_BITS


def refutations_of(incarnation: int) -> int:
    """Give how often the node has had to refute since that boot."""
    return incarnation & _REFUTATION_MASK


def above(own: int, accusation: int) -> int:
    """Give the incarnation that refutes `accusation` for a node that is at `own` (rule 3)."""
    if boot_of(accusation) > boot_of(own):
        return first(boot_of(accusation) + 1)
    return max(own, accusation) + 1
