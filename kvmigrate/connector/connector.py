"""The vLLM connector: vLLM's interface on one side, the two halves on the other.

vLLM builds one instance with role SCHEDULER in the engine core and one with role WORKER in every worker process
(vllm/distributed/kv_transfer/kv_connector/v1/base.py, vLLM 0.32). This file only translates; the decisions are in
`scheduler.py`, the copies in `worker.py`. An engine that cannot take part (see `identity.refusal`) is served by the
same class doing nothing: it says so once in the log and to the node, and goes on.
"""

import logging
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.platforms import current_platform
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvmigrate.connector import identity
from kvmigrate.connector.metadata import BlockSave, LoadJob
from kvmigrate.connector.pins import Pins
from kvmigrate.connector.sides import SchedulerSide, WorkerSide

logger = logging.getLogger("vllm.grapevine")

LINK_OPTION = "link"
"""Key in `kv_connector_extra_config`: path of the node's Unix socket."""

warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
# torch warns about every tensor over read-only memory; the load thread's map is read-only on purpose.


@dataclass(slots=True)
class StepPlan(KVConnectorMetadata):  # type: ignore[misc]  # vLLM ships no types for its base class
    """Loads to start and saves to make in one engine step; vLLM pickles it from the engine core to every worker."""

    step: int = 0
    idle: bool = False  #: nothing is computed in this step
    loads: list[LoadJob] = field(default_factory=list)
    saves: list[BlockSave] = field(default_factory=list)


@dataclass(slots=True)
class SavesDone(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM ships no types for its base class
    """How many workers are done with the saves of each step; vLLM adds the workers' up for the scheduler half."""

    workers: dict[int, int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Add another worker's."""
        assert isinstance(other, SavesDone)
        return SavesDone(dict(Counter(self.workers) + Counter(other.workers)))


class GrapevineConnector(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM ships no types for its base class
    """Loads KV blocks from the node's pool and saves finished blocks into it."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._why_not = identity.refusal(vllm_config, kv_cache_config)
        self._link_path = str((self._kv_transfer_config.kv_connector_extra_config or {}).get(LINK_OPTION, ""))
        if not self._link_path:
            self._why_not = f"kv_connector_extra_config has no {LINK_OPTION!r}: the node that owns the pool is unknown"
        self._ranks = int(vllm_config.parallel_config.tensor_parallel_size)
        self._block_size = identity.block_size_of(vllm_config, kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._pins: Pins | None = None
        if self._why_not and role == KVConnectorRole.SCHEDULER:
            logger.warning("KV migration is off for this engine: %s. It serves without.", self._why_not)
        if role == KVConnectorRole.SCHEDULER and self._link_path:
            self._scheduler = SchedulerSide(self._link_path, self._block_size, self._ranks, self._why_not)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a lost save is a later cache miss, so preempted requests need no special care."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Pages must be contiguous runs of bytes; MLA has a layout of its own."""
        return None if vllm_config.model_config.use_mla else "LBHNC"

    # --- scheduler half -------------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Saves from a GPU go on beside later steps: their blocks are held until then."""
        if self._scheduler is not None and not current_platform.is_cpu():
            self._pins = Pins(gpu_block_pool, self._ranks)

    def has_pending_block_frees(self) -> bool:
        """Blocks come free by themselves when saves end: nobody needs to be preempted for them."""
        return bool(self._pins)

    def has_pending_push_work(self) -> bool:
        """An engine without requests goes on stepping until its saves are reported."""
        return bool(self._pins)

    def on_new_request(self, request: Any) -> None:
        """See SchedulerHalf.on_new_request."""
        if self._scheduler is not None:
            self._scheduler.half.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See SchedulerHalf.matched."""
        if self._scheduler is None or self._why_not:
            return 0, False
        self._scheduler.feed.poll()
        return self._scheduler.half.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See SchedulerHalf.allocated."""
        if self._scheduler is not None and num_external_tokens > 0:
            (block_ids,) = blocks.get_block_ids()
            self._scheduler.half.allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """See SchedulerHalf.plan_step."""
        plan = StepPlan()
        side = self._scheduler
        if side is None:
            return plan
        side.feed.poll()
        state = scheduler_output.kv_connector_block_state

        def block_ids_of(request_id: str) -> list[int] | None:
            groups = state.get_block_ids(request_id)
            return None if groups is None else groups[0]

        plan.loads, plan.saves = side.half.plan_step(scheduler_output.num_scheduled_tokens, block_ids_of)
        plan.step = side.half.step
        plan.idle = not scheduler_output.num_scheduled_tokens
        if self._why_not:
            plan.saves = []
        elif self._pins is not None:
            plan.saves = self._pins.hold(plan.step, plan.saves)
        side.reports.load(side.half.running, side.half.waiting, self._kv_use())
        return plan

    def update_connector_output(self, connector_output: Any) -> None:
        """One step has been executed."""
        done = connector_output.kv_connector_worker_meta
        if self._pins is not None and isinstance(done, SavesDone):
            self._pins.release(done.workers)
        if self._scheduler is not None:
            self._scheduler.half.step_done()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See SchedulerHalf.finished. Blocks are free at once: those that are still being saved are held by `pins`."""
        if self._scheduler is not None:
            half = self._scheduler.half
            half.finished(request)
            self._scheduler.reports.load(half.running, half.waiting, self._kv_use())
        return False, None

    def reset_cache(self) -> bool | None:
        """Weights or cache were reset: what the pool holds is no longer this model's."""
        if self._scheduler is None:
            return None
        return self._scheduler.reset()

    def _kv_use(self) -> float:
        return float(self._kv_cache_manager.usage) if self._kv_cache_manager is not None else 0.0

    # --- worker half ----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Map paged memory and connect to the node."""
        if not self._link_path:
            return
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        rank = int(get_tensor_model_parallel_rank())
        self._worker = WorkerSide.create(
            self._link_path,
            self._why_not,
            vllm_config=self._vllm_config,
            config=self._kv_cache_config,
            rank=rank,
            kv_caches=kv_caches,
        )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Queue this step's loads."""
        if self._worker is not None and self._worker.half is not None:
            self._worker.half.start_loads(self._plan().loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to do: loads are asynchronous and whole."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do: blocks are saved whole, after the forward pass."""

    def wait_for_save(self) -> None:
        """Copy the blocks that this step completed into the pool, or begin to."""
        if self._worker is not None:
            plan = self._plan()
            self._worker.save(plan.step, plan.saves)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Steps whose saves are done."""
        if self._worker is None or not self._worker.saved:
            return None
        saved, self._worker.saved = self._worker.saved, []
        return SavesDone(dict(Counter(saved)))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that ended since the last step, good or bad."""
        results = KVConnectorTransferResults()
        if self._worker is not None and self._worker.half is not None:
            results.finished_recving = self._worker.half.take_finished(idle=self._plan().idle)
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Paged blocks of those loads that must be recomputed."""
        if self._worker is None or self._worker.half is None:
            return set()
        return self._worker.half.take_failed()

    def shutdown(self) -> None:
        """Stop the load thread and close the links."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.link.close()

    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        return plan if isinstance(plan, StepPlan) else StepPlan()
