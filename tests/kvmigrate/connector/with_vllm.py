"""Which engines take part, how the others are served, and what vLLM's own block hashes tell apart.

`test_with_vllm.py` runs these in a process of their own: importing vLLM changes logging, and takes seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, SupportsHMA
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.request import Request

from kvmigrate.connector import GrapevineConnector, identity
from kvmigrate.connector.connector import LINK_OPTION, StepPlan

SHAPE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(**SHAPE)
WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=64)
MAMBA = MambaSpec(shapes=((2, 8),), dtypes=(torch.bfloat16,), block_size=16)


def config(**parts: object) -> Any:
    """What is read of vLLM's configuration, of an engine that takes part unless told otherwise."""
    whole: dict[str, dict[str, object]] = {
        "cache_config": {"enable_prefix_caching": True, "block_size": 16},
        "parallel_config": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "decode_context_parallel_size": 1,
        },
        "kv_transfer_config": {"kv_connector_extra_config": {LINK_OPTION: "/nonexistent/link"}},
    }
    for name, value in parts.items():
        part = next(part for part in whole.values() if name in part)
        part[name] = value
    return SimpleNamespace(**{name: SimpleNamespace(**part) for name, part in whole.items()}, speculative_config=None)


def caches(*specs: KVCacheSpec) -> Any:
    return SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs], hash_block_size=16, num_blocks=8
    )


def drafting() -> Any:
    engine = config()
    engine.speculative_config = SimpleNamespace(method="eagle")
    return engine


@pytest.mark.parametrize(
    ("engine", "groups", "why"),
    [
        (drafting, [FULL], "speculative decoding"),
        (config, [MAMBA], "Mamba"),
        (config, [FULL, MAMBA], "only full attention migrates"),
        (config, [FULL, WINDOW], "only full attention migrates"),
        (config, [WINDOW], "sliding window"),
        (lambda: config(enable_prefix_caching=False), [FULL], "prefix caching is off"),
        (lambda: config(pipeline_parallel_size=2), [FULL], "pipeline parallelism"),
        (lambda: config(data_parallel_size=2), [FULL], "data parallelism"),
        (lambda: config(decode_context_parallel_size=2), [FULL], "decode context parallelism"),
    ],
    ids=["eagle", "mamba", "hybrid", "window-and-full", "window", "no-cache", "pipeline", "data", "context"],
)
def test_an_engine_whose_blocks_do_not_move_says_so_once_and_serves_without(
    engine: Callable[[], Any], groups: list[KVCacheSpec], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "vllm.grapevine")
    refused = GrapevineConnector(engine(), KVConnectorRole.SCHEDULER, caches(*groups))
    said = [record.getMessage() for record in caplog.records if "KV migration is off" in record.getMessage()]
    assert len(said) == 1 and why in said[0] and "It serves without" in said[0]
    request = vllm_request()
    refused.on_new_request(request)
    assert refused.get_num_new_matched_tokens(request, 0) == (0, False)
    step = SimpleNamespace(
        num_scheduled_tokens={"r": len(PROMPT)},
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda rid: [[0, 1, 2, 3]]),
    )
    plan = refused.build_connector_meta(step)
    assert isinstance(plan, StepPlan) and (plan.loads, plan.saves) == ([], [])
    assert refused.request_finished(request, [0, 1, 2, 3]) == (False, None)
    refused.shutdown()


def test_a_step_that_computes_nothing_is_marked() -> None:
    connector = GrapevineConnector(config(), KVConnectorRole.SCHEDULER, caches(FULL))
    for tokens, idle in (({}, True), ({"r": 5}, False)):
        step = SimpleNamespace(num_scheduled_tokens=tokens, kv_connector_block_state=None)
        plan = connector.build_connector_meta(step)
        assert isinstance(plan, StepPlan) and plan.idle is idle
    connector.shutdown()


def test_an_engine_of_full_attention_on_several_ranks_takes_part() -> None:
    assert identity.refusal(config(), caches(FULL)) == ""
    assert identity.refusal(config(tensor_parallel_size=2), caches(FULL)) == ""


def test_the_hybrid_allocator_stays_off_and_a_lost_save_makes_nobody_compute_again() -> None:
    """vLLM turns it off for a connector that does not claim to support it: one group of blocks is guaranteed then."""
    assert not issubclass(GrapevineConnector, SupportsHMA)
    connector = GrapevineConnector(config(), KVConnectorRole.SCHEDULER, caches(FULL))
    assert connector.requires_kv_delivery is False
    connector.shutdown()


@pytest.mark.parametrize(
    ("algorithm", "environment", "seed"),
    [("sha256_cbor", None, "none"), ("sha256_cbor", "7", "7"), ("xxhash", None, ""), ("xxhash", "7", "7")],
)
def test_a_hash_whose_seed_is_random_matches_nobody(
    algorithm: str, environment: str | None, seed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if environment is not None:
        monkeypatch.setenv("PYTHONHASHSEED", environment)
    assert identity._hash_seed(algorithm) == seed


def test_weights_drawn_at_random_are_told_apart_by_their_seed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    def digest(seed: int, load_format: str = "dummy") -> str:
        model = SimpleNamespace(model=str(tmp_path), revision=None, seed=seed)
        return identity._model_digest(
            SimpleNamespace(model_config=model, load_config=SimpleNamespace(load_format=load_format))
        )

    assert digest(0) and digest(0) == digest(0) and len({digest(0), digest(1), digest(0, "auto")}) == 3


def test_scales_that_are_computed_at_run_time_match_nobody() -> None:
    assert identity._kv_scales(SimpleNamespace(cache_dtype="auto")) == "none"
    assert identity._kv_scales(SimpleNamespace(cache_dtype="fp8_e4m3", calculate_kv_scales=False)) == "checkpoint"
    assert identity._kv_scales(SimpleNamespace(cache_dtype="fp8_e4m3", calculate_kv_scales=True)) == ""


# -- what vLLM's hashes and requests promise us (the pinned version) -----------------------------------------------

PROMPT = list(range(64))


def vllm_request(**fields: Any) -> Request:
    kv_cache_utils.init_none_hash(sha256_cbor)
    wishes = SamplingParams(max_tokens=4, **fields.pop("wishes", {}))
    hasher = kv_cache_utils.get_request_block_hasher(16, sha256_cbor)
    return Request("r", fields.pop("prompt", PROMPT), wishes, None, block_hasher=hasher, **fields)


def test_a_cache_salt_and_an_adapter_change_the_hash_of_every_block() -> None:
    plain = vllm_request().block_hashes
    assert len(plain) == 4 and plain == vllm_request().block_hashes
    salted = vllm_request(cache_salt="s").block_hashes
    other = vllm_request(cache_salt="t").block_hashes
    adapted = vllm_request(lora_request=LoRARequest("a", 1, "/a")).block_hashes
    assert not set(plain) & set(salted) and not set(salted) & set(other) and not set(plain) & set(adapted)


def test_a_request_for_prompt_logprobs_reads_no_cache() -> None:
    assert not vllm_request().skip_reading_prefix_cache
    assert vllm_request(wishes={"prompt_logprobs": 1}).skip_reading_prefix_cache
