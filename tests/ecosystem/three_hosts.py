"""Three hosts with a node each, joined as README says: `python -m tests.ecosystem.three_hosts (join | zeroconf)`.

Each host is a network namespace with an own host name, on one switch. The nodes are `grapevine start` as a user types
it, with an emulated engine each; the second and third are started by what the first one printed, or find it by
multicast DNS. Prints what was seen as JSON. Exit status: 0 seen; 1 not; 77 this machine does not permit namespaces (the
reason is told).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos_run import network
from chaos_run.engines import GRAPEVINE

NOT_PERMITTED = 77
HOSTS = ("host-a", "host-b", "host-c")
#: Seconds for the nodes to know each other, and to notice a death; on a machine that is busy elsewhere.
PATIENCE_S = 90.0
LOOK_S = 0.2
ENGINE = (
    "--engine-command",
    f"{shlex.join(GRAPEVINE)} emulate --served-model-name demo --uds {{uds}} --link-socket {{link}}",
    "--kv-pool-gib",
    "0.01",
)


@dataclass(slots=True)
class Host:
    """One host and the node on it."""

    number: int
    name: str
    world: network.Network
    folder: Path
    node: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where its node answers."""
        return f"http://{self.world.host(self.number)}:8100"

    @property
    def log(self) -> Path:
        """What its node has said."""
        return self.folder / f"{self.name}.log"

    def command(self, words: list[str]) -> list[str]:
        """A command as it is typed on this host."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name]
        return [*self.world.prefix(self.number), *named, *GRAPEVINE, *words]

    def environment(self) -> dict[str, str]:
        """What its user has set."""
        own = {"GRAPEVINE_STATE_DIR": self.folder / self.name, "GRAPEVINE_RUN_DIR": self.folder / f"run-{self.name}"}
        return {**os.environ, **{name: str(path) for name, path in own.items()}, "GRAPEVINE_CLUSTER_KEY": "k" * 32}

    def start(self, words: list[str]) -> None:
        """Start its node by what stands after `grapevine`."""
        with self.log.open("wb") as log:
            self.node = subprocess.Popen(
                self.command([*words, *ENGINE]), stdout=log, stderr=log, env=self.environment(), start_new_session=True
            )

    def grapevine(self, *words: str) -> Any:
        """The JSON answer of another command on this host."""
        done = subprocess.run(
            self.command([*words, "--json"]),
            capture_output=True,
            env=self.environment(),
            timeout=PATIENCE_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{self.name}: grapevine {' '.join(words)}: {done.stderr.decode()[-500:]}")
        return json.loads(done.stdout)

    def ask(self, path: str, body: object = None, headers: dict[str, str] | None = None) -> tuple[Any, dict[str, str]]:
        """An answer of its node over HTTP, with its headers."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **(headers or {})})
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
            return json.loads(answer.read()), {name.lower(): value for name, value in answer.headers.items()}

    def serving(self) -> list[str]:
        """Whom its node would send requests to; nobody when it does not answer."""
        with contextlib.suppress(OSError, ValueError):
            return sorted(self.ask("/readyz")[0]["nodes"])
        return []

    def end(self) -> None:
        """Kill its node and all that it started."""
        if self.node is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.node.pid, 9)
            self.node.wait()


def join_command(host: Host) -> list[str]:
    """What stands after `grapevine` in the command that a node prints for other hosts."""
    wait(lambda: "  join " in host.log.read_text(), f"{host.name} prints how to join it", [host])
    found = re.search(r"^ +join +grapevine (.*?) {4,}", host.log.read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"no command to join in:\n{host.log.read_text()}")
    return shlex.split(found[1])


def wait(condition: Callable[[], bool], what: str, hosts: list[Host]) -> float:
    """Seconds until it holds. Raises `RuntimeError` with the last lines of all nodes."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > PATIENCE_S:
            tails = "\n".join(f"--- {host.name}\n{host.log.read_text()[-1500:]}" for host in hosts)
            raise RuntimeError(f"never seen: {what}\n{tails}")
        time.sleep(LOOK_S)
    return time.monotonic() - began


def story(hosts: list[Host], how: str) -> dict[str, Any]:
    """Start the three, send requests through each, let one die. What was seen."""
    first, *others = hosts
    first.start(["start", "--host", "0.0.0.0"])
    words = join_command(first) if how == "join" else ["start", "--host", "0.0.0.0"]
    for host in others:
        host.start(words)
    names = [f"{host.name}-8100" for host in hosts]
    known_s = wait(lambda: all(host.serving() == names for host in hosts), "each knows all", hosts)
    forwarded = {}
    for entry in hosts:
        for target in names:
            body = {"model": "demo", "prompt": "Hello", "max_tokens": 4}
            told, headers = entry.ask("/v1/completions", body, {"x-grapevine-force-target": target})
            forwarded[f"{entry.name} to {target}"] = [headers["x-grapevine-target"], told["choices"][0]["text"]]
    members = {host.name: host.grapevine("members")["members"] for host in hosts}
    problems = [
        one["text"] for one in hosts[1].grapevine("doctor", "--no-mdns")["findings"] if one["grade"] == "problem"
    ]
    hosts[2].end()
    gone_s = wait(lambda: all(host.serving() == names[:2] for host in hosts[:2]), "the death is known", hosts)
    answered = hosts[0].ask("/v1/completions", {"model": "demo", "prompt": "Hello", "max_tokens": 4})[0]
    return {
        "joined_by": " ".join(words),
        "names": names,
        "forwarded": forwarded,
        "addresses": {name: sorted(member["http"] for member in seen) for name, seen in members.items()},
        "problems": problems,
        "known_s": round(known_s, 1),
        "gone_s": round(gone_s, 1),
        "answered_after": answered["choices"][0]["text"],
    }


@contextlib.contextmanager
def three_hosts() -> Iterator[list[Host]]:
    """The hosts, inside our own namespaces."""
    world = network.Namespaces(len(HOSTS))
    folder = Path(tempfile.mkdtemp(prefix="gv3-", dir="/tmp"))
    hosts = [Host(number, name, world, folder) for number, name in enumerate(HOSTS)]
    try:
        yield hosts
    finally:
        for host in hosts:
            host.end()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Run the story."""
    if not os.environ.get(network.INSIDE):
        why_not = network.enter(["-m", "tests.ecosystem.three_hosts", *sys.argv[1:]])
        print(why_not, file=sys.stderr)
        return NOT_PERMITTED
    try:
        with three_hosts() as hosts:
            print(json.dumps(story(hosts, sys.argv[1])))
    except (RuntimeError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
