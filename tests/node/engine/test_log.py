"""The engine's output: lines, file, tail, progress."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.engine.log import MAX_LINE_BYTES, TAIL_LINES, EngineLog, LineSplitter
from node.engine.progress import describe


@given(st.lists(st.binary(max_size=30), max_size=20))
def test_lines_do_not_depend_on_how_the_bytes_come(chunks: list[bytes]) -> None:
    whole, parts = LineSplitter(), LineSplitter()
    data = b"".join(chunks)
    expected = whole.feed(data) + whole.close()
    assert [line for chunk in chunks for line in parts.feed(chunk)] + parts.close() == expected
    assert not any("\n" in line or "\r" in line or not line for line in expected if line.isascii())


def test_a_line_without_end_is_kept_short() -> None:
    splitter = LineSplitter()
    for _ in range(100):
        assert splitter.feed(b"x" * 1000) == []
    (line,) = splitter.feed(b"\n")
    assert len(line) == MAX_LINE_BYTES


def test_the_file_and_the_memory_are_bounded(tmp_path: Path) -> None:
    log = EngineLog(tmp_path / "deep" / "engine.log", max_bytes=10_000)
    log.open()
    for number in range(2000):
        log.add(f"line {number}")
    log.close()
    sizes = [path.stat().st_size for path in log.path.parent.iterdir()]
    assert len(sizes) == 2
    assert max(sizes) <= 10_000
    assert log.tail()[-1] == "line 1999"
    assert len(log.tail()) == TAIL_LINES
    assert log.path.read_text().endswith("line 1999\n")


def test_a_new_process_has_a_tail_of_its_own_and_the_file_goes_on(tmp_path: Path) -> None:
    log = EngineLog(tmp_path / "engine.log")
    log.open()
    log.add("old")
    log.begin("vllm again")
    log.add("new")
    log.close()
    assert log.tail() == ["new"]
    assert log.path.read_text() == "old\n--- vllm again\nnew\n"


def test_a_place_that_cannot_be_written_costs_only_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    log = EngineLog(tmp_path / "file" / "engine.log")
    log.open()
    log.add("kept")
    log.close()
    assert log.tail() == ["kept"]


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("(APIServer pid=1) INFO 11-29 19:30:37 [model.py:733] Resolved architecture: LlamaForCausalLM",
         "reading the model (LlamaForCausalLM)"),
        ("(EngineCore pid=2) INFO 11-29 19:30:48 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: x",
         "starting the engine core"),
        ("Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:00<00:00,  2.16it/s]",
         "loading weights, 25 % (1 of 4)"),
        ("(Worker pid=3) INFO 11-29 19:30:59 [default_loader.py:501] Loading weights took 0.4 s", "weights loaded"),
        ("(EngineCore pid=2) INFO 11-29 19:31:00 [kv_cache_utils.py:2327] CPU KV cache size: 93,184 tokens, Maximum",
         "KV cache for 93,184 tokens, warming up"),
        ("(APIServer pid=1) INFO 11-29 19:31:05 [entry.py:140] Starting vLLM server on unix:/r/n.engine",
         "starting the HTTP server"),
        ("WARNING 11-29 19:30:37 [vllm.py:1703] Enforce eager set, disabling torch.compile, CUDAGraphs", None),
        ("(Worker pid=9) INFO 11-29 20:06:47 [cpu_model_runner.py:87] Warming up model for the compilation...",
         "compiling, that may take minutes"),
        ("INFO:     Application startup complete.", None),
    ],
)  # fmt: skip
def test_progress_is_read_from_real_lines(line: str, step: str | None) -> None:
    assert describe(line) == step
