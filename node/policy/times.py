"""What a candidate's times are taken to be: its own, as far as they are known well, and those usual for the model."""

from __future__ import annotations

from node.load import LoadVector
from node.prefill import PRIOR, UNMEASURED, PrefillTime
from node.view import Typical, gap_ms

#: Used where neither the candidate nor its peers have measured anything.
PRIOR_GAP_MS = 25.0
PRIOR_REQUEST_MS = 1000.0


def times_of(load: LoadVector, typical: Typical, few: float) -> tuple[PrefillTime, float, float]:
    """How long a prompt takes, a gap, and a whole request, in milliseconds; `few` samples count half."""
    share = few / (load.samples + few)
    prefill, usual = load.prefill, typical.prefill
    if usual is not UNMEASURED and prefill != usual:
        prefill = prefill.towards(usual, share) if prefill.measured else usual
    elif not prefill.measured:
        prefill = PRIOR
    gap, usual_gap = load.itl_p50_ms or gap_ms(load), typical.itl_ms
    whole, usual_whole = load.e2e_p50_ms, typical.e2e_ms
    return (
        prefill,
        gap + share * (usual_gap - gap) if gap and usual_gap else gap or usual_gap or PRIOR_GAP_MS,
        whole + share * (usual_whole - whole) if whole and usual_whole else whole or usual_whole or PRIOR_REQUEST_MS,
    )
