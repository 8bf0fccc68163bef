"""The file of clients, and the command that writes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from node.cli.clients import clients
from node.clients import Access, Limits, file
from node.errors import SettingsError
from node.settings import make_settings

DIGEST = file.digest_of("k" * 16)


def run(*words: str | Path, code: int = 0) -> Result:
    result = CliRunner().invoke(clients, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result


def test_lines_are_names_keys_and_limits() -> None:
    lines = [
        "# who may ask",
        "",
        f"chat  sha256:{DIGEST.hex()}  max-running=3 tokens-per-minute=500",
        "batch another-key-in-clear  requests-per-minute=7",
        "chat  the-next-key-of-chat",
    ]
    chat, batch, again = file.parse(lines, "f")
    assert (chat.name, chat.digest, chat.limits) == ("chat", DIGEST, Limits(running=3, tokens_per_minute=500))
    assert (batch.digest, batch.limits) == (file.digest_of("another-key-in-clear"), Limits(requests_per_minute=7))
    assert again.name == "chat" and again.limits == Limits()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["a/b " + "k" * 16], "line 1: a name has"),
        (["", "a"], "line 2: a has no key"),
        (["a short"], "16 to 256"),
        (["a sha256:12"], "64 hexadecimal"),
        (["a " + "k" * 16 + " max-runing=1"], "is no limit"),
        (["a " + "k" * 16 + " max-running=1 max-running=2"], "there twice"),
        (["a " + "k" * 16 + " max-running=0"], "whole number"),
        (["a " + "k" * 16 + " max-running=1_0"], "whole number"),
        (["api-key-1 " + "k" * 16], "--api-key"),
        (["a " + "k" * 16, "b " + "k" * 16], "two lines"),
        (["a " + "k" * 16 + " max-running=1", "a " + "l" * 16 + " max-running=2"], "different limits"),
        ([f"a {n:016}" for n in range(file.MAX_KEYS + 1)], "more than 8 keys"),
        ([f"a{n} {n:016}" for n in range(file.MAX_CLIENTS + 1)], "at most 1000 clients"),
    ],
)
def test_a_wrong_line_is_told_without_its_key(lines: list[str], words: str) -> None:
    with pytest.raises(SettingsError) as error:
        file.parse(lines, "f")
    assert words in str(error.value) and "kkkk" not in str(error.value)


@given(st.lists(st.text(max_size=60), max_size=6))
def test_any_text_is_read_or_refused(lines: list[str]) -> None:
    try:
        entries = file.parse(lines, "f")
    except SettingsError:
        return
    assert file.parse(map(file.line_of, entries), "f") == entries


def test_a_key_is_made_shown_once_and_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "clients"
    first = run("add", "--file", path, "chat", "--max-running", "4").output.strip()
    path.write_text("# mine\n" + path.read_text())
    second = run("add", "--file", path, "chat").output.strip()
    run("add", "--file", path, "other")
    assert path.stat().st_mode & 0o777 == 0o600 and first not in path.read_text()
    listed = json.loads(run("list", "--file", path, "--json").output)
    assert listed == {"chat": {"keys": 2, "max-running": 4}, "other": {"keys": 1}}
    assert "chat  keys=2  max-running=4" in run("list", "--file", path).output

    access = Access(make_settings(clients_file=str(path)), lambda: 0.0)
    access.load()
    one, two = access.find(first), access.find(second)
    assert one is not None and one is two and one.limits == Limits(running=4)

    run("remove", "--file", path, "chat", "--but-newest")
    access.load()
    assert access.find(first) is None and access.find(second) is one and one.limits == Limits(running=4)
    run("remove", "--file", path, "chat")
    access.load()
    assert access.find(second) is None and path.read_text().startswith("# mine\nother ")
    assert "no client chat" in run("remove", "--file", path, "chat", code=1).output
    assert "is no limit" not in run("add", "--file", path, "no/name", code=1).output


def test_a_file_with_a_fault_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "clients"
    path.write_text("a " + "k" * 16 + "\n")
    access = Access(make_settings(clients_file=str(path), api_key=("s",)), lambda: 0.0)
    access.load()
    before = access.find("k" * 16)
    for wrong in ("a k\n", "\0\xff", "#" * (file.MAX_BYTES + 1)):
        path.write_text(wrong, "latin-1")
        with pytest.raises(SettingsError):
            access.load()
        assert access.find("k" * 16) is before is not None
    path.unlink()
    with pytest.raises(SettingsError, match="cannot be read"):
        access.load()
    own = access.find("s")
    assert own is not None and own.name == "api-key-1" and access.find("") is None


def test_no_more_series_than_clients_and_none_of_a_client_that_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "clients"
    path.write_text("a " + "k" * 16 + "\nb " + "l" * 16 + "\n")
    access = Access(make_settings(clients_file=str(path)), lambda: 0.0)
    access.load()

    def named() -> set[str]:
        return {s.labels["client"] for metric in access.collect() for s in metric.samples if s.labels}

    assert named() == {"a", "b"}
    path.write_text("b " + "l" * 16 + "\n")
    access.load()
    assert named() == {"b"}
