"""One clear sentence from real logs of vLLM 0.32 (CPU build), and from what CUDA machines report."""

import signal
from pathlib import Path

import pytest

from node.engine.failure import NO_VLLM, CannotStart, Cause, Failure, clean, explain, failure_of
from node.errors import ModelStoreError, SettingsError

LOGS = Path(__file__).with_name("logs")
MODEL = "/models/mine"


def told(name: str, status: int | None = 1, oom_kills: int = 0) -> Failure:
    return explain((LOGS / f"{name}.log").read_text().splitlines(), status, model=MODEL, oom_kills=oom_kills)


@pytest.mark.parametrize(
    ("log", "cause", "permanent", "words"),
    [
        ("no_model_path", Cause.NO_MODEL, True, [MODEL, "does not exist", "--model"]),
        ("unknown_argument", Cause.ARGUMENT, True, ["unrecognized arguments: --frobnicate"]),
        ("bad_choice", Cause.ARGUMENT, True, ["--dtype", "float7", "float32"]),
        ("offline", Cause.OFFLINE, False, [MODEL, "network", "HF_HUB_OFFLINE"]),
        ("no_network", Cause.OFFLINE, False, [MODEL, "network"]),
        ("socket_taken", Cause.TAKEN, False, ["socket or port"]),
        ("architecture", Cause.ARCHITECTURE, True, ["FrobForCausalLM", MODEL]),
        ("too_long", Cause.TOO_LONG, True, ["100000", "8192"]),
        ("kv_too_small", Cause.KV_TOO_SMALL, True, ["--max-model-len 1920", "VLLM_CPU_KVCACHE_SPACE"]),
        ("kv_more_than_memory", Cause.OUT_OF_MEMORY, False, ["host", "VLLM_CPU_KVCACHE_SPACE"]),
        ("cpu_memory_share", Cause.OUT_OF_MEMORY, False, ["host", "VLLM_CPU_KVCACHE_SPACE"]),
        ("no_weights", Cause.NO_WEIGHTS, True, [MODEL, "weights"]),
        ("unknown_quantization", Cause.ARGUMENT, True, ["Unknown quantization method: fp8_nope"]),
        ("worker_killed", Cause.OUT_OF_MEMORY, False, ["killed from outside", "memory"]),
    ],
)
def test_a_real_log_becomes_one_sentence(log: str, cause: Cause, permanent: bool, words: list[str]) -> None:
    failure = told(log)
    assert (failure.cause, failure.permanent) == (cause, permanent)
    assert "\n" not in failure.text
    assert len(failure.text) < 500
    for word in words:
        assert word in failure.text


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("(EngineCore pid=9) ERROR 05-01 14:39:06 [core.py:1131] torch.OutOfMemoryError: CUDA out of memory. Tried to "
         "allocate 50.00 MiB. GPU 0 has a total capacity of 23.56 GiB of which 21.75 MiB is free", Cause.OUT_OF_MEMORY),
        ("ValueError: Free memory on device cuda:0 (14.46/15.77 GiB) on startup is less than desired GPU memory "
         "utilization (0.92, 14.51 GiB). Decrease GPU memory utilization or reduce GPU memory used by other "
         "processes.", Cause.OUT_OF_MEMORY),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you "
         "tried to allocate 966367641600 bytes. Error code 12 (Cannot allocate memory)", Cause.OUT_OF_MEMORY),
        ("RuntimeError: Failed to infer device type", Cause.NO_DEVICE),
        ("RuntimeError: No CUDA GPUs are available", Cause.NO_DEVICE),
        ("ImportError: libcuda.so.1: cannot open shared object file: No such file or directory", Cause.NO_DEVICE),
        ("/usr/bin/python: Error while finding module specification for 'vllm.entrypoints.openai.api_server' "
         "(ModuleNotFoundError: No module named 'vllm')", Cause.NO_VLLM),
        ("ModuleNotFoundError: No module named 'kvmigrate'", Cause.CONNECTOR),
        ("OSError: [Errno 98] Address already in use", Cause.TAKEN),
        ("OSError: [Errno 28] No space left on device", Cause.DISK_FULL),
        ("huggingface_hub.errors.GatedRepoError: 403 Client Error.", Cause.FORBIDDEN),
        ("ValueError: The checkpoint you are trying to load has model type `frob` but Transformers does not recognize "
         "this architecture.", Cause.ARCHITECTURE),
        ("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
         Cause.KV_TOO_SMALL),
    ],
)  # fmt: skip
def test_a_line_that_other_hosts_print_is_known(line: str, cause: Cause) -> None:
    assert explain([line], 1, model=MODEL).cause is cause


def test_a_warning_that_names_an_error_is_no_failure() -> None:
    line = (
        "(APIServer pid=1) WARNING 11-29 19:30:37 [system_utils.py:255] Found ulimit of 20000 and failed: this can "
        "cause `OSError: [Errno 24] Too many open files`, CUDA out of memory and No space left on device"
    )
    assert explain([line], 1).cause is Cause.UNKNOWN


def test_a_kill_that_nobody_sent_is_most_likely_the_lack_of_memory() -> None:
    assert explain(["INFO 11-29 19:30:37 [x.py:1] fine"], -signal.SIGKILL).cause is Cause.OUT_OF_MEMORY


def test_the_kernel_says_for_sure_that_memory_ran_out() -> None:
    failure = told("worker_killed", status=0, oom_kills=1)
    assert failure.text.startswith("the kernel ended the engine because the host ran out of memory")


def test_another_process_that_the_kernel_ended_is_not_blamed_on_the_engine() -> None:
    assert told("no_model_path", oom_kills=1).cause is Cause.NO_MODEL


def test_a_signal_is_named() -> None:
    failure = explain([], -signal.SIGSEGV)
    assert (failure.cause, failure.permanent) == (Cause.KILLED, False)
    assert "SIGSEGV" in failure.text


def test_an_unknown_error_is_quoted_and_may_be_tried_again() -> None:
    lines = ["Traceback (most recent call last):", "(Worker pid=3) ERROR 11-29 19:30:37 [w.py:3] KeyError: 'rope'"]
    lines += ["RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"]
    failure = explain(lines, 1)
    assert failure == Failure(Cause.UNKNOWN, "the engine ended with status 1: KeyError: 'rope'")


def test_a_core_that_vanished_was_killed_from_outside() -> None:
    line = "(APIServer pid=3) ERROR 11-29 20:50:43 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: "
    failure = explain([line + "EngineCore encountered an issue. See stack trace (above) for the root cause."], 0)
    assert (failure.cause, failure.permanent) == (Cause.OUT_OF_MEMORY, False)
    assert "ended without a word" in failure.text and "stack trace" not in failure.text


def test_silence_is_told_as_such() -> None:
    assert explain([], 0).text == "the engine ended with status 0 and gave no reason: see its log"


def test_braces_in_a_log_do_no_harm() -> None:
    assert "{0}" in explain(["x.py: error: unrecognized arguments: {0} {model}"], 2).text


def test_the_head_of_a_line_is_taken_off_but_not_of_a_warning() -> None:
    assert clean("(Worker_TP0 pid=1) ERROR 11-29 19:30:37 [a.py:1] ValueError: x") == "ValueError: x"
    assert clean("(EngineCore pid=1) WARNING 11-29 19:30:37 [a.py:1] x").startswith("WARNING")


def test_a_start_without_a_process_has_its_sentence() -> None:
    assert failure_of(CannotStart(NO_VLLM)) is NO_VLLM
    assert failure_of(ModelStoreError("offline")).permanent is False
    assert failure_of(SettingsError("bad flag")).permanent is True
    assert "no processes left" in failure_of(OSError(11, "no processes left")).text
