"""What the supervisor tells the node about its engine."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class EngineState(enum.Enum):
    """Where an engine is in its life; the strings are what `/gossip/state` shows."""

    STARTING = "starting"  # the process loads its model, or an attached server has not answered yet
    READY = "ready"  # it answers /health
    SILENT = "silent"  # it lives and does not answer: too slow, or hung
    RESTARTING = "restarting"  # it went down and will be started again after a pause
    FAILED = "failed"  # it cannot start; the reason tells what to change; the node goes on routing to its peers
    STOPPING = "stopping"  # it is asked to end
    STOPPED = "stopped"  # nothing of it is left


@dataclass(frozen=True, slots=True)
class EngineModel:
    """One entry of the engine's /v1/models; `parent` is set for an adapter, lengths are tokens."""

    id: str
    root: str = ""
    parent: str | None = None
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The engine answers: requests may be sent to it."""

    models: tuple[EngineModel, ...]
    version: str
    #: Tokens that its KV cache holds; 0 = it does not tell.
    kv_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineDown:
    """The engine takes no requests: send none before the next `EngineReady`."""

    state: EngineState
    reason: str


@dataclass(frozen=True, slots=True)
class EngineProgress:
    """What a starting engine does now, in a few words for people."""

    text: str


EngineEvent = EngineReady | EngineDown | EngineProgress
