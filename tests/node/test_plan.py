"""`grapevine plan`: what it prints, the commands that it gives, its exit statuses."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from node.cli import main
from node.cli.options import split_arguments
from node.cli.plan_gpus import together
from node.cli.start import start
from node.doctor import gpus
from node.doctor.facts import Gpu
from node.sizing.shape import SizingError
from tests.node.fakes.cluster import cluster
from tests.node.sizing.published import LLAMA_70B
from tests.waiting import PATIENCE_S

ASKED = ("--requests", "20", "--prompt", "6000", "--output", "300", "--network", "100")


def run(*args: str) -> Any:
    return CliRunner().invoke(main, ["plan", *args])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "Llama-3.3-70B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_70B))
    return folder


def test_it_tells_stage_numbers_reasons_and_a_command(model: Path) -> None:
    result = run("--model", str(model), *ASKED, "--shared", "0.6")
    assert result.exit_code == 0, result.output
    for words in (
        "Llama-3.3-70B: 70.6 B",
        "Stage 4 of 4",
        "nodes of 4 GPUs each",
        "room for KV",
        "Why",
        "What this cannot",
    ):
        assert words in result.output
    assert f"--model {model}" in result.output and "--tensor-parallel-size 4" in result.output


def test_the_command_that_it_gives_is_one_that_start_takes(model: Path) -> None:
    output = run("--model", str(model), *ASKED).output
    line = next(line for line in output.splitlines() if "grapevine start" in line)
    own, after = split_arguments(shlex.split(line)[2:])
    context = start.make_context("start", [*own, "--", *after])
    assert context.params["model"] == str(model) and context.params["max_running"] >= 8
    flags = json.loads(run("--model", str(model), *ASKED, "--json").output)["vllm_flags"]
    assert after == flags


def test_every_flag_for_vllm_is_one_that_vllm_has() -> None:
    """By its source: importing it takes half a minute."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    source = (Path(found.origin).parent / "engine" / "arg_utils.py").read_text()
    told = json.loads(run("--parameters", "405", *ASKED, "--gpu", "H200", "--kv-precision", "fp8", "--json").output)
    used = {flag for flag in told["vllm_flags"] if flag.startswith("--")} | {"--pipeline-parallel-size"}
    assert "--kv-cache-dtype" in used and [flag for flag in used if f'"{flag}"' not in source] == []


def test_the_longest_request_is_no_longer_than_the_model_takes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_70B, "max_position_embeddings": 8192}))
    told = json.loads(run("--model", str(tmp_path), *ASKED, "--json").output)
    assert told["vllm_flags"][:2] == ["--max-model-len", "8192"]


def test_what_fits_nowhere_is_exit_status_1() -> None:
    result = run("--parameters", "405", *ASKED, "--gpu", "T4", "--gpus-per-host", "2", "--hosts", "1")
    assert result.exit_code == 1 and "It does not fit" in result.output and "smaller precision" in result.output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "either --model PATH or --parameters"),
        (("--parameters", "8", "--gpu", "Voodoo"), "not known here; use one of"),
        (("--parameters", "8", "--tensor", "3"), "do not allow it"),
        (("--parameters", "0"), "0.05 to 5000"),
    ],
)
def test_a_question_that_makes_no_sense_is_exit_status_2(args: tuple[str, ...], words: str) -> None:
    result = run(*args, *ASKED)
    assert result.exit_code == 2 and words in result.output


def test_the_gpus_of_this_host_are_read_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    four = tuple(Gpu(index, "NVIDIA L40S", 46068, "570") for index in range(4))
    monkeypatch.setattr(gpus, "find_gpus", lambda: (four, {(0, 1): "PHB"}, ""))
    assert "hosts with 4 x L40S, PCIe inside" in run("--parameters", "8", "--gpu", "here", *ASKED).output
    monkeypatch.setattr(gpus, "find_gpus", lambda: ((), {}, "Driver mismatch"))
    result = run("--parameters", "8", "--gpu", "here", *ASKED)
    assert result.exit_code == 2 and "Driver mismatch" in result.output


async def test_the_gpus_of_a_running_cluster_are_read_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    four = tuple(Gpu(index, "NVIDIA H100 80GB HBM3", 81559, "570") for index in range(4))
    monkeypatch.setattr("node.host.find_gpus", lambda: (four, {(0, 1): "NV18"}, ""))
    asked = ("--parameters", "8", "--gpu", "cluster", *ASKED)
    async with cluster(2) as nodes:
        for member in nodes.members:
            await asyncio.to_thread(member.node.host.looking.join, PATIENCE_S)
        output = (await asyncio.to_thread(run, *asked, "--node", nodes[0].url)).output
        assert "hosts with 4 x H100, NVLink inside" in output, output


def test_hosts_that_differ_are_reckoned_with_what_all_have(capsys: pytest.CaptureFixture[str]) -> None:
    h100, h200 = {"name": "NVIDIA H100", "memory_mib": 81559}, {"name": "NVIDIA H200", "memory_mib": 143771}
    found = together([
        {"gpus": [h100] * 8, "nvlink": True}, {"gpus": [h200] * 4, "nvlink": False}, {"gpus": []}, {"gpus": None}, {},
    ])  # fmt: skip
    assert (found.kind.name, found.per_host, found.hosts, found.nvlink) == ("H100", 4, 2, False)
    assert "the hosts differ" in capsys.readouterr().err
    with pytest.raises(SizingError, match="no node tells of a GPU"):
        together([{"gpus": []}])
