"""The routers and transfer libraries that benches compare with: each in a virtual environment of its own.

`scripts/bench peers install` makes them, `scripts/bench peers` shows what is there. What cannot be installed here is
named and skipped: a bench then leaves it out and says so.
"""

from __future__ import annotations

import argparse
import ctypes
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
    """One program. `packages` are for pip; `program` is a system program, used where it is at hand."""

    name: str
    packages: tuple[str, ...] = ()
    program: str = ""
    #: `packages` are all it needs for what is measured; what they say they need is left out.
    alone: bool = False
    #: A shared library of the system that it cannot be loaded without, and the Debian package that has it.
    library: tuple[str, str] = ("", "")
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
        if self.lacks:
            return False
        return self._stamp.exists() and self._stamp.read_text().strip() == " ".join(self.packages)

    @property
    def lacks(self) -> str:
        """What the system lacks for it, in words; empty when it lacks nothing."""
        library, package = self.library
        return f"no {library} on this host (Debian package {package})" if not _loadable(library) else ""

    @property
    def _stamp(self) -> Path:
        return self.venv / ".installed"

    def install(self) -> str:
        """Install it. Returns what came of it, for people."""
        if self.absent or self.program:
            return self._at_hand()
        if self.lacks:
            return f"skipped: {self.lacks}"
        if self.ready:
            return "is there"
        self.venv.parent.mkdir(parents=True, exist_ok=True)
        pip = [str(self.python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "-q"]
        pip += ["--no-deps"] * self.alone
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
        Peer(
            "mooncake", ("mooncake-transfer-engine-non-cuda==0.3.13.post1",), library=("libibverbs.so.1", "libibverbs1")
        ),
        Peer("nixl", ("nixl-cu12==1.5.1", "numpy==2.2.6"), alone=True),
        Peer("production-stack", absent="it is in no package registry, only in its repository"),
    )
}


def _loadable(library: str) -> bool:
    if not library:
        return True
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


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
    if peer.lacks:
        return peer.lacks
    return "ready" if peer.ready else f"not here ({'install ' + peer.program if peer.program else 'peers install'})"
