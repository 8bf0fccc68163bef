"""The trace bench: what is cut out of a trace, the bodies made of it, the load, and its figures by hand."""

from __future__ import annotations

import argparse
import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from benches import document, trace, trace_records, traces
from benches.result import Result
from benches.trace_replay import Seen
from benches.trace_report import LEAST_LOADED, OURS, Outcome, outcome, report, targets
from benches.trace_scale import OTHER, Scale, answer_tokens, cut, prompt_text, shots
from benches.trace_work import Work, engine, measure, work_s
from benches.traces import BLOCK_TOKENS, Arrival

from node.emulator.tokens import Tokenizer

SCALE = Scale(start=10, seconds=20, share=1.0, coarse=8, kv_tokens=1 << 17, longest=50_000, real_s=5)


def arrival(at: float, blocks: tuple[int, ...], *, rest: int = 100, output: int = 80) -> Arrival:
    return Arrival(at, len(blocks) * BLOCK_TOKENS + rest, output, blocks)


def test_a_part_of_a_trace_keeps_whole_conversations_and_begins_at_0() -> None:
    turns = [
        arrival(10 + turn, (0, talk, *range(1000 * talk, 1000 * talk + turn))) for talk in (1, 2) for turn in (1, 5)
    ]
    others = [arrival(9.0, (0, 3)), arrival(30.0, (0, 4)), arrival(12.0, tuple(range(200)))]
    taken = cut([*others, *turns], SCALE)
    assert [one.at for one in taken] == [1, 5, 1, 5]
    for seed in range(20):
        half = traces.part(turns, start=0, seconds=99, share=0.5, longest=10**6, seed=seed)
        talks = [traces.talk_of(one) for one in half]
        assert all(talks.count(talk) == 2 for talk in talks)


def test_sessions_that_begin_too_late_are_not_read(tmp_path: Path) -> None:
    file = tmp_path / "sessions.jsonl.gz"
    session = {
        "requests": [{"t": 0.0, "in": 600, "out": 5, "runs": [[1, 9]]}, {"t": 9.0, "in": 600, "out": 5, "runs": []}]
    }
    with gzip.open(file, "wt") as lines:
        lines.writelines(json.dumps(session) + "\n" for _ in range(40))
    whole, some = traces.load(file), traces.load(file, until=300)
    assert 2 * 3 < len(some) < len(whole) == 80
    assert [one for one in some if one.at < 300] == [one for one in whole if one.at < 300]


def test_in_the_unshared_trace_no_prompt_has_a_block_of_another_and_all_else_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1100 + 512 * more, "output_length": 5, "hash_ids": list(range(3 + more))}
        for more in range(4)
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setitem(traces.FILES, traces.UNSHARED, file)
    shared, found = traces.load(file), traces.named(traces.UNSHARED)
    assert found is not None
    blocks = [block for one in found for block in one.blocks]
    assert len(set(blocks)) == len(blocks) and 0 not in blocks
    assert [replace(one, blocks=()) for one in found] == [replace(one, blocks=()) for one in shared]
    assert [len(one.blocks) for one in found] == [len(one.blocks) for one in shared]


def test_what_became_of_each_request_is_written_beside_what_its_entry_says_of_it(tmp_path: Path) -> None:
    file = tmp_path / "records"
    arrivals = [arrival(0.0, (0, 1)), arrival(3.0, (0,))]
    answered = Seen(10.0, sent=10.1, first=10.5, ended=11.0, status=200, whole=True, rid="a")
    requests = list(zip(arrivals, [answered, Seen(13.0, sent=13.0)], strict=True))
    for suffix in ("conversation_80", "conversation_95"):
        trace_records.write(file, suffix, OURS, requests, {"a": {"target": "n3"}})
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["run"], line["number"], line["due_s"]) for line in lines] == [
        ("conversation_80", 0, 0.0), ("conversation_80", 1, 3.0),
        ("conversation_95", 0, 0.0), ("conversation_95", 1, 3.0),
    ]  # fmt: skip
    first, second = lines[:2]
    assert (first["sent_s"], first["first_s"], first["ended_s"], first["failed"]) == (0.1, 0.5, 1.0, False)
    assert (first["tokens"], first["blocks"], first["decision"]) == (1124, 2, {"target": "n3"})
    assert (second["first_s"], second["ended_s"], second["decision"]) == (None, None, None)


def test_equal_blocks_are_equal_text_and_nothing_else_is() -> None:
    one, two = arrival(0, (0, 7, 8)), arrival(0, (0, 7, 9))
    texts = [prompt_text(number, each, SCALE.coarse) for number, each in enumerate((one, two, one))]
    length = 5 * BLOCK_TOKENS // SCALE.coarse
    common = [len(_common(texts[0], text)) for text in texts[1:]]
    assert 2 * length <= common[0] < 2 * length + 20
    assert 3 * length <= common[1] < 3 * length + 20


@pytest.mark.parametrize("coarse", [8, 16])
def test_a_prompt_has_as_many_tokens_less_as_the_engine_takes_longer_for_each(coarse: int) -> None:
    text = prompt_text(3, arrival(0, (0, 5), rest=160), coarse)
    assert len(Tokenizer().encode(text)) == (2 * BLOCK_TOKENS + 160) // coarse


def test_shots_come_when_the_scaled_trace_says_with_the_scaled_answer() -> None:
    taken = shots([arrival(0, (1,)), arrival(20, (1, 2), output=83)], SCALE)
    assert [shot.at for shot in taken] == [0, 5]
    body = json.loads(taken[1].body)
    assert body["max_tokens"] == answer_tokens(arrival(0, (), output=83), 8) == 10
    assert body["stream"] is True and body["ignore_eos"] is True


def test_a_shorter_replay_takes_less_of_the_trace_at_the_same_pace() -> None:
    short = OTHER.shortened(6)
    assert short.seconds / short.real_s == OTHER.seconds / OTHER.real_s
    assert short.real_s == 6


def test_the_work_of_a_request_by_hand() -> None:
    config = engine(SCALE)
    timing = config.timing
    found = work_s(Arrival(0, 2000, 100, ()), 500, config, batch=10)
    prompt = 1500 * timing.prefill_s + 1500 * (500 + 750) * timing.attention_s
    answer = 100 * (timing.decode_s + 2000 * timing.context_s + timing.step_s / 10)
    assert found == pytest.approx(prompt + answer)


def test_twice_the_load_is_half_the_speed_and_the_oracles_hits_count() -> None:
    again = [arrival(at, tuple(range(1, 20)), output=8) for at in range(10)]
    work = measure(again, replace(SCALE, seconds=10), nodes=2)
    cold = sum(work_s(one, 0, engine(SCALE), batch=1 << 17) for one in again)
    assert work.hit_ratio > 0.7
    assert work.seconds < cold / 2
    speeds = [Work(60, 0).speedup(load, nodes=2, real_s=30) for load in (0.5, 1.0)]
    assert speeds == [2.0, 1.0]


def test_an_outcome_counts_from_when_requests_were_due_and_until_the_end_where_no_answer_came() -> None:
    seen = [Seen(1.0, sent=1.1, first=1.0 + wait, ended=9.0, status=200, whole=True) for wait in (1.0, 2.0)]
    seen.append(Seen(1.0, sent=1.1, first=9.5, status=200))  # its answer had begun
    seen.append(Seen(1.0, sent=1.1, first=2.0, ended=3.0, status=200))  # broken off
    seen.append(Seen(1.0, sent=1.1))  # nothing came
    found = outcome(seen, 10.0, hit_ratio=0.5, router_cores=0.1, engine_cores=0.2)
    assert (found.failed, found.late) == (0.2, 0.2)
    assert (found.ttft_mean, found.ttft_p50, found.ttft_p99) == (5.125, 8.5, 9.0)
    assert found.late_p99 == pytest.approx(0.1)
    nothing = outcome([Seen(1.0, ended=2.0)], 3.0, hit_ratio=0.0, router_cores=0.0, engine_cores=0.0)
    assert nothing.failed == 1.0 and math.isinf(nothing.ttft_mean)


def _did(mean: float, p99: float, failed: float = 0.0) -> Outcome:
    return Outcome(failed, 0.0, mean, mean, p99, 0.25, 0.0, 0.1, 0.1)


def test_figures_compare_with_the_best_peer_that_does_not_fail() -> None:
    result = Result("trace", trace.TARGETS)
    outcomes = {
        OURS: _did(1.0, 4.0),
        LEAST_LOADED: _did(2.0, 9.0),
        "sglang": _did(2.0, 5.0),
        "smg": _did(4.0, 4.0),
        "broken": _did(0.1, 0.1, failed=0.5),
    }
    report(result, "conversation_80", outcomes)
    assert result.figures["ttft_mean_over_best_peer_conversation_80"] == 0.5
    assert result.figures["ttft_p99_over_best_peer_conversation_80"] == 1.0
    assert result.figures["ttft_mean_over_least_loaded_conversation_80"] == 0.5
    assert result.figures["hit_ratio_conversation_80"] == 0.25
    assert result.short() == ["ttft_p99_over_best_peer_conversation_80"]
    assert any("broken failed 50.0%" in note for note in result.notes)


def test_without_peers_nothing_is_compared_with_them() -> None:
    result = Result("trace", trace.TARGETS)
    report(result, "conversation_80", {OURS: _did(1.0, 4.0)})
    assert not any("over" in name for name in result.figures)


def test_where_nothing_is_shared_we_are_held_to_least_loaded_and_no_peer_takes_part() -> None:
    options = argparse.Namespace(contestants=None, quick=False)
    assert trace._contestants(Result("trace", {}), traces.UNSHARED, options) == [*trace.OWN]
    assert "ttft_mean_over_least_loaded_unshared_80" in trace.TARGETS
    assert not any("peer" in name and "unshared" in name for name in trace.TARGETS)


def test_each_trace_and_load_has_its_targets() -> None:
    assert len(targets(["a", "b"])) == 2 * 3 * 3
    assert targets(["a"])["ttft_p99_over_best_peer_a_95"] == ("<=", 0.8)


def test_the_document_has_a_column_for_each_trace_and_load() -> None:
    assert document.split("ttft_mean_over_best_peer_claude_code_95") == ("ttft_mean_over_best_peer", "claude_code_95")
    result = Result("trace", trace.TARGETS)
    for name in ("hit_ratio_conversation_80", "hit_ratio_claude_code_95", "hit_ratio_conversation_50"):
        result.add(name, 0.5)
    head = next(line for line in document.render(result, ["x"]).splitlines() if line.startswith("| figure"))
    assert head == "| figure | claude_code_95 | conversation_50 | conversation_80 | target |"


def _common(one: str, two: str) -> str:
    return one[: next((index for index, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), len(one))]
