"""Which engines' answers in one piece are known to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.engine.form import known_form
from node.engine.supervisor import EngineSupervisor
from node.settings import make_settings


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "emulated-1"])
def test_vllm_of_that_version_and_the_emulated_engine(version: str) -> None:
    assert known_form(version, (), chat=True) and known_form(version, ("--max-model-len", "4096"), chat=False)


@pytest.mark.parametrize("version", ["", "0.31.0", "0.33.0", "0.320.0", "1.0", "unknown"])
def test_no_other_version(version: str) -> None:
    assert not known_form(version, (), chat=False)


def test_no_vllm_whose_options_are_not_known() -> None:
    assert not known_form("0.32.0", None, chat=False)
    assert known_form("emulated-1", None, chat=True)


@pytest.mark.parametrize(
    "args",
    [
        ("--kv-transfer-config", "{}"),
        ("--kv-transfer-config.kv_role=kv_both",),
        ("--enable-return-routed-experts",),
        ("--config", "file.yaml"),
    ],
)
def test_none_that_adds_what_a_stream_does_not_tell(args: tuple[str, ...]) -> None:
    assert not known_form("0.32.0", args, chat=True) and not known_form("0.32.0", args, chat=False)


@pytest.mark.parametrize("args", [("--reasoning_parser=qwen3",), ("--enable-auto-tool-choice",)])
def test_parsers_stand_between_the_text_and_a_chat_alone(args: tuple[str, ...]) -> None:
    assert not known_form("0.32.0", args, chat=True) and known_form("0.32.0", args, chat=False)


async def test_a_server_that_only_has_the_version_may_have_any_option(tmp_path: Path) -> None:
    def supervisor(**settings: object) -> EngineSupervisor:
        told = make_settings(name="n", run_dir=tmp_path / "r", state_dir=tmp_path, **settings)
        made = EngineSupervisor(told, listener=lambda event: None)
        made.version = "0.32.0"
        return made

    assert supervisor().known_form(chat=True)
    assert not supervisor(engine_command="my-server {uds}").known_form(chat=True)
    assert not supervisor(engine_url="http://127.0.0.1:1").known_form(chat=True)
    assert not supervisor(engine_args=("--tool-call-parser", "hermes")).known_form(chat=True)
