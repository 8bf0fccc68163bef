"""The scheduler half against a hand-driven vLLM scheduler: what it offers, saves and reports."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmigrate.connector.holds import MAX_HOLD_S, MAX_REMEMBERED, Holds
from kvmigrate.connector.metadata import BlockSave
from kvmigrate.connector.mirror import PoolMirror
from kvmigrate.connector.scheduler import SAVE_PATIENCE_STEPS, SchedulerHalf

BLOCK = 16


def block_hash(number: int) -> bytes:
    return number.to_bytes(32, "big")


@dataclass
class FakeRequest:
    request_id: str
    num_prompt_tokens: int
    rid: str | None = None
    hold_s: float = 0.0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    output_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    lora_request: object | None = None
    mm_features: Sequence[object] = ()
    prompt_embeds: object | None = None
    first_hash: int = 1

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.output_tokens

    @property
    def block_hashes(self) -> list[bytes]:
        return [block_hash(self.first_hash + i) for i in range(self.num_tokens // BLOCK)]

    @property
    def kv_transfer_params(self) -> dict[str, object] | None:
        return {"grapevine": {"rid": self.rid, "hold_s": self.hold_s}} if self.rid else None


@dataclass
class RecordedReports:
    seen: list[tuple[object, ...]] = field(default_factory=list)

    def started(self, rid: str, prompt_tokens: int, local_tokens: int, external_tokens: int) -> None:
        self.seen.append(("started", rid, prompt_tokens, local_tokens, external_tokens))

    def prefilled(self, rid: str, seconds: float) -> None:
        self.seen.append(("prefilled", rid, seconds))

    def filled(self, rid: str, hashes: Sequence[bytes], tokens: int) -> None:
        self.seen.append(("filled", rid, len(hashes), tokens))

    def finished(self, rid: str) -> None:
        self.seen.append(("finished", rid))


class Bench:
    """One scheduler half, its mirror, its reports and a clock that stands still unless moved."""

    def __init__(self) -> None:
        self.now = 0.0
        self.mirror = PoolMirror(ranks=1)
        self.reports = RecordedReports()
        self.half = SchedulerHalf(block_size=BLOCK, mirror=self.mirror, reports=self.reports, clock=lambda: self.now)

    def pool_holds(self, numbers: Sequence[int]) -> None:
        items = [(block_hash(n), 0, n, 2) for n in numbers]
        self.mirror.add(items)
        self.half.confirm_saved([item[0] for item in items])

    def step(self, request: FakeRequest, tokens: int) -> list[BlockSave]:
        _, saves = self.half.plan_step({request.request_id: tokens}, paged_blocks)
        request.num_computed_tokens += tokens
        self.half.step_done()
        return saves


def paged_blocks(request_id: str) -> list[int]:
    return list(range(100, 200))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_new_prompt_saves_each_full_block_once_as_its_chunks_are_computed(bench: Bench) -> None:
    request = FakeRequest("r", 50)
    bench.half.on_new_request(request)
    assert bench.half.matched(request, 0) == (0, False)
    assert bench.step(request, 20) == [BlockSave(100, block_hash(1))]
    assert bench.step(request, 30) == [BlockSave(101, block_hash(2)), BlockSave(102, block_hash(3))]
    assert bench.step(request, 1) == []


def test_the_last_token_is_always_left_for_the_engine(bench: Bench) -> None:
    request = FakeRequest("r", 3 * BLOCK)
    bench.pool_holds([1, 2, 3])
    bench.half.on_new_request(request)
    assert bench.half.matched(request, 0) == (2 * BLOCK, True)


def test_a_gap_in_the_pool_ends_the_match(bench: Bench) -> None:
    request = FakeRequest("r", 100)
    bench.pool_holds([1, 3, 4])
    bench.half.on_new_request(request)
    assert bench.half.matched(request, 0) == (BLOCK, True)
    assert bench.half.matched(request, BLOCK) == (0, False)
    assert bench.half.matched(request, 2 * BLOCK) == (2 * BLOCK, True)


def test_a_load_fills_the_blocks_behind_the_local_hit_from_the_right_slots(bench: Bench) -> None:
    request = FakeRequest("r", 100, rid="abc")
    bench.pool_holds(range(1, 7))
    bench.half.on_new_request(request)
    assert bench.half.matched(request, 2 * BLOCK) == (4 * BLOCK, True)
    bench.half.allocated(request, [7, 8, 9, 10, 11, 12], 4 * BLOCK)
    (job,), saves = bench.half.plan_step({}, paged_blocks)
    assert saves == []
    assert [(load.block_id, load.block_hash, load.slots[0].slot) for load in job.blocks] == [
        (9, block_hash(3), 3), (10, block_hash(4), 4), (11, block_hash(5), 5), (12, block_hash(6), 6),
    ]  # fmt: skip
    request.num_computed_tokens = 6 * BLOCK
    bench.step(request, 4)
    assert ("started", "abc", 100, 2 * BLOCK, 4 * BLOCK) in bench.reports.seen


def test_a_block_that_is_dropped_between_match_and_allocation_becomes_a_load_that_fails(bench: Bench) -> None:
    request = FakeRequest("r", 40)
    bench.pool_holds([1, 2])
    bench.half.on_new_request(request)
    bench.half.matched(request, 0)
    bench.mirror.drop([block_hash(2)])
    bench.half.allocated(request, [7, 8, 9], 2 * BLOCK)
    (job,), _ = bench.half.plan_step({}, paged_blocks)
    assert [len(load.slots) for load in job.blocks] == [1, 0]


def test_a_failed_load_is_not_offered_again_until_a_preemption(bench: Bench) -> None:
    request = FakeRequest("r", 40, rid="abc")
    bench.pool_holds([1, 2])
    bench.half.on_new_request(request)
    bench.half.matched(request, 0)
    bench.half.allocated(request, [1, 2], 2 * BLOCK)
    assert bench.half.matched(request, 0) == (0, False)
    bench.step(request, 40)
    assert ("started", "abc", 40, 0, 0) in bench.reports.seen
    request.num_preemptions, request.num_computed_tokens = 1, 0
    assert bench.half.matched(request, 0) == (2 * BLOCK, True)


def test_a_failed_allocation_may_ask_again(bench: Bench) -> None:
    request = FakeRequest("r", 40)
    bench.pool_holds([1, 2])
    bench.half.on_new_request(request)
    assert bench.half.matched(request, 0) == bench.half.matched(request, 0) == (2 * BLOCK, True)


@pytest.mark.parametrize("extra", ["lora_request", "mm_features", "prompt_embeds"])
def test_requests_whose_kv_the_hash_does_not_identify_neither_load_nor_save(bench: Bench, extra: str) -> None:
    request = FakeRequest("r", 40)
    setattr(request, extra, [object()])
    bench.pool_holds([1])
    bench.half.on_new_request(request)
    assert bench.half.matched(request, 0) == (0, False)
    assert bench.step(request, 40) == []


@pytest.mark.parametrize("extra", ["lora_request", "mm_features", "prompt_embeds"])
def test_they_are_reported_with_what_vllm_itself_has_cached_and_without_their_blocks(bench: Bench, extra: str) -> None:
    request = FakeRequest("r", 40, rid="abc", num_computed_tokens=BLOCK)
    setattr(request, extra, [object()])
    bench.half.on_new_request(request)
    assert bench.half.matched(request, BLOCK) == (0, False)
    bench.step(request, 40 - BLOCK)
    bench.half.finished(request)
    assert bench.reports.seen == [
        ("started", "abc", 40, BLOCK, 0),
        ("prefilled", "abc", 0.0),
        ("filled", "abc", 0, 2 * BLOCK),
        ("finished", "abc"),
    ]


def test_a_request_that_must_not_read_the_cache_still_fills_it(bench: Bench) -> None:
    request = FakeRequest("r", 40, skip_reading_prefix_cache=True)
    bench.half.on_new_request(request)
    bench.pool_holds([1])
    assert bench.half.matched(request, 0) == (0, False)
    assert bench.step(request, 40) == [BlockSave(101, block_hash(2))]


def test_two_requests_with_one_prefix_save_it_once(bench: Bench) -> None:
    first, second = FakeRequest("a", 40), FakeRequest("b", 40)
    for request in (first, second):
        bench.half.on_new_request(request)
    assert len(bench.step(first, 40)) == 2
    assert bench.step(second, 40) == []


def test_a_save_that_the_pool_never_confirms_is_tried_again_in_time(bench: Bench) -> None:
    first, second = FakeRequest("a", 40), FakeRequest("b", 40)
    for request in (first, second):
        bench.half.on_new_request(request)
    bench.step(first, 40)
    for _ in range(SAVE_PATIENCE_STEPS):
        bench.half.plan_step({}, paged_blocks)
    assert len(bench.step(second, 40)) == 2


def test_a_lost_pool_is_filled_again_by_requests_still_running(bench: Bench) -> None:
    request = FakeRequest("a", 40)
    bench.half.on_new_request(request)
    bench.step(request, 40)
    bench.pool_holds([1, 2])
    bench.half.forget_pool()
    assert bench.half.matched(request, 0) == (0, False)
    assert bench.step(request, 1) == [BlockSave(100, block_hash(1)), BlockSave(101, block_hash(2))]


def test_the_story_of_a_request_is_reported_in_order(bench: Bench) -> None:
    request = FakeRequest("r", 40, rid="abc")
    bench.half.on_new_request(request)
    assert (bench.half.waiting, bench.half.running) == (1, 0)
    bench.half.plan_step({"r": 40}, paged_blocks)
    assert (bench.half.waiting, bench.half.running) == (0, 1)
    request.num_computed_tokens, bench.now = 40, 1.5
    bench.half.step_done()
    request.output_tokens, request.num_computed_tokens = 10, 49
    bench.half.finished(request)
    assert bench.reports.seen == [
        ("started", "abc", 40, 0, 0),
        ("prefilled", "abc", 1.5),
        ("filled", "abc", 2, 2 * BLOCK),
        ("filled", "abc", 3, 3 * BLOCK),
        ("finished", "abc"),
    ]
    assert (bench.half.waiting, bench.half.running) == (0, 0)


def test_an_answer_of_one_token_reports_its_prefill_too(bench: Bench) -> None:
    """vLLM tells of its end before it tells that the step is over."""
    request = FakeRequest("r", 40, rid="abc")
    bench.half.on_new_request(request)
    bench.half.plan_step({"r": 40}, paged_blocks)
    request.output_tokens, request.num_computed_tokens, bench.now = 1, 40, 1.5
    bench.half.finished(request)
    bench.half.step_done()
    told = [("started", "abc", 40, 0, 0), ("prefilled", "abc", 1.5), ("filled", "abc", 2, 2 * BLOCK)]
    assert bench.reports.seen == [*told, ("finished", "abc")]


def test_an_aborted_request_reports_its_end_and_no_blocks(bench: Bench) -> None:
    request = FakeRequest("r", 40, rid="abc")
    bench.half.on_new_request(request)
    bench.half.finished(request)
    bench.half.finished(request)
    assert bench.reports.seen == [("finished", "abc")]


def test_of_several_samples_under_one_rid_only_the_first_reports(bench: Bench) -> None:
    first, second = FakeRequest("0_r", 40, rid="abc"), FakeRequest("1_r", 40, rid="abc")
    for request in (first, second):
        bench.half.on_new_request(request)
        bench.step(request, 40)
    bench.half.finished(second)
    assert [entry[0] for entry in bench.reports.seen] == ["started", "prefilled", "filled"]
    bench.half.finished(first)
    assert bench.reports.seen[-1] == ("finished", "abc")


@given(
    held=st.sets(st.integers(1, 12)),
    prompt=st.integers(1, 12 * BLOCK + 5),
    local_blocks=st.integers(0, 12),
    chunks=st.lists(st.integers(1, 3 * BLOCK), min_size=1, max_size=40),
)
def test_every_full_block_is_offered_or_saved_and_none_twice(
    held: set[int], prompt: int, local_blocks: int, chunks: list[int]
) -> None:
    """Whatever the pool holds and however the prefill is cut, each full block ends up in the pool exactly once."""
    bench = Bench()
    bench.pool_holds(sorted(held))
    request = FakeRequest("r", prompt)
    bench.half.on_new_request(request)
    local = min(local_blocks, (prompt - 1) // BLOCK) * BLOCK
    tokens, asynchronous = bench.half.matched(request, local)
    assert local + tokens < prompt
    assert asynchronous == (tokens > 0)
    if tokens:
        bench.half.allocated(request, paged_blocks("r"), tokens)
    request.num_computed_tokens = local + tokens
    saved: list[bytes] = []
    for chunk in chunks:
        count = min(chunk, prompt - request.num_computed_tokens)
        saved += [save.block_hash for save in bench.step(request, count)] if count > 0 else []
    full = request.num_computed_tokens // BLOCK
    expected = {block_hash(n) for n in range(1, full + 1)} - {block_hash(n) for n in held}
    computed_anything = request.num_computed_tokens > local + tokens
    assert len(saved) == len(set(saved))
    assert set(saved) == (expected if computed_anything else set())


def test_the_type_of_the_block_lookup_is_what_vllm_offers() -> None:
    lookup: Callable[[str], Sequence[int] | None] = lambda request_id: None  # noqa: E731
    bench = Bench()
    request = FakeRequest("r", 40)
    bench.half.on_new_request(request)
    assert bench.half.plan_step({"r": 40}, lookup) == ([], [])


def test_a_request_whose_blocks_are_being_pulled_is_passed_over_until_they_are_here() -> None:
    bench = Bench()
    held, other = FakeRequest("a", 40, rid="r", hold_s=5.0), FakeRequest("b", 40, rid="s", first_hash=100)
    bench.half.on_new_request(held)
    bench.half.on_new_request(other)
    assert bench.half.matched(held, 0) == (None, False)
    assert bench.half.matched(other, 0) == (0, False)
    bench.pool_holds([1, 2])
    assert bench.half.matched(held, 0) == (None, False)
    bench.half.pull_over("r")
    assert bench.half.matched(held, 0) == (2 * BLOCK, True)


@pytest.mark.parametrize("ends", ["its time", "the pool", "before it came", "it is gone"])
def test_nobody_is_held_for_ever(ends: str) -> None:
    bench = Bench()
    held, again = (FakeRequest(name, 40, rid="r", hold_s=5.0) for name in ("a", "b"))
    if ends == "before it came":
        bench.half.pull_over("r")
    bench.half.on_new_request(held)
    bench.half.on_new_request(again)
    if ends == "its time":
        bench.now = 5.0
    elif ends == "the pool":
        bench.half.forget_pool()
    elif ends == "it is gone":
        bench.half.finished(held)
        bench.half.pull_over("r")
    assert [bench.half.matched(request, 0) for request in (held, again)] == [(0, False)] * 2
    assert len(bench.half._holds) == 0


def test_requests_that_do_not_migrate_are_not_held() -> None:
    bench = Bench()
    request = FakeRequest("a", 40, rid="r", hold_s=5.0, lora_request=object())
    bench.half.on_new_request(request)
    assert bench.half.matched(request, 0) == (0, False)


def test_what_the_node_may_say_about_holding_is_bounded() -> None:
    now = [0.0]
    holds = Holds(lambda: now[0])
    holds.begin("a", "r", 1e9)
    now[0] = MAX_HOLD_S
    assert not holds.waits("a")
    for number in range(2 * MAX_REMEMBERED):
        holds.over(str(number))
    assert len(holds._over) == MAX_REMEMBERED
