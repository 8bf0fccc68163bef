"""Why did the engine end? One sentence for people, made from its last lines and its exit status.

Rules are tried in order, the most telling first; within a rule the last matching line counts, because an engine
prints its own cause before the tracebacks that follow from it. A permanent failure stays the same however often
the engine is started; the others are worth another try.
"""

from __future__ import annotations

import enum
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from node.errors import LocalError, ModelStoreError

#: Longest quote of the log in a sentence, characters.
MAX_QUOTE = 240
#: What the engine's program exits with when it is not there (see `node.engine.guard`).
NOT_FOUND = 127


class Cause(enum.Enum):
    """The kinds of failure that have a sentence of their own."""

    OUT_OF_MEMORY = "out_of_memory"
    KV_TOO_SMALL = "kv_too_small"
    TOO_LONG = "too_long"
    NO_MODEL = "no_model"
    OFFLINE = "offline"
    NO_WEIGHTS = "no_weights"
    FORBIDDEN = "forbidden"
    TAKEN = "taken"
    ARCHITECTURE = "architecture"
    ARGUMENT = "argument"
    NO_VLLM = "no_vllm"
    NO_DEVICE = "no_device"
    CONNECTOR = "connector"
    DISK_FULL = "disk_full"
    KILLED = "killed"
    TIMEOUT = "timeout"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong. `permanent`: another start would end the same way."""

    cause: Cause
    text: str
    permanent: bool = False


class CannotStart(LocalError):
    """The engine cannot even be tried; carries the `Failure`."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class _Rule:
    cause: Cause
    pattern: re.Pattern[str]
    text: str  # filled with the named groups of the pattern
    permanent: bool = True


def _rule(cause: Cause, pattern: str, text: str, *, permanent: bool = True) -> _Rule:
    return _Rule(cause, re.compile(pattern), text, permanent)


NO_VLLM = Failure(
    Cause.NO_VLLM,
    "vLLM is not installed in this environment: pip install 'vllm>=0.32,<0.33' (GPU host; on a CPU host use the "
    "environment that scripts/quickstart makes), or attach to a running server with --engine-url",
    permanent=True,
)

_RULES = (
    _rule(Cause.NO_VLLM, r"No module named '?vllm'?(?![\w.])", NO_VLLM.text),
    _rule(
        Cause.CONNECTOR,
        r"No module named '(?P<what>kvmigrate[^']*)'",
        "vLLM cannot load our KV connector ({what} is missing in its environment): install vllm-grapevine there or "
        "use --no-kv",
    ),
    _rule(
        Cause.ARGUMENT,
        r"error: (?P<what>unrecognized arguments: .+|argument .+|ambiguous option: .+)$",
        "vLLM does not accept its arguments: {what}",
    ),
    _rule(
        Cause.KV_TOO_SMALL,
        r"KV cache is needed, which is larger than .* estimated maximum model length is (?P<most>\d+)",
        "the KV cache is too small for the longest request: use --max-model-len {most} or less, or give the cache "
        "more memory (CPU: VLLM_CPU_KVCACHE_SPACE in GiB, GPU: --gpu-memory-utilization)",
    ),
    _rule(
        Cause.KV_TOO_SMALL,
        r"KV cache.*(?:is larger than|needed).*available KV cache memory|No available memory for the cache blocks|"
        r"max seq len \((?P<length>\d+)\).*larger than the maximum number of tokens",
        "the KV cache is too small for the longest request: lower --max-model-len, or give the cache more memory "
        "(CPU: VLLM_CPU_KVCACHE_SPACE in GiB, GPU: --gpu-memory-utilization)",
    ),
    _rule(
        Cause.TOO_LONG,
        r"max_model_len \((?P<asked>\d+)\) is greater than the derived max_model_len \(\w+=(?P<most>\d+)",
        "--max-model-len {asked} is more than the {most} tokens that the model was made for: lower it",
    ),
    _rule(
        Cause.OUT_OF_MEMORY,
        r"(?:CUDA|HIP|XPU) out of memory|torch\.OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED|"
        r"less than desired (?:GPU|CUDA|HIP|XPU) memory utilization",
        "the GPU has too little free memory: lower --gpu-memory-utilization or --max-model-len, use a smaller or "
        "quantized model, more --tensor-parallel-size, or end other processes on it",
        permanent=False,
    ),
    _rule(
        Cause.OUT_OF_MEMORY,
        r"DefaultCPUAllocator: can't allocate memory|Cannot allocate memory|std::bad_alloc|MemoryError|"
        r"[Nn]ot enough (?:host |CPU |available )?memory|"
        r"less than desired CPU memory utilization|"
        r"on kv cache allocation is less than requested memory|"
        r"is (?:larger|greater|more) than (?:the )?(?:available|free|total) (?:CPU |host |node |system )?memory",
        "the host has too little free memory: lower VLLM_CPU_KVCACHE_SPACE or --max-model-len, use a smaller model, "
        "or end other processes",
        permanent=False,
    ),
    _rule(
        Cause.NO_DEVICE,
        r"No CUDA GPUs are available|Found no NVIDIA driver|CUDA driver version is insufficient|"
        r"Failed to infer device type|Torch not compiled with CUDA enabled|CUDA is not available|"
        r"libcuda\.so\S* cannot open|libcudart\S*: cannot open",
        "vLLM finds no usable GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES, or install the CPU build "
        "(README, Three hosts)",
    ),
    _rule(
        Cause.FORBIDDEN,
        r"GatedRepoError|401 Client Error|403 Client Error|You are trying to access a gated repo|"
        r"Access to model .* is restricted",
        "the model {model} needs permission: accept its terms on its page and set HF_TOKEN",
    ),
    _rule(
        Cause.NO_MODEL,
        r"Repo id must be in the form|is not a local folder and is not a valid model identifier|"
        r"RepositoryNotFoundError|404 Client Error|Can't load the configuration of|"
        r"Invalid repository ID or local directory specified",
        "the model {model} does not exist: --model takes a directory with a config.json, or the name of a "
        "repository (owner/name)",
    ),
    _rule(
        Cause.OFFLINE,
        r"We couldn't connect to|outgoing traffic has been disabled|Cannot find an appropriate cached snapshot|"
        r"LocalEntryNotFoundError|OfflineModeIsEnabled|Temporary failure in name resolution|Max retries exceeded",
        "the model {model} is not on this host and cannot be downloaded: check the name and the network (and "
        "HF_HUB_OFFLINE), or give a directory",
        permanent=False,
    ),
    _rule(
        Cause.NO_WEIGHTS,
        r"Cannot find any model weights|no file named .*(?:safetensors|pytorch_model)|Error while deserializing header|"
        r"SafetensorError",
        "the weights of {model} are missing or damaged: fetch the model again",
    ),
    _rule(
        Cause.ARCHITECTURE,
        r"Model architectures (?P<what>\[.*?\]) (?:are not supported|failed to be inspected)",
        "vLLM does not support the architecture {what} of {model}: use another model or a newer vLLM",
    ),
    _rule(
        Cause.ARCHITECTURE,
        r"model type `(?P<what>[^`]+)` but Transformers does not recognize",
        "the installed transformers does not know models of type {what} ({model}): use another model or a newer one",
    ),
    _rule(
        Cause.TAKEN,
        r"^(?:\([^)]*\) )?OSError: \[Errno 98\]|Address already in use",
        "another process uses the engine's socket or port: end it (see `ss -lxp`, `ss -ltnp`) or change --name",
        permanent=False,
    ),
    _rule(
        Cause.DISK_FULL,
        r"No space left on device",
        "a disk or the shared memory is full: free some (see `df -h`, /dev/shm included)",
        permanent=False,
    ),
    _rule(
        Cause.ARGUMENT,
        r"Value error, (?P<what>.+?)(?: \[type=|$)",
        "vLLM refuses its settings: {what}",
    ),
)

#: The log itself speaks of a child that vanished: the kernel's killer leaves no other trace.
_VANISHED = re.compile(r"(?:[Ww]orker|[Ee]ngine ?[Cc]ore).{0,80}died unexpectedly \(exit code: -9\)")
#: What the API server says when the engine core has gone, whatever the reason.
_CORE_DIED = "EngineDeadError"
_ERROR_LINE = re.compile(r"(?:^|\s)(?:[\w.]*(?:Error|Exception)): .+|^grapevine: cannot start .+")
_PREFIX = re.compile(r"^\((?:APIServer|EngineCore|Worker)[^)]*\)\s*")
_LOG_HEAD = re.compile(r"^(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\]\s*")
_HARMLESS = re.compile(r"^(?:DEBUG|INFO|WARNING) \d\d-\d\d")


def explain(lines: Sequence[str], status: int | None, *, model: str = "", oom_kills: int = 0) -> Failure:
    """The failure told by the last `lines` of the log and the exit `status` (negative: the signal).

    `oom_kills` is how many processes the kernel's out-of-memory killer ended on this host meanwhile.
    """
    cleaned = [clean(line) for line in lines]
    telling = [line for line in cleaned if not _HARMLESS.match(line)]
    if oom_kills > 0 and (status == -signal.SIGKILL or _any(_VANISHED.search, telling)):
        return _killed_for_memory("the kernel ended the engine because the host ran out of memory")
    for rule in _RULES:
        for line in reversed(telling):
            match = rule.pattern.search(line)
            if match:
                named = {name: _short(text or "") for name, text in match.groupdict().items()}
                return Failure(rule.cause, rule.text.format(model=model or "of the engine", **named), rule.permanent)
    if status == -signal.SIGKILL or _any(_VANISHED.search, telling):
        return _killed_for_memory("the engine was killed from outside, mostly that is the host running out of memory")
    if status is not None and status < 0:
        return Failure(Cause.KILLED, f"the engine ended by signal {_signal_name(-status)}")
    return _unknown(telling, status)


def timed_out(seconds: float) -> Failure:
    """The failure of an engine that lives and never becomes ready."""
    return Failure(
        Cause.TIMEOUT, f"the engine was not ready after {seconds:g} s: see its log, or raise --engine-start-timeout-s"
    )


def failure_of(error: Exception) -> Failure:
    """The failure of a start that did not come as far as a process."""
    if isinstance(error, CannotStart):
        return error.failure
    if isinstance(error, ModelStoreError):
        return Failure(Cause.OFFLINE, str(error))
    if isinstance(error, LocalError):
        return Failure(Cause.ARGUMENT, str(error), permanent=True)
    return Failure(Cause.UNKNOWN, f"the engine cannot be started: {type(error).__name__}: {error}")


def clean(line: str) -> str:
    """A line of the log without the name of the process and without the level, file and time of vLLM's logger."""
    line = _PREFIX.sub("", line)
    return line if _HARMLESS.match(line) else _LOG_HEAD.sub("", line)


def _unknown(telling: Sequence[str], status: int | None) -> Failure:
    errors = [line.strip() for line in telling if _ERROR_LINE.search(line)]
    ended = f"the engine ended with status {status}" if status is not None else "the engine ended"
    # The first cause is printed first; what follows ("engine initialization failed") only repeats it.
    causes = [line for line in errors if "See root cause above" not in line]
    quote = next((line for line in causes if _CORE_DIED not in line), "")
    if causes and not quote:
        return _killed_for_memory("the engine core ended without a word, mostly that is the host running out of memory")
    return Failure(Cause.UNKNOWN, f"{ended}: {_short(quote)}" if quote else f"{ended} and gave no reason: see its log")


def _killed_for_memory(what: str) -> Failure:
    advice = "lower VLLM_CPU_KVCACHE_SPACE or --max-model-len, use a smaller model, or end other processes"
    return Failure(Cause.OUT_OF_MEMORY, f"{what}: {advice}")


def _any(test: Callable[[str], object], lines: Sequence[str]) -> bool:
    return any(test(line) for line in lines)


def _short(text: str) -> str:
    return text if len(text) <= MAX_QUOTE else text[: MAX_QUOTE - 3] + "..."


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
