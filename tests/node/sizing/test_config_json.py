"""config.json: precisions, size from the index, shapes that are not understood, and anything at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.sizing.config_json import parse, read_model
from node.sizing.shape import SizingError, shape_of
from tests.node.sizing.published import DEEPSEEK_R1, GPT_OSS_120B, LLAMA_8B, QWEN3_32B

QUANTIZED = [
    ({"quant_method": "fp8"}, "fp8", False),
    ({"quant_method": "awq", "bits": 4}, "int4", False),
    ({"quant_method": "gptq", "bits": 8}, "fp8", False),
    ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8}}}}, "fp8", False),
    ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4}}}}, "int4", False),
    ({"quant_method": "mxfp4"}, "mxfp4", True),
]


@pytest.mark.parametrize(("quantized", "precision", "experts_only"), QUANTIZED)
def test_the_precision_is_that_of_the_checkpoint(quantized: dict[str, Any], precision: str, experts_only: bool) -> None:
    shape = parse({**LLAMA_8B, "quantization_config": quantized})
    assert (shape.precision, shape.experts_only) == (precision, experts_only)
    with pytest.raises(SizingError, match="'hqq' is not known here: say --precision"):
        parse({**LLAMA_8B, "quantization_config": {"quant_method": "hqq"}})


def test_a_precision_that_is_given_wins() -> None:
    assert parse(GPT_OSS_120B, precision="bf16").weight_bytes == pytest.approx(2 * 116.8e9, rel=0.01)


def test_latent_attention_keeps_one_vector_of_a_token() -> None:
    assert parse(DEEPSEEK_R1).kv_token_bytes("bf16") == 61 * (512 + 64) * 2


def test_the_language_part_of_a_model_that_sees_is_taken() -> None:
    assert parse({"model_type": "x", "text_config": LLAMA_8B}).layers == 32


def test_the_size_of_the_checkpoint_wins_unless_the_precision_is_changed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_32B))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 65_524_246_528}}))
    assert read_model(tmp_path).weight_bytes == 65_524_246_528
    assert read_model(tmp_path / "config.json", "fp8").weight_bytes == pytest.approx(34.3e9, rel=0.01)
    assert read_model(tmp_path).name == tmp_path.name


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "is no JSON"), ("[]", "holds no object"), ('{"num_hidden_layers": "many"}', "num_hidden_layers is 'many'")],
)
def test_what_is_not_understood_is_told(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(SizingError, match=words):
        read_model(tmp_path)
    with pytest.raises(SizingError, match="cannot be read"):
        read_model(tmp_path / "nowhere")


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 10**13), st.floats(), st.text(max_size=5), st.lists(st.text(max_size=3))
)


@given(st.dictionaries(st.sampled_from([*DEEPSEEK_R1, *GPT_OSS_120B, "text_config", "head_dim"]), VALUES))
def test_any_config_is_a_shape_or_an_error_of_ours(changes: dict[str, Any]) -> None:
    try:
        shape = parse({**LLAMA_8B, **changes})
    except SizingError:
        return
    assert shape.weight_bytes >= 0 and shape.kv_token_bytes("bf16") >= 0


@pytest.mark.parametrize("billions", [0.1, 1, 8, 13, 32, 70, 405, 2000])
def test_a_number_of_weights_alone_gives_a_shape_that_can_be_divided(billions: float) -> None:
    shape = shape_of(billions, "bf16")
    assert shape.parameters == pytest.approx(billions * 1e9) and shape.heads % 8 == 0
    with pytest.raises(SizingError, match=r"0\.05 to 5000"):
        shape_of(-billions, "bf16")
