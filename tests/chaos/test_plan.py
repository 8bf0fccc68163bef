"""Plans of destruction: the same for the same seed, and never more than the cluster can stand."""

from __future__ import annotations

from chaos_run.plan import KINDS, PlanConfig, Strike, What, make_plan
from hypothesis import given, settings
from hypothesis import strategies as st

names = st.integers(3, 20).map(lambda count: [f"n{number}" for number in range(count)])
configs = st.builds(
    PlanConfig,
    every_s=st.floats(0.2, 10),
    calm_s=st.floats(0, 10),
    rest_s=st.floats(0, 30),
    down_share=st.floats(0.05, 1),
)


def spans(plan: tuple[Strike, ...], config: PlanConfig) -> list[tuple[float, float, Strike]]:
    """From when to when each strike keeps its nodes from being well."""
    return [
        (s.at_s, s.at_s + s.lasts_s + KINDS[s.what].trails_s + config.rest_s, s) for s in plan if KINDS[s.what].disturbs
    ]


@settings(deadline=None)
@given(names, st.floats(10, 600), st.integers(0, 2**32), configs)
def test_the_same_seed_gives_the_same_plan(nodes: list[str], seconds: float, seed: int, config: PlanConfig) -> None:
    assert make_plan(nodes, seconds, seed, config) == make_plan(nodes, seconds, seed, config)


@settings(deadline=None)
@given(names, st.floats(10, 600), st.integers(0, 2**32), configs)
def test_no_node_is_struck_before_it_is_well_and_never_too_many(
    nodes: list[str], seconds: float, seed: int, config: PlanConfig
) -> None:
    plan = make_plan(nodes, seconds, seed, config)
    disturbed = spans(plan, config)
    # One more than the share, for the two ends of a cut link: neither of them is away.
    most = max(1, min(int(len(nodes) * config.down_share), len(nodes) - 2)) + 1
    for start, _, strike in disturbed:
        overlapping = [other for begin, end, other in disturbed if begin <= start < end - 0.01]
        struck = [name for other in overlapping for name in other.nodes]
        assert len(struck) == len(set(struck)), (strike, overlapping)
        assert len(struck) <= most


@settings(deadline=None)
@given(names, st.floats(10, 600), st.integers(0, 2**32), configs)
def test_a_plan_begins_and_ends_calmly(nodes: list[str], seconds: float, seed: int, config: PlanConfig) -> None:
    for strike in make_plan(nodes, seconds, seed, config):
        assert config.calm_s <= strike.at_s + 0.001
        assert strike.at_s + strike.lasts_s <= seconds - config.calm_s + 0.002
        assert strike.node in nodes and (strike.peer in nodes) == (strike.what is What.CUT_LINK)
        assert strike.peer != strike.node
        assert KINDS[strike.what].least_s <= strike.lasts_s + 0.001


@settings(deadline=None)
@given(names, st.integers(0, 2**32), st.sets(st.sampled_from(list(What))))
def test_what_is_left_out_does_not_happen(nodes: list[str], seed: int, without: set[What]) -> None:
    assert without.isdisjoint(strike.what for strike in make_plan(nodes, 300, seed, None, without))


def test_ten_minutes_of_twelve_nodes_hold_more_than_thirty_kills() -> None:
    nodes = [f"n{number:02d}" for number in range(12)]
    for seed in (1, 2, 3):
        kinds = [strike.what for strike in make_plan(nodes, 600, seed)]
        assert kinds.count(What.KILL_NODE) + kinds.count(What.KILL_ENGINE) >= 30
        assert set(kinds) == set(What)
