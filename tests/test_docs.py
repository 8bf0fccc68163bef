"""The documents are true: every command in them runs, every option, link, path and setting that they name is there."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import pytest
import settings_page
from benches import __main__ as benches
from chaos_run.engines import GRAPEVINE
from localcluster import free_ports

from node.addresses import GOSSIP_OFFSET
from node.cli import main
from node.cli.options import read_config, split_arguments
from node.cli.start import start
from node.settings import make_settings
from tests.documents import PAGES, ROOT, anchors, commands, examples, inline, links
from tests.node.sizing.published import CASES, LLAMA_70B

#: Seconds for a command, and for a node to serve: far beyond what it takes, for a machine that is busy elsewhere.
LIMIT_S = 300.0
MODEL = "demo"
TOKEN = "docs"
#: Commands that are not run here, each with where its work is done, or why nowhere.
NOT_HERE = {
    "scripts/quickstart": "starts three real engines; tests/e2e runs the same cluster on the same engines",
    "scripts/test": "runs this",
    "scripts/test tests/gossip -x": "runs what runs this",
    "scripts/test tests/node/http/test_cors.py": "runs what runs this",
    "python3 -m venv ~/grapevine && . ~/grapevine/bin/activate": "tests/ecosystem/test_wheel.py makes such a one",
    "GRAPEVINE_COMPILE=1 pip install '.[vllm]'": "the same; tests/ecosystem/test_compiled.py builds that wheel",
    "GRAPEVINE_COMPILE=1 scripts/bench gossip --nodes 100 --only rows --json": "a measurement; it compiles first",
    "pip install '.[vllm]'": "gigabytes for GPUs; tests/ecosystem/test_wheel.py installs the same without vLLM",
    "scripts/chaos": "a minute of load; tests/chaos/test_run.py runs a shorter one",
    "scripts/chaos --minutes 1": "a minute of load; tests/chaos/test_run.py runs a shorter one",
    "scripts/chaos --nodes 12 --minutes 10 --seed 1 --json": "ten minutes; its options are looked at below",
    "scripts/chaos --rolling --nodes 5": "minutes; its options are looked at below",
    "scripts/chaos --engines real --nodes 3 --minutes 10": "ten minutes; its options are looked at below",
    "grapevine emulate --profile mine.json": "what bench fit has written; tests/node/emulator/test_profile.py has one",
    "pip install 'vllm-grapevine[otel]'": "no such package is published; requirements/ pins what the extra names",
    "scripts/bench route --quick": "a measurement; its options are looked at below",
}
#: Beginnings of commands that are too long for a line here.
NOT_HERE_BEGINS = {
    "scripts/bench fit --engine http://HOST:8000": "needs a real engine; its options are looked at below",
    "grapevine start --otlp-traces-endpoint http://collector:4318 ...": "has its own arguments left out",
}
#: Commands that run until they are stopped, with what they say or serve when they are up.
UNTIL_STOPPED = {
    "grapevine top": "demo",
    "grapevine top --interval 10": "demo",
    "grapevine emulate --preset 8b-gpu --served-model-name demo --port 8000": "listens at",
    "grapevine emulate --coarse 8": "listens at",
    "grapevine emulate --preset smollm2-cpu --uds /tmp/e.sock --speedup 10": "listens at unix:",
    "grapevine emulate --port 8001 --link-socket RUN_DIR/NAME.link": "listens at",
    "grapevine start --engine-url http://127.0.0.1:8000": "grapevine node",
    "grapevine start --host 0.0.0.0 --model Qwen/Qwen3-8B": "  join     grapevine start --host 0.0.0.0 --join",
    "grapevine start --host 0.0.0.0 --model Qwen/Qwen3-8B --join host-a:18100": "grapevine node",
}
#: Commands that end with another status than 0 on a host such as this.
STATUS = {
    "grapevine plan --parameters 32 --requests 5 --prompt 2000 --output 300 --gpu here": {0, 1, 2},  # no GPU here: 2
    "grapevine plan --parameters 32 --requests 5 --prompt 2000 --output 300 --gpu cluster": {0, 1, 2},
    "grapevine doctor": {0, 1},  # what this host is like is its own affair
    "grapevine doctor --port 9000": {0, 1},
}
#: Blocks that look like none of the kinds and are none: the first words of each.
TEXTS = ("1. A streamed chat", "# name   key ", '{"time":', "host-a is drained")


@dataclass(slots=True)
class Lab:
    """Two nodes of this host with emulated engines, and a shell in which `grapevine` is ours."""

    folder: Path
    ports: list[int]
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """What the user has set."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GRAPEVINE_")}
        own = {
            "HOME": self.folder,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "GRAPEVINE_STATE_DIR": self.folder / "state",
            "GRAPEVINE_RUN_DIR": self.folder / "run",
            "GRAPEVINE_ADMIN_TOKEN": TOKEN,
            "GRAPEVINE_CLUSTER_KEY": "a key for the documents",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}",
            "TERM": "xterm",
        }
        return kept | {name: str(value) for name, value in own.items()}

    def url(self, index: int = 0) -> str:
        return f"http://127.0.0.1:{self.ports[index]}"

    def start(self) -> None:
        """Both, the second joined to the first; returns when each sees both."""
        (self.folder / "bin").mkdir()
        program = self.folder / "bin" / "grapevine"
        program.write_text(f'#!/bin/sh\nexec {shlex.join(GRAPEVINE)} "$@"\n')
        program.chmod(0o755)
        checkpoint = self.folder / "models" / "Llama-3.3-70B-Instruct"
        checkpoint.mkdir(parents=True)
        (checkpoint / "config.json").write_text(json.dumps(LLAMA_70B))
        for name, port in zip("ab", self.ports, strict=True):
            engine = f"grapevine emulate --served-model-name {MODEL} --speedup 20 --uds {{uds}} --link-socket {{link}}"
            words = [
                "grapevine", "start", "--name", name, "--port", str(port), "--no-mdns", "--kv-pool-gib", "0.01",
                "--join", f"127.0.0.1:{self.ports[0] + GOSSIP_OFFSET}", "--engine-command", engine,
            ]  # fmt: skip
            with (self.folder / f"{name}.log").open("wb") as log:
                self.nodes.append(
                    subprocess.Popen(words, stdout=log, stderr=log, env=self.environment, start_new_session=True)
                )
        wait(lambda: all(self.serving(index) == ["a", "b"] for index in (0, 1)), self.told)

    def serving(self, index: int) -> list[str]:
        with contextlib.suppress(OSError, ValueError):
            return sorted(fetch(self.url(index) + "/readyz")["nodes"])
        return []

    def told(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in self.folder.glob("*.log"))

    def here(self, command: str) -> str:
        """A command of the documents with their names for hosts, nodes and files put as they are here."""
        for old, new in self._names(command).items():
            command = command.replace(old, new)
        return command

    def _names(self, command: str) -> Mapping[str, str]:
        # The key that nothing is sealed with: the new one before `use`, the old one after it.
        idle = self._idle_key() if "_ID" in command else ""
        return {
            "host-a:18100": f"127.0.0.1:{self.ports[0] + GOSSIP_OFFSET}",
            "http://host-b:8100": self.url(1),
            "http://127.0.0.1:8000": self.url(1),
            "--port 8000": "--port 0",
            "--port 8001": "--port 0",
            "/tmp/e.sock": str(self.folder / "e.sock"),
            "RUN_DIR/NAME": str(self.folder / "run" / "nobody"),
            "Qwen/Qwen3-8B": MODEL,
            "NEW_ID": idle,
            "OLD_ID": idle,
            "--from NODE": "--from b",
        }

    def _idle_key(self) -> str:
        done = self.run("grapevine keys list --json")
        (ring,) = json.loads(done.stdout).values()
        (idle,) = (key["id"] for key in ring if not key["seals"])
        return str(idle)

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Type it."""
        return subprocess.run(
            ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, timeout=LIMIT_S, check=False,
            env=self.environment, cwd=ROOT, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def until(self, command: str, seen: str) -> None:
        """Type it, wait until it says something, end it with Ctrl-C; it ends well."""
        if command.startswith("grapevine start"):
            (port,) = free_ports(1)
            command = command.replace(f" --model {MODEL}", "")
            command += f" --name guest --port {port} --no-mdns --no-kv"
            if "--engine-url" not in command:
                command += f" --engine-url {self.url(1)}"
        screen = Screen()
        process = subprocess.Popen(
            # Whoever starts the tests in the background has them ignore Ctrl-C, and all that they start.
            ["env", "--default-signal=INT", "bash", "-c", f"exec {command}"],
            stdin=screen.theirs, stdout=screen.theirs, stderr=screen.theirs,
            env=self.environment, start_new_session=True,
        )  # fmt: skip
        try:
            wait(lambda: seen in screen.text() or process.poll() is not None, self.told)
            assert seen in screen.text(), screen.text()
            process.send_signal(signal.SIGINT)
            wait(lambda: screen.text() != "" and process.poll() is not None, screen.text)
            assert process.returncode in (0, 130), screen.text()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            screen.close()

    def close(self) -> None:
        for node in self.nodes:
            node.terminate()
        for node in self.nodes:
            try:
                node.wait(LIMIT_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(node.pid, signal.SIGKILL)


class Screen:
    """A terminal of 140 columns, and what was written to it."""

    def __init__(self) -> None:
        self._ours, self.theirs = pty.openpty()
        os.set_blocking(self._ours, False)
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 140, 0, 0))
        self._seen = b""

    def text(self) -> str:
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self._ours, 65_536):
                self._seen += piece
        return self._seen.decode(errors="replace")

    def close(self) -> None:
        os.close(self._ours)
        os.close(self.theirs)


def fetch(url: str) -> Any:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10) as answer:
        return json.loads(answer.read())


def wait(condition: Callable[[], bool], told: Callable[[], str]) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < LIMIT_S, told()
        time.sleep(0.1)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    # A short path: sockets lie in it.
    with tempfile.TemporaryDirectory(prefix="gv-") as folder:
        made = Lab(Path(folder), free_ports(2))
        try:
            made.start()
            yield made
        finally:
            made.close()


COMMANDS = commands()
RUN_HERE = dict.fromkeys(
    text
    for _, text in COMMANDS
    if text not in NOT_HERE and text not in UNTIL_STOPPED and not text.startswith(("for ", *NOT_HERE_BEGINS))
)


@pytest.mark.parametrize("text", RUN_HERE)
def test_a_command_runs_as_it_stands_there(lab: Lab, text: str) -> None:
    for program in ("zsh", "fish", "jq", "openssl"):
        if re.search(rf"\b{program}\b", text) and shutil.which(program) is None:
            pytest.skip(f"{program} is not installed here")
    done = lab.run(lab.here(text))
    assert done.returncode in STATUS.get(text, {0}), (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    if text.endswith("--json"):
        json.loads(done.stdout)


@pytest.mark.parametrize("text", sorted({text for _, text in COMMANDS if text in UNTIL_STOPPED}))
def test_a_command_that_stays_comes_up_and_ends_well(lab: Lab, text: str) -> None:
    lab.until(lab.here(text), UNTIL_STOPPED[text])


def test_every_list_of_commands_names_only_commands_that_are_there() -> None:
    texts = {text for _, text in COMMANDS}
    assert [text for text in (*NOT_HERE, *UNTIL_STOPPED, *STATUS) if text not in texts] == []
    strange = [one.text[:60] for one in examples() if not one.kind and not one.is_commands]
    assert [text for text in strange if not text.startswith(TEXTS)] == []


def test_loops_are_good_shell() -> None:
    for page, text in COMMANDS:
        if text.startswith("for "):
            done = subprocess.run(["bash", "-n", "-c", text], capture_output=True, text=True, check=False)
            assert done.returncode == 0, (page, done.stderr)


@pytest.mark.parametrize("text", [one.text for one in examples() if one.kind == "python"])
def test_python_that_is_shown_runs_against_a_node(lab: Lab, text: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", lab.here(text)], capture_output=True, text=True, timeout=LIMIT_S, check=False,
        env=lab.environment,
    )  # fmt: skip
    assert done.returncode == 0 and "ChatCompletion" in done.stdout, done.stderr


@pytest.mark.parametrize("text", [one.text for one in examples() if one.kind == "toml"])
def test_a_file_that_is_shown_can_be_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "grapevine.toml").write_text(text)
    params = start.make_context("start", ["--config", str(tmp_path / "grapevine.toml")]).params
    assert make_settings(**params).engine_args[0] == "--tensor-parallel-size"
    assert read_config(tmp_path / "grapevine.toml")


def messages() -> Iterator[tuple[Path, str]]:
    """What the program itself tells people to type, in its messages and in its help."""
    for path in sorted((ROOT / "node").rglob("*.py")):
        source = path.read_text()
        joined = re.sub(r'"\s*\n\s*f?"', "", source)  # a message goes on in the next line
        for text in re.findall(r"`(grapevine [^`]+)`", joined):
            yield path, re.sub(r"\s+", " ", re.sub(r"\{[^}]*\}", "X", text))


def named_commands() -> Iterator[tuple[Path, str]]:
    """Commands of `grapevine` within lines, those between fences, and those in what the program says."""
    for page, text in [*((one, text) for one in PAGES for text in inline(one)), *messages()]:
        if text.startswith("grapevine ") and not re.match(r"grapevine (COMMAND|_)|grapevine \S+ \.\.\.", text):
            yield page, text
    for name, text in COMMANDS:
        if text.startswith("grapevine "):
            yield ROOT / name, text


def test_every_command_and_option_that_is_named_is_there() -> None:
    missing = []
    for page, text in named_commands():
        words = shlex.split(text.split(" | ")[0])[1:]
        if words[0] == "start":
            words = ["start", *split_arguments(words[1:])[0]]
        command: click.Command | None = main
        known = set(main.params)
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            alternatives = words.pop(0).split("/")
            found = [command.get_command(click.Context(command), name) for name in alternatives]
            missing += [f"{page.name}: {text}"] if None in found else []
            command = found[0]
            known |= set(command.params) if command is not None else set()
        options = {flag for one in known for flag in (*one.opts, *one.secondary_opts)} | {"--help"}
        used = {word.split("=")[0] for word in words if word.startswith("--")}
        missing += [f"{page.name}: {text}: {flag}" for flag in sorted(used - options)]
    assert missing == []


def named_scripts() -> Iterator[tuple[str, list[str]]]:
    for text in [text for page in PAGES for text in inline(page)] + [text for _, text in COMMANDS]:
        command = re.sub(r"^[A-Z_]+=\S+ ", "", text)
        if command.startswith("scripts/"):
            path, *words = shlex.split(command)
            yield path, words


def test_every_script_that_is_named_is_there_and_has_the_options() -> None:
    parser = benches._parser(benches.bench_names())
    for path, words in named_scripts():
        assert (ROOT / path).exists(), path
        if path == "scripts/bench" and words and words[0] not in ("NAME", "peers", "all"):
            try:
                parser.parse_args([word.replace("FILE", "x") for word in words])
            except SystemExit:
                pytest.fail(f"no such bench or option: {shlex.join([path, *words])}")
    chaos = subprocess.run(
        [sys.executable, "-m", "chaos_run", "--help"], capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}", "CHAOS_INSIDE": "1"},
    )  # fmt: skip
    used = {word for path, words in named_scripts() if path == "scripts/chaos" for word in words if word[:2] == "--"}
    assert [flag for flag in sorted(used) if flag not in chaos.stdout] == []


def test_every_link_leads_somewhere() -> None:
    dead = []
    for page in PAGES:
        for target in links(page):
            path, _, anchor = target.partition("#")
            meant = (page.parent / path).resolve() if path else page
            if not meant.exists() or (anchor and anchor not in anchors(meant)):
                dead.append(f"{page.name}: {target}")
    assert dead == []


def test_every_file_that_is_named_is_there() -> None:
    """Paths of this repository between backquotes: `node/decide.py`, `tests/e2e/`."""
    gone = []
    for page in PAGES:
        for text in inline(page):
            path = text.split()[0].rstrip("/").partition("::")[0]
            if re.fullmatch(r"(node|gossip|kvmigrate|scripts|tests|deploy|docs|requirements)/[\w./-]+", path):
                gone += [f"{page.name}: {text}"] if not (ROOT / path).exists() else []
    assert gone == []


def test_the_configuration_page_is_made_of_the_settings() -> None:
    told = "docs/configuration.md is not that of node/settings.py: run `python scripts/settings_page.py`"
    assert settings_page.PAGE.read_text() == settings_page.page(), told


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    listed = {target.partition("#")[0] for target in links(index)}
    assert [page.name for page in PAGES[2:] if page != index and page.name not in listed] == []


def test_every_published_deployment_is_in_the_page_about_sizing() -> None:
    text = (ROOT / "docs" / "sizing.md").read_text()
    assert [case.title for case in CASES if case.source not in text] == []
