"""What must be there before vLLM is started."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from node import model_store
from node.engine import prepare as module
from node.engine.args import option
from node.engine.failure import CannotStart, Cause
from node.engine.prepare import find_model, prepare_engine, prepare_vllm, remove_stale_socket
from node.engine.supervisor import EngineSupervisor
from node.settings import make_settings


def test_the_socket_of_a_killed_engine_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    assert path.exists()
    remove_stale_socket(path)
    assert not path.exists()
    remove_stale_socket(path)


def test_a_socket_in_use_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        with pytest.raises(CannotStart, match="another process listens"):
            remove_stale_socket(path)
        assert path.exists()


def test_a_file_in_the_way_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("mine")
    with pytest.raises(CannotStart, match="in the way"):
        remove_stale_socket(path)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("model", ["/nowhere/model", "./nowhere", "../x", "~/nowhere", "a/b/c"])
def test_a_directory_that_is_not_there_is_told_at_once(model: str) -> None:
    with pytest.raises(CannotStart, match="does not exist") as caught:
        find_model(model)
    assert (caught.value.failure.cause, caught.value.failure.permanent) == (Cause.NO_MODEL, True)


@pytest.mark.parametrize("model", ["owner/name", "name"])
def test_a_repository_is_left_to_vllm(model: str) -> None:
    assert find_model(model) == model


async def test_without_vllm_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "vllm_version", lambda: None)
    with pytest.raises(CannotStart, match=r"pip install 'vllm>=0.32") as caught:
        await prepare_vllm(make_settings(), lambda text: None)
    assert caught.value.failure.permanent


async def test_without_a_model_the_default_one_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def fetch(say: Callable[[str], None]) -> Path:
        say("downloading")
        return tmp_path

    monkeypatch.setattr(module, "vllm_version", lambda: "0.32.0")
    monkeypatch.setattr(model_store, "fetch_default_model", fetch)
    said: list[str] = []
    told = make_settings(name="n", run_dir=tmp_path / "r", state_dir=tmp_path)
    command = await prepare_vllm(told, said.append)
    assert option(command.argv, "--model") == str(tmp_path)
    assert option(command.argv, "--served-model-name") == "SmolLM2-135M-Instruct"
    assert said == ["downloading", "starting vLLM"]
    assert told.run_dir.stat().st_mode & 0o777 == 0o700


async def test_a_command_of_the_user_is_started_instead_of_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "vllm_version", lambda: None)  # none is needed
    monkeypatch.setenv("GRAPEVINE_CLUSTER_KEY", "secret")
    monkeypatch.setenv("MY_SETTING", "kept")
    given = "my-server --name 'two words' --uds {uds} --link={link}"
    told = make_settings(name="n", run_dir=tmp_path / "r", state_dir=tmp_path, engine_command=given)
    said: list[str] = []
    command = await prepare_engine(told, said.append)
    assert command.argv == (
        "my-server", "--name", "two words", "--uds", str(told.engine_socket), f"--link={told.link_socket}"
    )  # fmt: skip
    assert command.address.socket == told.engine_socket
    assert command.env["MY_SETTING"] == "kept" and "GRAPEVINE_CLUSTER_KEY" not in command.env
    assert said == ["starting my-server"]


async def test_another_server_is_not_taken_for_vllm_before_it_has_told_its_version(tmp_path: Path) -> None:
    told = make_settings(name="n", run_dir=tmp_path / "r", state_dir=tmp_path, engine_command="my-server {uds}")
    supervisor = EngineSupervisor(told, listener=lambda event: None)
    assert not supervisor.takes_token_ids
    supervisor.version = "0.32.0"
    assert supervisor.takes_token_ids
