"""What a soak calls a fault."""

from collections import Counter

import pytest
from soak_run.load import Tally
from soak_run.verdict import faults

WARM, LONG = 10, 60


def run(**last: float) -> list[dict[str, float]]:
    """Samples that are flat but for these figures, which grow from one sample to the next."""
    flat = {
        "a.node_mib": 100.0,
        "a.engine_mib": 500.0,
        "a.core_mib": 450.0,
        "a.worker_mib": 1900.0,
        "a.node_files": 50.0,
        "shm_beyond_pools_mib": 20.0,
        "a.pool_used_mib": 0.0,
        "a.pool_granted": 32.0,
    }
    return [
        {name: value + last.get(name.replace(".", "_"), 0.0) * number for name, value in flat.items()}
        for number in range(LONG)
    ]


def good() -> Tally:
    return Tally(requests=100, cut=5, pulled_blocks=50, pulls=10)


END = {
    "a.pool_leases": 0.0,
    "a.pool_expired_leases": 0.0,
    "a.pool_partial": 0.0,
    "a.pool_granted": 32.0,
    "a.engine_running": 0.0,
    "a.engine_waiting": 0.0,
    "a.engine_kv_use": 0.0,
}


def test_a_flat_run_has_no_fault_and_a_pool_may_fill_up() -> None:
    assert faults(run(a_pool_used_mib=5.0), END, good()) == []


def test_growth_while_it_warms_up_is_none() -> None:
    samples = run()
    for number in range(WARM):
        samples[number] |= {"a.worker_mib": 100.0 * number}
    assert faults(samples, END, good()) == []


@pytest.mark.parametrize("figure", ["a_node_mib", "a_core_mib", "a_worker_mib", "a_node_files", "shm_beyond_pools_mib"])
def test_what_keeps_growing_is_named(figure: str) -> None:
    (line,) = faults(run(**{figure: 10.0}), END, good())
    assert "grew from" in line and line.split()[0].replace(".", "_") == figure


@pytest.mark.parametrize("name", [name for name in END if name != "a.pool_granted"])
def test_what_is_open_at_the_end_is_named(name: str) -> None:
    assert faults(run(), END | {name: 1.0}, good()) == [f"{name} is 1 at the end"]


def test_slots_that_a_pull_kept_are_named() -> None:
    (line,) = faults(run(), END | {"a.pool_granted": 33.0}, good())
    assert line == "a.pool_granted was 32 before the first request and is 33 at the end"
    assert faults(run(), END | {"a.pool_granted": 30.0}, good()) == []


def test_wrong_and_missing_answers_and_a_run_without_pulls_are_faults() -> None:
    lost = good()
    lost.failures = Counter({"status 500": 2})
    assert "2 requests failed" in faults(run(), END, lost)[0]
    wrong = good()
    wrong.differ = 2
    assert "2 of 95 answers differ" in faults(run(), END, wrong)[0]
    assert "nothing was tested" in faults(run(), END, Tally(requests=10))[0]
