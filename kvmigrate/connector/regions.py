"""Views of vLLM's paged KV memory in which one block is one tensor.

vLLM allocates each set of same-shaped layers as one buffer and says where layer `l`'s page of block `b` lies:
`offset + l * layer_stride + b * block_stride` (vllm/v1/kv_cache_interface.py, `KVCacheTensor`). That is enough to see
the buffer as `[blocks, layers, page bytes]` whatever the attention backend's logical shape is, so a block is copied
with one torch operation per buffer (`copies`), on CPU and on CUDA alike. Logical shape is not physical layout; only
layouts whose pages are one contiguous run of bytes are accepted (`is_block_compact`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvmigrate.errors import LocalError


class PlacedLayers(Protocol):
    """The fields of vLLM's `KVCacheTensor` that this module reads."""

    @property
    def layers(self) -> Sequence[str]: ...  # noqa: D102
    @property
    def layer_stride(self) -> int: ...  # noqa: D102
    @property
    def block_stride(self) -> int: ...  # noqa: D102
    @property
    def offset(self) -> int: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Region:
    """One buffer seen as `[blocks, layers, page bytes]` of uint8."""

    view: torch.Tensor
    offset: int  # where this buffer's part of a block starts inside a pool slot, in bytes

    @property
    def nbytes(self) -> int:
        """Bytes that this buffer contributes to one block."""
        return int(self.view.shape[1] * self.view.shape[2])


class BlockMemory:
    """Whole blocks in paged memory beside pool slots. A slot holds the regions one after another."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = tuple(regions)
        self.block_bytes = sum(region.nbytes for region in self._regions)
        self.blocks = min(int(region.view.shape[0]) for region in self._regions)
        self.device = self._regions[0].view.device

    @property
    def layout(self) -> str:
        """Physical order of a slot's bytes, for the fingerprint: `layers x page bytes` per buffer."""
        return "+".join(f"{region.view.shape[1]}x{region.view.shape[2]}" for region in self._regions)

    def parts(self, block_id: int, slot: memoryview) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of equal shape, one a region: the paged block's bytes, and where they lie in the slot."""
        whole = torch.frombuffer(slot, dtype=torch.uint8)
        for region in self._regions:
            part = whole[region.offset : region.offset + region.nbytes]
            yield region.view[block_id], part.view(region.view.shape[1:])


def map_blocks(
    kv_caches: Mapping[str, torch.Tensor], placements: Iterable[PlacedLayers], num_blocks: int
) -> BlockMemory:
    """Build the block views from the tensors that `register_kv_caches` hands over.

    Raises LocalError when a buffer cannot be seen as contiguous pages (several page runs per layer, or none).
    """
    regions: list[Region] = []
    offset = 0
    for placement in placements:
        name = next((layer for layer in placement.layers if layer in kv_caches), None)
        if name is None:
            continue
        view = _region_view(kv_caches[name], placement, num_blocks)
        regions.append(Region(view, offset))
        offset += regions[-1].nbytes
    if not regions:
        raise LocalError("the engine registered no KV cache memory: there is nothing to migrate")
    return BlockMemory(regions)


def _region_view(cache: torch.Tensor, placement: PlacedLayers, num_blocks: int) -> torch.Tensor:
    layers = len(placement.layers)
    layer_outermost = placement.layer_stride >= num_blocks * placement.block_stride
    page = placement.block_stride if layer_outermost else placement.layer_stride
    if layer_outermost and placement.layer_stride != num_blocks * placement.block_stride:
        raise LocalError("the KV cache keeps more than one run of bytes per layer and block (layout LHBNC)")
    raw = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
    shape = (num_blocks, layers, page)
    strides = (placement.block_stride, placement.layer_stride, 1)
    last = placement.offset + (num_blocks - 1) * strides[0] + (layers - 1) * strides[1] + page
    if page <= 0 or last > raw.numel():
        raise LocalError(f"the KV cache buffer has {raw.numel()} bytes but its placement needs {last}")
    return raw.as_strided(shape, strides, placement.offset)
