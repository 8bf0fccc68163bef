"""Requests and plans in the form in which they travel between a worker and the main process; `told.py` makes it."""

from __future__ import annotations

from typing import NamedTuple

Pairs = tuple[tuple[str, str], ...]
"""Headers in order, or any other names with values."""


class Read(NamedTuple):
    """What a worker has read of a request: `ParsedRequest` without its body."""

    path: str
    model: str | None
    stream: bool
    #: 8 bytes a chunk, in the order of this host's bytes.
    chunks: bytes
    prompt_bytes: int
    est_prompt_tokens: int
    exact_tokens: bool
    max_tokens: int | None
    has_kv_params: bool
    is_json: bool
    prompts: int
    answers: int
    least_tokens: int
    refers_to: str | None
    continues: bool
    #: `Carriage`: reasons why not, by tokens and again; own_ids, ask_ids, strip, gathers.
    carriage: tuple[str, str, bool, bool, bool, bool] | None


class Options(NamedTuple):
    """`RouteOptions`."""

    rid: str
    hops: int
    visited: tuple[str, ...]
    asked: int
    deadline_s: float
    force_target: str | None
    force_source: str | None
    no_pull: bool


class Planned(NamedTuple):
    """`Plan` without its costs."""

    rid: str
    model: str
    entry: str
    target: str
    source: str | None
    forced: bool
    chunks: int
    matched_tokens: int
    prompt_tokens: int
    reason: str
    policy: str
    hops: int
    visited: tuple[str, ...]
    deadline_s: float
    patience_ms: float
