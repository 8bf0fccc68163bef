"""The routers that benches compare with: each in a virtual environment of its own, below the cache directory.

`scripts/bench peers install` makes them, `scripts/bench peers` shows what is there. What cannot be installed here is
named and skipped: a bench then leaves it out and says so.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benches.result import say
from node.dirs import default_cache_dir

#: Seconds that one installation may take.
INSTALL_S = 900


@dataclass(frozen=True, slots=True)
class Peer:
    """One router. `packages` are for pip; `program` is a system program, used where it is at hand."""

    name: str
    packages: tuple[str, ...] = ()
    program: str = ""
    #: Why it cannot be had from a package registry.
    absent: str = ""

    @property
    def venv(self) -> Path:
        """Its virtual environment."""
        return default_cache_dir() / "peers" / self.name

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.venv / "bin" / "python"

    @property
    def ready(self) -> bool:
        """Whether it can be started."""
        if self.program:
            return shutil.which(self.program) is not None
        return self._stamp.exists() and self._stamp.read_text().strip() == " ".join(self.packages)

    @property
    def _stamp(self) -> Path:
        return self.venv / ".installed"

    def install(self) -> str:
        """Install it. Returns what came of it, for people."""
        if self.absent or self.program:
            return self._at_hand()
        if self.ready:
            return "is there"
        self.venv.parent.mkdir(parents=True, exist_ok=True)
        pip = [str(self.python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "-q"]
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(self.venv)], check=True, capture_output=True)
            subprocess.run([*pip, *self.packages], check=True, capture_output=True, text=True, timeout=INSTALL_S)
        except subprocess.TimeoutExpired:
            return f"skipped: not installed within {INSTALL_S} s"
        except (OSError, subprocess.CalledProcessError) as error:
            told = str(getattr(error, "stderr", "") or error).strip().splitlines()
            return f"skipped: {told[-1] if told else error}"
        self._stamp.write_text(" ".join(self.packages) + "\n")
        return "installed"

    def _at_hand(self) -> str:
        if self.absent:
            return f"skipped: {self.absent}"
        return "is there" if self.ready else f"skipped: no {self.program} on this host (a package of the system)"


PEERS = {
    peer.name: peer
    for peer in (
        Peer("haproxy", program="haproxy"),
        Peer("nginx", program="nginx"),
        Peer("sglang", ("sglang-router==0.3.2",)),
        Peer("smg", ("smg==1.13.0",)),
        Peer("vllm-router", ("vllm-router==0.1.17",)),
        Peer("litellm", ("litellm[proxy]==1.108.7",)),
        Peer("production-stack", absent="it is in no package registry, only in its repository"),
    )
}


def main(arguments: Sequence[str]) -> int:
    """`scripts/bench peers [install]`."""
    parser = argparse.ArgumentParser(prog="scripts/bench peers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("action", nargs="?", choices=("show", "install"), default="show")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these of {', '.join(PEERS)}")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in PEERS]
    if unknown:
        parser.error(f"no peer is called {', '.join(unknown)}: there are {', '.join(PEERS)}")
    for name in options.names or PEERS:
        peer = PEERS[name]
        told = peer.install() if options.action == "install" else _state(peer)
        say(f"  {name:18} {told}")
    return 0


def _state(peer: Peer) -> str:
    if peer.absent:
        return f"not to be had: {peer.absent}"
    return "ready" if peer.ready else f"not here ({'install ' + peer.program if peer.program else 'peers install'})"
