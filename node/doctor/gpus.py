"""The GPUs of this host, asked of nvidia-smi. Nothing is changed, and it has a deadline."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping

from node.doctor import nvidia
from node.doctor.facts import Gpu

#: The longest that nvidia-smi may take, seconds.
SMI_S = 15.0


def joined(links: Mapping[tuple[int, int], str]) -> bool:
    """Whether NVLink joins every pair of them."""
    return bool(links) and all(link.startswith("NV") for link in links.values())


def find_gpus() -> tuple[tuple[Gpu, ...], Mapping[tuple[int, int], str], str]:
    """The GPUs of this host, their links, and why nvidia-smi told nothing (empty where there is none)."""
    if shutil.which("nvidia-smi") is None:
        return (), {}, ""
    query = "--query-gpu=index,name,memory.total,driver_version"
    try:
        listed = _run("nvidia-smi", query, "--format=csv,noheader,nounits")
        gpus = nvidia.parse_gpus(listed)
        topology = _run("nvidia-smi", "topo", "-m") if len(gpus) > 1 else ""
    except subprocess.CalledProcessError as error:
        return (), {}, (error.stdout or error.stderr or str(error)).strip().splitlines()[0][:200]
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return (), {}, str(error)[:200]
    return gpus, nvidia.parse_topology(topology), ""


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=SMI_S, check=True).stdout
