"""Checks of this host: ports, shared memory, GPUs, versions, limits. Each is a function of `Facts`."""

from __future__ import annotations

from collections.abc import Iterator

from node.doctor.facts import Facts
from node.doctor.finding import Finding, fine, note, problem, warning
from node.settings import GIB, POOL_SHARE_OF_FREE

#: vLLM versions that the connector was made for: this one up to, not including, the next.
VLLM_FROM, VLLM_BEFORE = (0, 32), (0, 33)
#: Below this much shared memory the pool is of little use, bytes; Docker gives 64 MiB unless told otherwise.
MIN_SHM = GIB
#: A pool smaller than this share of a GPU's memory forgets what the GPU still holds.
POOL_PER_GPU = 0.5
MIN_FILES = 4096


def check_ports(facts: Facts) -> Iterator[Finding]:
    """Our ports are ours, or free for us."""
    for port in facts.ports:
        if port.state == "taken":
            mend = "stop what listens there (`ss -lntup`), or start with another --port: gossip and KV follow it"
            yield problem("ports", f"port {port.number} ({port.what}) is taken by another process", mend)
        elif port.state == "forbidden":
            yield problem(
                "ports", f"port {port.number} ({port.what}) may not be used by this user", "use one above 1023"
            )
    if facts.ports and all(port.state in ("ours", "free") for port in facts.ports):
        listed = ", ".join(f"{port.number} {port.what}" for port in facts.ports)
        yield fine("ports", f"{listed}: {'in use by the node' if facts.ports[0].state == 'ours' else 'free'}")


def check_shared_memory(facts: Facts) -> Iterator[Finding]:
    """There is room for the pool of KV blocks."""
    topic = "shared memory"
    if facts.shm_total is None or facts.shm_free is None:
        yield warning(topic, "/dev/shm is missing: the pool lies in a file", "mount a tmpfs at /dev/shm")
        return
    size = f"{facts.shm_total / GIB:.1f} GiB, {facts.shm_free / GIB:.1f} GiB free"
    if facts.shm_total < MIN_SHM:
        mend = "give the container more (`docker run --shm-size=16g`, a Memory emptyDir in Kubernetes), or use --no-kv"
        yield problem(topic, f"/dev/shm has {size}: too small for KV blocks", mend)
    elif facts.gpus and facts.shm_total * POOL_SHARE_OF_FREE < POOL_PER_GPU * _gpu_bytes(facts):
        mend = "enlarge it: `mount -o remount,size=80% /dev/shm`, or give --kv-pool-gib yourself"
        text = f"/dev/shm has {size}: the pool that a node takes of it is smaller than half of the GPUs' memory"
        yield warning(topic, text, mend)
    else:
        yield fine(topic, f"/dev/shm has {size}")


def check_gpus(facts: Facts) -> Iterator[Finding]:
    """GPUs are seen, equal, and joined by what tensor parallelism needs."""
    if facts.gpu_error:
        yield problem(
            "GPU", f"nvidia-smi fails: {facts.gpu_error}", "reinstall the driver, or restart after its update"
        )
    if not facts.gpus:
        if not facts.gpu_error:
            yield note("GPU", "no NVIDIA GPU here: the engine runs on the CPU, or elsewhere")
        return
    names = sorted({gpu.name for gpu in facts.gpus})
    memory = min(gpu.memory_mib for gpu in facts.gpus) / 1024
    yield fine("GPU", f"{len(facts.gpus)} x {', '.join(names)}, {memory:.0f} GiB each, driver {facts.gpus[0].driver}")
    if len(names) > 1:
        mend = "one node per kind of GPU (CUDA_VISIBLE_DEVICES): tensor parallelism waits for the slowest"
        yield warning("GPU", "the GPUs are of different kinds", mend)
    if facts.vllm_cpu:
        yield problem("GPU", "the installed vLLM is the CPU build: it does not use them", "pip install '.[vllm]'")
    yield from _check_links(facts)


def _check_links(facts: Facts) -> Iterator[Finding]:
    if not facts.links:
        return
    slow = {pair: link for pair, link in facts.links.items() if not link.startswith("NV")}
    if not slow:
        yield fine("GPU topology", "every pair of GPUs has NVLink: tensor parallelism pays here")
        return
    pairs = ", ".join(f"{a}-{b} {link}" for (a, b), link in sorted(slow.items())[:4])
    mend = "one replica per GPU where the model fits into one, tensor parallelism only among GPUs with NVLink"
    yield warning("GPU topology", f"{len(slow)} of {len(facts.links)} pairs have no NVLink ({pairs})", mend)


def check_versions(facts: Facts) -> Iterator[Finding]:
    """vLLM is there, and of the version that the connector was made for."""
    if facts.vllm is None:
        mend = "pip install '.[vllm]', or attach to a server that runs elsewhere with --engine-url"
        yield note("versions", f"grapevine {facts.grapevine}, Python {facts.python}, vLLM is not installed here", mend)
        return
    text = f"grapevine {facts.grapevine}, vLLM {facts.vllm}, Python {facts.python}"
    version = _version(facts.vllm)
    if version is not None and not VLLM_FROM <= version < VLLM_BEFORE:
        wanted = f"{VLLM_FROM[0]}.{VLLM_FROM[1]}"
        mend = f"install vLLM {wanted}: its interface for KV connectors changes with each minor version; or use --no-kv"
        yield warning("versions", f"{text}: the KV connector was made for {wanted}", mend)
    else:
        yield fine("versions", text)


def check_limits(facts: Facts) -> Iterator[Finding]:
    """Enough open files for the connections of a busy node."""
    if facts.max_files is not None and facts.max_files < MIN_FILES:
        mend = "raise it: `ulimit -n 65536`, LimitNOFILE= in a systemd unit"
        yield warning("limits", f"this user may open {facts.max_files} files; each request in flight takes two", mend)


def _gpu_bytes(facts: Facts) -> int:
    return sum(gpu.memory_mib for gpu in facts.gpus) * 1024 * 1024


def _version(text: str) -> tuple[int, int] | None:
    parts = text.split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) > 1 and parts[0].isdigit() and parts[1].isdigit() else None
