"""The plan against what people have published: stage, degree, counts of weights, and throughput."""

from __future__ import annotations

from typing import Any

import pytest

from node.sizing import engine as of_engine
from node.sizing.advice import advise
from node.sizing.config_json import parse
from node.sizing.engine import Engine, Load
from tests.node.sizing.published import CASES, GPT_OSS_120B, MEASURED, PARAMETERS, Case, on


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_stage_and_degree_are_those_that_were_published(case: Case) -> None:
    advice = advise(case.model, case.hardware, case.load, kv_precision=case.kv)
    assert (advice.engine.tensor, advice.engine.pipeline) == (case.tensor, case.pipeline), advice.reasons
    assert advice.stage is case.stage, advice.reasons
    assert case.source.startswith("https://")


def test_at_least_eight_deployments_of_different_kinds_are_compared() -> None:
    assert len({case.source for case in CASES}) >= 8
    assert {case.stage.name for case in CASES} >= {"ONE", "TENSOR", "CLUSTER"}


@pytest.mark.parametrize("name", PARAMETERS)
def test_weights_are_counted_to_half_a_percent(name: str) -> None:
    config, billions = PARAMETERS[name]
    assert parse(config).parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_kv_of_a_model_with_windows_is_that_which_gitlab_measured() -> None:
    """13 GB of KV room hold about 370,000 tokens of gpt-oss-120b, about 36 KB each.

    https://docs.gitlab.com/administration/gitlab_duo_self_hosted/vllm_gpt_oss_120b/
    """
    assert parse(GPT_OSS_120B).kv_token_bytes("bf16") == pytest.approx(36e3, rel=0.03)
    assert Engine(parse(GPT_OSS_120B), on("H100", utilization=0.95)).kv_tokens == pytest.approx(370_000, rel=0.05)


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row[2]}x{row[3]}-{row[4]}")
def test_throughput_is_within_a_third_of_what_was_measured(row: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At saturation, without latency bounds. MFU_EXPERTS and LAYER_S were chosen with these rows in view."""
    monkeypatch.setattr(of_engine, "SLOTS", 1024)
    monkeypatch.setattr(of_engine, "MOST_BUSY", 0.97)
    config, precision, gpu, tensor, prompt, output, tokens_s = row
    load = Load(requests_s=1, prompt=prompt, output=output, ttft_s=1e9, between_s=1e9, longest=prompt + output)
    rate, _ = Engine(parse(config, precision=precision), on(gpu), tensor).capacity(load)
    assert rate.requests_s * (prompt + output) == pytest.approx(tokens_s, rel=1 / 3)
