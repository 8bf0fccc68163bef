"""Short questions to the engine, each with a deadline and a bound on what is read.

An attached server may be anything that speaks the OpenAI protocol: one without /health, /version or /metrics is
answered for as well as can be.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import aiohttp

from node.engine.client import EngineAddress
from node.engine.events import EngineModel
from node.errors import EngineError

#: Largest answer read, bytes: hundreds of adapters or a few thousand metric lines fit.
MAX_ANSWER_BYTES = 4 * 1024 * 1024
#: Most models taken from one engine.
MAX_MODELS = 1024
#: Longest model name taken, characters.
MAX_MODEL_NAME = 256
#: Largest figure taken, so that sums stay finite: beyond it a float no longer counts every one.
MAX_FIGURE = float(1 << 53)
#: Statuses by which a server says that it does not have a path.
ABSENT = (404, 405, 501)


@dataclass(frozen=True, slots=True)
class Health:
    """What a health probe found. `refused`: nobody listens, which a busy engine never answers."""

    ok: bool
    refused: bool = False
    detail: str = ""


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Gauges and counters of a vLLM engine. Requests, tokens; `kv_use` is a part of 1, `kv_tokens` the whole.

    Of several engines behind one API server the sums, but of their KV caches the fullest and the smallest: a request
    has its KV in one of them.
    """

    running: int = 0
    waiting: int = 0
    kv_use: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    external_queries: int = 0
    external_hits: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    kv_tokens: int = 0


class EngineLoad(NamedTuple):
    """The three of them that say how busy it is."""

    running: int
    waiting: int
    kv_use: float


#: Metric of vLLM -> field.
_METRICS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_use",
    "vllm:gpu_cache_usage_perc": "kv_use",  # up to 0.10
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:external_prefix_cache_queries_total": "external_queries",
    "vllm:external_prefix_cache_hits_total": "external_hits",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generated_tokens",
}
#: Beginnings of the lines that say how busy the engine is.
_LOAD = tuple(metric.encode() for metric, field in _METRICS.items() if field in ("running", "waiting", "kv_use"))
#: Labels of this one say how large the KV cache is.
_CACHE = "vllm:cache_config_info"
_CACHE_SIZES = [re.compile(rf'[{{,]{label}="(\d{{1,12}})"') for label in ("block_size", "num_gpu_blocks")]


async def probe_health(session: aiohttp.ClientSession, address: EngineAddress, timeout_s: float) -> Health:
    """Ask /health; a server without it is asked for its models instead. Never raises."""
    try:
        status, body = await _get(session, address, "/health", timeout_s)
        if status in ABSENT:
            status, body = await _get(session, address, "/v1/models", timeout_s)
    except EngineError as error:
        refused = isinstance(error.__cause__, aiohttp.ClientConnectorError | FileNotFoundError)
        return Health(ok=False, refused=refused, detail=str(error))
    if status == 200:
        return Health(ok=True)
    return Health(ok=False, detail=f"status {status} {body[:200].decode('utf-8', 'replace')}".strip())


async def probe_models(
    session: aiohttp.ClientSession, address: EngineAddress, timeout_s: float
) -> tuple[EngineModel, ...]:
    """The models of /v1/models, base models first. Raises `EngineError`."""
    status, body = await _get(session, address, "/v1/models", timeout_s)
    if status != 200:
        hint = "; check --engine-api-key" if status in (401, 403) else ""
        raise EngineError(f"{address} answers /v1/models with status {status}{hint}")
    return parse_models(body)


async def probe_version(session: aiohttp.ClientSession, address: EngineAddress, timeout_s: float) -> str:
    """The version of /version; empty when the server does not tell. Never raises."""
    try:
        status, body = await _get(session, address, "/version", timeout_s)
        answer = json.loads(body) if status == 200 else {}
    except (EngineError, ValueError):
        return ""
    version = answer.get("version") if isinstance(answer, dict) else None
    return version[:64] if isinstance(version, str) else ""


async def probe_metrics(
    session: aiohttp.ClientSession, address: EngineAddress, timeout_s: float
) -> EngineMetrics | None:
    """The engine's own figures; None when it does not publish any. Raises `EngineError` when it is silent."""
    status, body = await _get(session, address, "/metrics", timeout_s)
    return parse_metrics(body.decode("utf-8", "replace").splitlines()) if status == 200 else None


async def probe_kv_tokens(session: aiohttp.ClientSession, address: EngineAddress, timeout_s: float) -> int:
    """Tokens that its KV cache holds; 0 when the server does not tell. Never raises."""
    try:
        metrics = await probe_metrics(session, address, timeout_s)
    except EngineError:
        return 0
    return metrics.kv_tokens if metrics is not None else 0


async def probe_token(session: aiohttp.ClientSession, address: EngineAddress, model: str, timeout_s: float) -> Health:
    """Have it compute one token: an engine may hang while its HTTP server says that all is well. Never raises."""
    asked = {"model": model, "prompt": "a", "max_tokens": 1}
    try:
        async with (
            asyncio.timeout(timeout_s),
            session.post(
                address.url("/v1/completions"), json=asked, headers={"accept-encoding": "identity"}
            ) as response,
        ):
            # Whatever it says, it says it without hanging: an engine without completions is no worse for it.
            await response.content.readany()
            return Health(ok=True)
    except TimeoutError:
        return Health(ok=False, detail=f"no token within {timeout_s:g} s")
    except (aiohttp.ClientError, OSError) as error:
        return Health(ok=False, detail=f"cannot be reached: {error}")


def parse_models(body: bytes) -> tuple[EngineModel, ...]:
    """The models in an answer of /v1/models, bounded. Raises `EngineError`."""
    try:
        entries = json.loads(body)["data"]
        if not isinstance(entries, list):
            raise TypeError("data is no list")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise EngineError("the engine's /v1/models is not what OpenAI servers answer") from error
    models = [_model(entry) for entry in entries[:MAX_MODELS] if isinstance(entry, dict)]
    return tuple(sorted((model for model in models if model.id), key=lambda model: model.parent is not None))


def parse_metrics(lines: Iterable[str]) -> EngineMetrics | None:
    """The figures that matter from Prometheus text; None when it holds none of vLLM's."""
    found, kv_tokens = _figures(lines)
    if not found:
        return None
    kv_use = found.pop("kv_use", 0.0)
    return EngineMetrics(kv_use=kv_use, kv_tokens=kv_tokens, **{field: int(value) for field, value in found.items()})


def parse_load(page: bytes) -> EngineLoad | None:
    """How busy the engine is by its page of metrics; None when that does not tell. Never raises."""
    # A page is mostly buckets of histograms: only these lines are looked at.
    told = (line.decode("utf-8", "replace") for line in page.split(b"\n") if line.startswith(_LOAD))
    found, _ = _figures(told)
    if "running" not in found or "waiting" not in found:
        return None
    return EngineLoad(int(found["running"]), int(found["waiting"]), found.get("kv_use", 0.0))


def _figures(lines: Iterable[str]) -> tuple[dict[str, float], int]:
    """What the lines say by field, and the tokens that the smallest KV cache holds."""
    found: dict[str, float] = {}
    caches: list[int] = []
    for line in lines:
        if not line.startswith("vllm:"):
            continue
        name = line.partition("{")[0].partition(" ")[0]
        field = _METRICS.get(name)
        if name == _CACHE:
            caches.append(_cache_tokens(line))
        elif field is not None:
            value, before = _number(line.rpartition(" ")[2]), found.get(field, 0.0)
            found[field] = max(before, min(value, 1.0)) if field == "kv_use" else before + value
    return found, min(caches, default=0)


def _cache_tokens(line: str) -> int:
    size, blocks = (label.search(line) for label in _CACHE_SIZES)
    return int(size[1]) * int(blocks[1]) if size is not None and blocks is not None else 0


def _model(entry: dict[str, object]) -> EngineModel:
    length = entry.get("max_model_len")
    parent = entry.get("parent")
    return EngineModel(
        id=_short(entry.get("id")),
        root=_short(entry.get("root")),
        parent=_short(parent) if isinstance(parent, str) and parent else None,
        max_model_len=length if isinstance(length, int) and not isinstance(length, bool) and length > 0 else None,
    )


def _short(value: object) -> str:
    return value[:MAX_MODEL_NAME] if isinstance(value, str) else ""


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0.0 <= value <= MAX_FIGURE else 0.0


async def _get(
    session: aiohttp.ClientSession, address: EngineAddress, path: str, timeout_s: float
) -> tuple[int, bytes]:
    """Status and bounded body. Raises `EngineError` with the cause in words."""
    try:
        async with (
            asyncio.timeout(timeout_s),
            # The session passes bodies on undecoded, so ask for a plain one.
            session.get(address.url(path), headers={"accept-encoding": "identity"}) as response,
        ):
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    raise EngineError(f"{address} answers {path} with more than {MAX_ANSWER_BYTES} bytes")
            return response.status, bytes(body)
    except TimeoutError as error:
        raise EngineError(f"{address} did not answer {path} within {timeout_s:g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise EngineError(f"{address} cannot be reached: {error}") from error
