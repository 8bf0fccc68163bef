"""vLLM's own scheduler with our scheduler half in it, and few blocks: requests are preempted again and again.

`test_with_vllm.py` runs these in a process of their own. What executes a step is a model of a worker: paged memory that
knows which block's bytes are where, a pool that takes and gives them late, loses some, and fails loads. A token is a
function of all tokens before it, and computing it checks that the KV of all of them is in place.
"""

from __future__ import annotations

import json
import random
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvmigrate.connector.connector import LINK_OPTION, SavesDone, StepPlan
from kvmigrate.connector.metadata import LoadJob

BLOCK = 16
BLOCKS = 20
VOCABULARY = 1000
MAX_STEPS = 5000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration is all that a scheduler wants of a model."""
    directory = tmp_path_factory.mktemp("model")
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    about = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY}
    (directory / "config.json").write_text(json.dumps({**about, **shape, "max_position_embeddings": 1024}))
    return directory


def make_scheduler(model: Path) -> Scheduler:
    """As vLLM makes it, without the engine around it."""
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(model), dtype="float32", max_model_len=512, skip_tokenizer_init=True, seed=0
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=512,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="GrapevineConnector",
            kv_connector_module_path="kvmigrate.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={LINK_OPTION: "/nonexistent/link"},
        ),
    )
    config.cache_config.num_gpu_blocks = BLOCKS
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32)
    caches = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
    init_none_hash(sha256_cbor)
    with set_current_vllm_config(config):
        return Scheduler(config, caches, StructuredOutputManager(config), block_size=BLOCK, log_stats=True)


def next_token(tokens: Sequence[int]) -> int:
    return zlib.crc32(repr(list(tokens)).encode()) % VOCABULARY


def answer(prompt: Sequence[int], length: int) -> list[int]:
    """What somebody who is never disturbed says."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Reports:
    """What the node hears."""

    def __init__(self) -> None:
        self.heard: Counter[tuple[str, str]] = Counter()

    def started(self, rid: str, prompt_tokens: int, local_tokens: int, external_tokens: int) -> None:
        self.heard["started", rid] += 1

    def prefilled(self, rid: str, seconds: float) -> None:
        self.heard["prefilled", rid] += 1

    def filled(self, rid: str, hashes: Sequence[bytes], tokens: int) -> None:
        """Any number of times."""

    def finished(self, rid: str) -> None:
        self.heard["finished", rid] += 1

    def load(self, running: int, waiting: int, kv_use: float) -> None:
        """At every step."""


class Engine:
    """The scheduler, and a worker whose loads and saves take a random number of steps."""

    def __init__(self, model: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.scheduler = make_scheduler(model)
        connector: Any = self.scheduler.connector
        self.side = connector._scheduler
        self.half = self.side.half
        self.reports = self.half._reports = self.side.reports = Reports()
        self.free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        self.memory: dict[int, bytes] = {}
        self.pool: dict[bytes, int] = {}
        self.slots = 0
        #: What becomes known to the mirror later, and loads under way with the steps that they still take.
        self.news: list[bytes] = []
        self.loading: list[tuple[LoadJob, int]] = []
        self.requests: dict[str, Request] = {}
        self.ends: Counter[str] = Counter()
        self.loaded = self.failed = self.preempted = 0

    def ask(self, name: str, prompt: Sequence[int], length: int) -> None:
        hasher = get_request_block_hasher(BLOCK, sha256_cbor)
        wishes = SamplingParams(
            max_tokens=length, ignore_eos=True, extra_args={"kv_transfer_params": {"grapevine": {"rid": name}}}
        )
        self.requests[name] = Request(name, list(prompt), wishes, None, block_hasher=hasher)
        self.scheduler.add_request(self.requests[name])

    def step(self) -> None:
        """Schedule, execute, and tell what came of it."""
        self._mirror()
        planned = self.scheduler.schedule()
        plan = planned.kv_connector_metadata
        assert isinstance(plan, StepPlan)
        self.preempted += len(planned.preempted_req_ids or ())
        self._no_block_twice()
        sampled = {name: self._compute(name, count) for name, count in planned.num_scheduled_tokens.items()}
        for save in plan.saves:
            assert self.memory[save.block_id] == save.block_hash, "a save takes bytes of another block"
            self.pool[save.block_hash] = self.slots = self.slots + 2
            self.news.append(save.block_hash)
        self.loading += [(job, self.rng.randrange(4)) for job in plan.loads]
        finished, bad = self._load()
        names = list(sampled)
        told = KVConnectorOutput(
            finished_recving=finished,
            invalid_block_ids=bad,
            kv_connector_worker_meta=SavesDone({plan.step: 1}),
        )
        output = ModelRunnerOutput(
            names,
            {name: place for place, name in enumerate(names)},
            [sampled[name] for name in names],
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=told,
        )
        for outputs in self.scheduler.update_from_output(planned, output).values():
            self.ends.update(one.request_id for one in outputs.outputs if one.finish_reason is not None)

    def at_rest(self) -> None:
        """Nothing is left of anybody."""
        assert not self.scheduler.requests and not self.scheduler.running and not self.loading
        assert self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == self.free
        assert not self.half._tracked and not self.half._loads and not self.half._reporting

    def _mirror(self) -> None:
        """The node tells of some saves, and evicts some blocks."""
        self.rng.shuffle(self.news)
        for _ in range(self.rng.randint(0, len(self.news))):
            block = self.news.pop()
            if block in self.pool:
                self.half._mirror.add([(block, 0, self.pool[block], 2)])
                self.half.confirm_saved([block])
        for block in [block for block in self.pool if self.rng.random() < 0.01]:
            del self.pool[block]
            if self.rng.random() < 0.5:  # or the news of it is still on its way
                self.half._mirror.drop([block])

    def _no_block_twice(self) -> None:
        """No block is written for one request and used by another: only full blocks of the same bytes are shared."""
        owners: dict[int, set[bytes | str]] = {}
        for name, request in self.scheduler.requests.items():
            for place, block in enumerate(self._blocks(name)):
                hashes = request.block_hashes
                owners.setdefault(block, set()).add(hashes[place] if place < len(hashes) else name)
        assert all(len(meant) == 1 for meant in owners.values()), "a block has two meanings"

    def _compute(self, name: str, count: int) -> list[int]:
        request, blocks = self.requests[name], self._blocks(name)
        end = request.num_computed_tokens
        begin = end - count
        for place in range(begin // BLOCK):
            assert self.memory.get(blocks[place]) == request.block_hashes[place], f"{name} computes on wrong KV"
        tokens = list(request.all_token_ids)
        for place in range(begin // BLOCK, end // BLOCK):
            self.memory[blocks[place]] = request.block_hashes[place]
        if end % BLOCK:
            self.memory[blocks[end // BLOCK]] = f"{name} {end}".encode()  # a part
        return [next_token(tokens)] if end == len(tokens) else []

    def _load(self) -> tuple[set[str], set[int]]:
        finished: set[str] = set()
        bad: set[int] = set()
        left: list[tuple[LoadJob, int]] = []
        for job, steps in self.loading:
            if steps:
                left.append((job, steps - 1))
                continue
            broken = False
            for block in job.blocks:
                broken = broken or block.block_hash not in self.pool or self.rng.random() < 0.02
                if broken:
                    bad.add(block.block_id)
                else:
                    self.memory[block.block_id] = block.block_hash
            self.failed += broken
            self.loaded += not broken
            finished.add(job.request_id)
        self.loading = left
        return finished, bad

    def _blocks(self, name: str) -> list[int]:
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        return blocks


@pytest.mark.parametrize("seed", range(6))
def test_preempted_requests_say_what_they_would_have_said_and_end_once(model: Path, seed: int) -> None:
    engine, rng = Engine(model, seed), random.Random(1000 + seed)
    beginning = [rng.randrange(VOCABULARY) for _ in range(3 * BLOCK)]
    wanted: dict[str, list[int]] = {}
    for step in range(MAX_STEPS):
        if len(wanted) < 40 and step % 3 == 0:
            name = f"r{len(wanted)}"
            prompt = beginning[: rng.choice((0, BLOCK, 3 * BLOCK))] + [
                rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 5 * BLOCK))
            ]
            if wanted and rng.random() < 0.3:  # somebody's next turn
                before = list(engine.requests[rng.choice(list(wanted))].prompt_token_ids or ())[: 8 * BLOCK]
                whole = len(before) // BLOCK * BLOCK or len(before)
                prompt = before[:whole] + prompt[: rng.choice((0, BLOCK))]
            length = rng.randint(1, 4 * BLOCK)
            wanted[name] = answer(prompt, length)
            engine.ask(name, prompt, length)
        engine.step()
        if len(wanted) == 40 and not engine.scheduler.requests:
            break
    while engine.loading:
        engine.step()
    assert engine.ends == Counter(list(wanted)), "each of them ends, and once"
    for name, said in wanted.items():
        assert list(engine.requests[name].output_token_ids) == said, name
    for name in wanted:
        assert [engine.reports.heard[what, name] for what in ("started", "prefilled", "finished")] == [1, 1, 1]
    engine.at_rest()
    assert engine.preempted >= 5 and engine.loaded >= 5 and engine.failed >= 1, "the test tests nothing"
    engine.scheduler.shutdown()


def test_a_request_that_is_aborted_while_it_is_preempted_leaves_nothing(model: Path) -> None:
    from vllm.v1.request import RequestStatus

    engine, rng = Engine(model, 0), random.Random(1)
    for number in range(6):
        engine.ask(f"r{number}", [rng.randrange(VOCABULARY) for _ in range(4 * BLOCK)], 5 * BLOCK)
    aborted: set[str] = set()
    for _ in range(MAX_STEPS):
        engine.step()
        for name, request in list(engine.scheduler.requests.items()):
            if request.status == RequestStatus.PREEMPTED:
                engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
                aborted.add(name)
        if not engine.scheduler.requests and not engine.loading:
            break
    assert aborted and set(engine.ends) == set(engine.requests) - aborted
    assert all(engine.reports.heard["finished", name] == 1 for name in engine.requests)
    engine.step()
    engine.at_rest()
    engine.scheduler.shutdown()
