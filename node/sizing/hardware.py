"""GPUs by name and how they are joined. Figures of the makers' data sheets: dense rates, one direction of a link."""

from __future__ import annotations

from dataclasses import dataclass

from node.sizing.shape import SizingError

GIB = 1024**3
#: Bytes per second between two GPUs of a host over PCIe, as collectives get them; what an all-reduce costs besides.
PCIE_BYTES_S = 22e9
NVLINK_STEP_S, PCIE_STEP_S, NETWORK_STEP_S = 8e-6, 25e-6, 60e-6


@dataclass(frozen=True, slots=True)
class GpuKind:
    """One kind of GPU. Memory as the driver reports it."""

    name: str
    memory_gib: float
    #: Bytes per second of its memory, and of NVLink in one direction (0 = has none).
    bandwidth: float
    nvlink: float
    #: Floating point operations per second with 16 bits, and how many times that with 8 (1 = not natively).
    flops: float
    fp8: float = 1.0


KINDS = {
    kind.name: kind
    for kind in (
        GpuKind("T4", 15.0, 0.32e12, 0, 65e12),
        GpuKind("L4", 22.5, 0.3e12, 0, 121e12, 2),
        GpuKind("A10G", 22.5, 0.6e12, 0, 70e12),
        GpuKind("RTX3090", 24.0, 0.936e12, 0, 71e12),
        GpuKind("RTX4090", 24.0, 1.008e12, 0, 165e12, 2),
        GpuKind("A40", 45.0, 0.696e12, 0, 150e12),
        GpuKind("L40S", 45.0, 0.864e12, 0, 362e12, 2),
        GpuKind("A100-40G", 39.6, 1.555e12, 300e9, 312e12),
        GpuKind("A100", 79.3, 2.0e12, 300e9, 312e12),
        GpuKind("H100", 79.6, 3.35e12, 450e9, 989e12, 2),
        GpuKind("H100-PCIe", 79.6, 2.0e12, 0, 756e12, 2),
        GpuKind("H200", 140.4, 4.8e12, 450e9, 989e12, 2),
        GpuKind("B200", 179.0, 7.7e12, 900e9, 2250e12, 2),
        GpuKind("MI300X", 191.5, 5.3e12, 448e9, 1307e12, 2),
    )
}
#: How nvidia-smi words a kind -> its name here; the first that is found in it, so the special ones stand first.
_SMI = (
    ("H200", "H200"), ("H100 PCIe", "H100-PCIe"), ("H100", "H100"), ("B200", "B200"), ("A100-SXM4-40GB", "A100-40G"),
    ("A100-PCIE-40GB", "A100-40G"), ("A100", "A100"), ("L40S", "L40S"), ("A40", "A40"), ("A10G", "A10G"), ("L4", "L4"),
    ("RTX 4090", "RTX4090"), ("RTX 3090", "RTX3090"), ("T4", "T4"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What there is, or may be had."""

    gpu: GpuKind
    #: GPUs in one host, and hosts; 0 hosts = as many as it takes.
    per_host: int = 8
    hosts: int = 0
    #: The GPUs of a host are joined by NVLink.
    nvlink: bool = True
    #: Bits per second of the network between hosts.
    network_gbit: float = 100.0
    #: Share of a GPU's memory that vLLM takes (--gpu-memory-utilization).
    utilization: float = 0.9

    @property
    def link(self) -> float:
        """Bytes per second between two GPUs of a host."""
        return self.gpu.nvlink if self.nvlink and self.gpu.nvlink else PCIE_BYTES_S

    @property
    def joined(self) -> bool:
        """Whether NVLink joins the GPUs of a host."""
        return self.nvlink and self.gpu.nvlink > 0

    @property
    def network(self) -> float:
        """Bytes per second between hosts, as a large transfer gets them."""
        return self.network_gbit / 8 * 1e9 * 0.7


def kind_named(name: str) -> GpuKind:
    """The kind of that name, in any case. :raises SizingError: there is none."""
    found = next((kind for key, kind in KINDS.items() if key.lower() == name.lower()), None)
    if found is None:
        raise SizingError(f"--gpu {name}: not known here; use one of {', '.join(KINDS)}")
    return found


def kind_of_smi(name: str, memory_mib: int) -> GpuKind:
    """The kind that nvidia-smi calls so; its own memory wins. :raises SizingError: it is not known here."""
    for part, key in _SMI:
        if part in name:
            kind = KINDS[key]
            memory = memory_mib / 1024 or kind.memory_gib
            return GpuKind(kind.name, memory, kind.bandwidth, kind.nvlink, kind.flops, kind.fp8)
    raise SizingError(f"this host has {name}, which is not known here: name the nearest with --gpu, {', '.join(KINDS)}")
