"""The scheduler half: which blocks to load, which to save, and what the node is told about each request.

It runs inside vLLM's `schedule()` and must never wait. Contract with vLLM 0.32 (vllm/v1/core/sched/scheduler.py):

1. `matched` may be called many times for one request (allocation can fail) and is recomputed from its arguments.
2. A request that has loaded once is not offered another load until it is preempted: after a failed load vLLM asks
   again from zero, and offering the same bad blocks would loop for ever.
3. At least one token is left for the engine to compute: at most `(num_tokens - 1) // block_size` blocks are offered.
4. A block may be saved in the step that completes it: `i < min((computed + scheduled) // block_size, len(hashes))`.
5. A request whose KV depends on more than its block hashes say (LoRA contents, multimodal features, prompt
   embeddings) neither loads nor saves: refused, not guessed. Its `Filled` names no block: vLLM's own cache has the
   prompt, and nobody can be given it.
6. A request that came while its blocks are still being pulled keeps its place in vLLM's queue and is passed over until
   they are here, no longer than its node said (`holds`); vLLM schedules whoever stands behind it meanwhile.

Everything is keyed by vLLM's request id. The node's own id (`rid`) comes in `kv_transfer_params` and is used only in
reports; of several engine requests under one rid (`n > 1`) only the first one reports.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvmigrate.connector.holds import Holds
from kvmigrate.connector.metadata import BlockLoad, BlockSave, LoadJob
from kvmigrate.connector.mirror import PoolMirror

RID_FIELD = "grapevine"
"""Key in `kv_transfer_params` under which the node passes `{"rid": ..., "hold_s": ...}`."""

MAX_UNREPORTED_STEPS = 1024
"""Steps whose completion vLLM has not reported yet; it runs at most a few ahead, so the bound only guards a leak."""

MAX_SAVES_IN_FLIGHT = 65_536
"""Unconfirmed saves remembered; the oldest is forgotten first, which at worst saves one block twice."""

SAVE_PATIENCE_STEPS = 256
"""After so many steps a save that the pool never confirmed may be tried again for another request."""


class EngineRequest(Protocol):
    """What this module reads of vLLM's `Request` (vllm/v1/request.py)."""

    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int
    num_preemptions: int
    block_hashes: Sequence[bytes]
    skip_reading_prefix_cache: bool
    kv_transfer_params: Mapping[str, object] | None
    lora_request: object | None
    mm_features: Sequence[object]
    prompt_embeds: object | None

    @property
    def num_tokens(self) -> int: ...  # noqa: D102


class Reports(Protocol):
    """Where the scheduler half sends what it sees; every call returns at once and may be lost."""

    def started(self, rid: str, prompt_tokens: int, local_tokens: int, external_tokens: int) -> None: ...  # noqa: D102
    def prefilled(self, rid: str, seconds: float) -> None: ...  # noqa: D102
    def filled(self, rid: str, hashes: Sequence[bytes], tokens: int) -> None: ...  # noqa: D102
    def finished(self, rid: str) -> None: ...  # noqa: D102


@dataclass(slots=True)
class _Tracked:
    request: EngineRequest
    rid: str | None
    migratable: bool
    local_tokens: int = 0
    external_tokens: int = 0
    loaded_at_preemption: int = -1  # num_preemptions when a load was last started, rule 2
    blocks_seen: int = 0  # full blocks already considered for saving
    started_at: float | None = None
    prefilled: bool = False
    prefill_told: bool = False
    reported_blocks: int = 0


class SchedulerHalf:
    """Decides loads and saves from the mirror; owns no socket and no thread."""

    def __init__(self, *, block_size: int, mirror: PoolMirror, reports: Reports, clock: Callable[[], float]) -> None:
        self._block_size = block_size
        self._mirror = mirror
        self._reports = reports
        self._clock = clock
        self._tracked: dict[str, _Tracked] = {}
        self._reporting: set[str] = set()
        self._loads: list[LoadJob] = []
        self._saving: dict[bytes, int] = {}
        self._holds = Holds(clock)
        self.step = 0  #: the last one planned
        self._prefilled_in_step: deque[list[str]] = deque(maxlen=MAX_UNREPORTED_STEPS)

    @property
    def running(self) -> int:
        """Requests that have been scheduled and have not finished."""
        return sum(tracked.started_at is not None for tracked in self._tracked.values())

    @property
    def waiting(self) -> int:
        """Requests that vLLM accepted and has not scheduled yet."""
        return len(self._tracked) - self.running

    def on_new_request(self, request: EngineRequest) -> None:
        """Start to follow a request."""
        rid, hold_s = _ours(request)
        if rid is not None and hold_s > 0:
            self._holds.begin(request.request_id, rid, hold_s)
        if rid in self._reporting:
            rid = None
        if rid is not None:
            self._reporting.add(rid)
        self._tracked[request.request_id] = _Tracked(request, rid, _is_migratable(request))

    def matched(self, request: EngineRequest, computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that the pool can add to `computed_tokens`, and whether they load asynchronously (they always do).

        None: ask again in the next step, its blocks are on their way.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or request.skip_reading_prefix_cache:
            return 0, False
        if not tracked.migratable:
            tracked.local_tokens = computed_tokens
            return 0, False
        if self._holds.waits(request.request_id):
            return None, False
        tracked.local_tokens = computed_tokens
        if tracked.loaded_at_preemption == request.num_preemptions:
            return 0, False
        limit = min((request.num_tokens - 1) // self._block_size, len(request.block_hashes))
        blocks = self._mirror.prefix(request.block_hashes, computed_tokens // self._block_size, limit)
        return blocks * self._block_size, blocks > 0

    def allocated(self, request: EngineRequest, block_ids: Sequence[int], external_tokens: int) -> None:
        """vLLM reserved paged blocks; with `external_tokens` > 0 the tail of them is to be filled from the pool."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or external_tokens <= 0:
            return
        first = tracked.local_tokens // self._block_size
        indices = range(first, first + external_tokens // self._block_size)
        blocks = tuple(
            BlockLoad(block_ids[i], request.block_hashes[i], self._mirror.slots(request.block_hashes[i]))
            for i in indices
        )
        tracked.external_tokens = external_tokens
        tracked.loaded_at_preemption = request.num_preemptions
        self._loads.append(LoadJob(request.request_id, tracked.rid or "", blocks))

    def plan_step(
        self, scheduled_tokens: Mapping[str, int], block_ids_of: Callable[[str], Sequence[int] | None]
    ) -> tuple[list[LoadJob], list[BlockSave]]:
        """Loads and saves of the step that vLLM is about to run: called once per step, empty steps included."""
        self.step += 1
        loads, self._loads = self._loads, []
        saves: list[BlockSave] = []
        prefilled: list[str] = []
        for request_id, count in scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            self._note_start(tracked)
            computed = tracked.request.num_computed_tokens + count
            if not tracked.prefilled and computed >= tracked.request.num_prompt_tokens:
                tracked.prefilled = True
                prefilled.append(request_id)
            saves.extend(self._new_saves(tracked, computed, block_ids_of))
        self._prefilled_in_step.append(prefilled)
        return loads, saves

    def step_done(self) -> None:
        """A step's forward pass has ended. Reports the requests whose prompt it completed."""
        if not self._prefilled_in_step:
            return
        for request_id in self._prefilled_in_step.popleft():
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.rid is not None:
                self._report_prefill(tracked, tracked.rid)

    def finished(self, request: EngineRequest) -> None:
        """The request ended, was aborted or failed: report the blocks it filled and forget it."""
        self._holds.end(request.request_id)
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None or tracked.rid is None:
            return
        self._reporting.discard(tracked.rid)
        if tracked.prefilled and not tracked.prefill_told and request.num_tokens > request.num_prompt_tokens:
            self._report_prefill(tracked, tracked.rid)  # its first token was its last: vLLM tells of the end first
        if tracked.prefilled:
            self._report_filled(tracked, tracked.rid, min(request.num_computed_tokens, request.num_tokens))
        self._reports.finished(tracked.rid)

    def pull_over(self, rid: str) -> None:
        """The pull for a request has ended: it may be scheduled with whatever came."""
        self._holds.over(rid)

    def confirm_saved(self, hashes: Iterable[bytes]) -> None:
        """The pool announced these blocks: saves in flight for them are over."""
        for block_hash in hashes:
            self._saving.pop(block_hash, None)

    def forget_pool(self) -> None:
        """The pool was cleared or the node went away: it holds nothing, and nothing is being saved or pulled."""
        self._holds.clear()
        self._mirror.clear()
        self._saving.clear()
        for tracked in self._tracked.values():
            tracked.blocks_seen = 0

    def _note_start(self, tracked: _Tracked) -> None:
        if tracked.started_at is not None:
            return
        tracked.started_at = self._clock()
        if tracked.rid is not None:
            request = tracked.request
            # A failed load rewinds num_computed_tokens, so what really was cached is read here and not in `matched`.
            local = min(tracked.local_tokens, request.num_computed_tokens)
            external = min(tracked.external_tokens, request.num_computed_tokens - local)
            self._reports.started(tracked.rid, request.num_prompt_tokens, local, external)

    def _new_saves(
        self, tracked: _Tracked, computed: int, block_ids_of: Callable[[str], Sequence[int] | None]
    ) -> list[BlockSave]:
        hashes = tracked.request.block_hashes
        full = min(computed // self._block_size, len(hashes))
        if not tracked.migratable or full <= tracked.blocks_seen:
            return []
        wanted = [i for i in range(tracked.blocks_seen, full) if self._needs_saving(hashes[i])]
        tracked.blocks_seen = full
        block_ids = block_ids_of(tracked.request.request_id) if wanted else None
        if block_ids is None:
            return []
        for i in wanted:
            self._saving[hashes[i]] = self.step
            if len(self._saving) > MAX_SAVES_IN_FLIGHT:
                self._saving.pop(next(iter(self._saving)))
        return [BlockSave(block_ids[i], hashes[i]) for i in wanted]

    def _needs_saving(self, block_hash: bytes) -> bool:
        if block_hash in self._mirror:
            return False
        since = self._saving.get(block_hash)
        return since is None or self.step - since > SAVE_PATIENCE_STEPS

    def _report_prefill(self, tracked: _Tracked, rid: str) -> None:
        if tracked.started_at is not None:
            tracked.prefill_told = True
            self._reports.prefilled(rid, self._clock() - tracked.started_at)
        self._report_filled(tracked, rid, tracked.request.num_prompt_tokens)

    def _report_filled(self, tracked: _Tracked, rid: str, tokens: int) -> None:
        hashes = tracked.request.block_hashes
        full = min(tokens // self._block_size, len(hashes))
        if full > tracked.reported_blocks:
            tracked.reported_blocks = full
            self._reports.filled(rid, hashes[:full] if tracked.migratable else (), full * self._block_size)


def _ours(request: EngineRequest) -> tuple[str | None, float]:
    """The node's id for this request, None when it did not come through a node; and how long to hold it, seconds."""
    params = request.kv_transfer_params
    ours = params.get(RID_FIELD) if isinstance(params, Mapping) else None
    if not isinstance(ours, Mapping):
        return None, 0.0
    rid, hold_s = ours.get("rid"), ours.get("hold_s")
    return rid if isinstance(rid, str) and rid else None, float(hold_s) if isinstance(hold_s, int | float) else 0.0


def _is_migratable(request: EngineRequest) -> bool:
    return request.lora_request is None and not request.mm_features and request.prompt_embeds is None
