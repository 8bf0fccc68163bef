"""The four stages, what each bound changes, warnings for what does not pay, and the arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.sizing.advice import Stage, advise
from node.sizing.config_json import parse
from node.sizing.engine import LAYER_S, MBU, MFU, OVERHEAD, SLOTS, Engine, Load
from node.sizing.hardware import GIB, KINDS, Hardware, kind_of_smi
from node.sizing.shape import SizingError, shape_of
from tests.node.sizing.published import LLAMA_8B, LLAMA_70B, LLAMA_405B, on

SMALL = parse(LLAMA_8B)
LARGE = parse(LLAMA_70B)
LOAD = Load(requests_s=1, prompt=1000, output=200)


def told(advice: Any) -> str:
    return " ".join(advice.warnings)


def test_room_prefill_and_step_are_the_formulas() -> None:
    engine = Engine(SMALL, on("H100"))
    room = 79.6 * GIB * 0.9 - OVERHEAD - SMALL.weight_bytes
    assert engine.kv_tokens == int(room / (2 * 32 * 8 * 128 * 2))
    linear = 2 * SMALL.active * 1000 / (989e12 * MFU)
    assert engine.prefill_s(1000) == pytest.approx(linear + 2 * 32 * 32 * 128 * 1000**2 / (989e12 * MFU))
    read = SMALL.dense_bytes + SMALL.embedding + 10 * 1100 * 131072
    assert engine.step_s(10, 1100) == pytest.approx(read / (3.35e12 * MBU) + 32 * LAYER_S)


def test_one_small_model_and_a_small_load_need_one_machine() -> None:
    advice = advise(SMALL, on("H100"), LOAD)
    assert (advice.stage, advice.nodes, advice.hosts, advice.engine.gpus) == (Stage.ONE, 1, 1, 1)


def test_more_of_it_needs_replicas_on_as_few_hosts_as_hold_them() -> None:
    advice = advise(SMALL, on("H100"), replace(LOAD, requests_s=150))
    assert advice.stage is Stage.REPLICAS and advice.engine.tensor == 1
    assert advice.hosts == -(-advice.nodes // 8)
    assert advice.planned.requests_s * advice.nodes == pytest.approx(150)
    assert advice.planned.requests_s <= 0.7 * advice.capacity.requests_s * 1.001


def test_a_model_that_fits_no_gpu_is_sharded_in_its_host() -> None:
    advice = advise(LARGE, on("H100"), LOAD)
    assert advice.stage is Stage.TENSOR and advice.engine.tensor > 1 and advice.engine.pipeline == 1
    assert ("--tensor-parallel-size", str(advice.engine.tensor)) in zip(advice.flags, advice.flags[1:], strict=False)


def test_shared_prompts_and_a_fast_network_make_a_cluster() -> None:
    load = Load(requests_s=30, prompt=8000, output=200, shared=0.7)
    assert advise(LARGE, on("H100", network_gbit=100), load).stage is Stage.CLUSTER
    slow = advise(LARGE, on("H100", network_gbit=1), load)
    assert slow.stage is Stage.TENSOR and "slow for KV" in told(slow)
    assert advise(LARGE, on("H100"), replace(load, shared=0.1)).stage is Stage.TENSOR


def test_a_tighter_bound_takes_more_gpus_before_it_is_missed() -> None:
    loose = advise(LARGE, on("H100"), replace(LOAD, prompt=8000, ttft_s=5))
    tight = advise(LARGE, on("H100"), replace(LOAD, prompt=8000, ttft_s=0.5))
    assert tight.engine.tensor > loose.engine.tensor
    missed = advise(LARGE, on("H100"), replace(LOAD, prompt=8000, ttft_s=0.001))
    assert missed.capacity.requests_s == 0 and "missed even by a request alone" in told(missed)


def test_what_fits_nowhere_is_said_to() -> None:
    advice = advise(parse(LLAMA_405B), on("T4", per_host=4, hosts=2, nvlink=False), LOAD)
    assert advice.stage is Stage.NONE and "smaller precision" in told(advice) and "do not fit" in advice.reasons[0]


def test_sharding_across_ethernet_is_warned_of() -> None:
    advice = advise(parse(LLAMA_405B), on("H100", network_gbit=25), LOAD)
    assert advice.engine.pipeline > 1 and "sharding across Ethernet" in told(advice)
    assert "Ethernet" not in told(advise(parse(LLAMA_405B), on("H100", network_gbit=400), LOAD))


def test_tensor_parallelism_that_does_not_pay_is_warned_of() -> None:
    assert "below 13B" in told(advise(SMALL, on("H100"), LOAD, tensor=2))
    assert "without NVLink" in told(advise(LARGE, on("L40S", nvlink=False), LOAD))


def test_a_cluster_for_one_small_model_is_warned_of() -> None:
    assert "one node carries it" in told(advise(SMALL, on("H100"), replace(LOAD, shared=0.9)))


def test_too_few_hosts_are_told_with_what_they_carry() -> None:
    advice = advise(LARGE, on("H100", hosts=1), replace(LOAD, requests_s=100))
    assert "1 are there: they carry about" in told(advice)


def test_pcie_makes_sharding_slower() -> None:
    fast, slow = (Engine(LARGE, on("A100", nvlink=nvlink), 4) for nvlink in (True, False))
    assert slow.prefill_s(4000) > 1.5 * fast.prefill_s(4000)
    assert slow.step_s(8, 1000) > fast.step_s(8, 1000)


def test_kv_in_8_bits_doubles_the_room() -> None:
    half = Engine(SMALL, on("H100"), kv_precision="fp8")
    assert half.kv_tokens == pytest.approx(2 * Engine(SMALL, on("H100")).kv_tokens, abs=2)
    assert "fp8" in advise(SMALL, on("H100"), LOAD, kv_precision="fp8").flags


def test_more_shards_than_kv_heads_give_no_more_room_for_each_head() -> None:
    assert (
        Engine(SMALL, on("H100"), 8).kv_per_token_per_gpu
        == Engine(SMALL, on("H100", per_host=16), 16).kv_per_token_per_gpu
    )


@settings(deadline=None, max_examples=60)
@given(
    st.floats(0.5, 700),
    st.sampled_from(sorted(KINDS)),
    st.integers(1, 60_000),
    st.integers(1, 5000),
    st.floats(0.01, 500),
    st.floats(0, 1),
    st.booleans(),
)
def test_every_question_has_an_answer_that_holds_its_own_bounds(  # noqa: PLR0917 - hypothesis gives them in order
    size: float, gpu: str, prompt: int, output: int, rate: float, shared: float, nvlink: bool
) -> None:
    load = Load(requests_s=rate, prompt=prompt, output=output, shared=shared)
    advice = advise(shape_of(size, "bf16"), Hardware(gpu=KINDS[gpu], nvlink=nvlink), load)
    if advice.stage is Stage.NONE or not advice.capacity.requests_s:
        assert advice.warnings
        return
    assert advice.engine.fits(load) and advice.engine.room_per_gpu > 0
    assert not list(advice.engine.limits(advice.planned, load))
    assert advice.nodes >= 1 and advice.hosts >= 1 and 8 <= advice.slots <= max(SLOTS * 1.25, 1024)
    more = advise(shape_of(size, "bf16"), Hardware(gpu=KINDS[gpu], nvlink=nvlink), replace(load, requests_s=2 * rate))
    assert more.nodes >= advice.nodes


@pytest.mark.parametrize(
    ("smi", "kind", "nvlink"),
    [
        ("NVIDIA H100 80GB HBM3", "H100", True),
        ("NVIDIA H100 PCIe", "H100-PCIe", False),
        ("NVIDIA A100-SXM4-40GB", "A100-40G", True),
        ("NVIDIA L40S", "L40S", False),
        ("NVIDIA L4", "L4", False),
        ("Tesla T4", "T4", False),
        ("NVIDIA GeForce RTX 4090", "RTX4090", False),
    ],
)
def test_gpus_are_known_by_what_nvidia_smi_calls_them(smi: str, kind: str, nvlink: bool) -> None:
    found = kind_of_smi(smi, 40960)
    assert (found.name, found.memory_gib, found.nvlink > 0) == (kind, 40.0, nvlink)
    with pytest.raises(SizingError, match="not known here"):
        kind_of_smi("Voodoo 2", 12)
