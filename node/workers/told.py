"""Requests, options and plans as they travel between a worker and the main process, and back."""

from __future__ import annotations

from array import array

from node.errors import RemoteError
from node.plan import Plan, RouteOptions
from node.prompt import ParsedRequest
from node.prompt.carriage import Carriage
from node.relay.headers import HeaderList
from node.workers.forms import Options, Pairs, Planned, Read

#: Chunks told at most, those of 256 MiB of text: what comes behind is routed as if nobody had it.
MAX_CHUNKS = 1 << 19


def read_of(parsed: ParsedRequest) -> Read:
    """What the main process needs of a request."""
    carriage = parsed.carriage
    ways = None
    if carriage is not None:
        ways = (
            carriage.tokens,
            carriage.again,
            carriage.own_ids,
            carriage.ask_ids,
            carriage.strip,
            carriage.gathers,
        )
    return Read(
        parsed.path,
        parsed.model,
        parsed.stream,
        array("Q", parsed.chunks[:MAX_CHUNKS]).tobytes(),
        parsed.prompt_bytes,
        parsed.est_prompt_tokens,
        parsed.exact_tokens,
        parsed.max_tokens,
        parsed.has_kv_params,
        parsed.is_json,
        parsed.prompts,
        parsed.answers,
        parsed.least_tokens,
        parsed.refers_to,
        parsed.continues,
        ways,
    )


def request_of(read: Read) -> ParsedRequest:
    """The request without its body. :raises RemoteError: it cannot be one."""
    if len(read.chunks) % 8 or read.prompts < 1 or read.answers < 1:
        raise RemoteError("worker: no request")
    return ParsedRequest(
        path=read.path,
        model=read.model,
        stream=read.stream,
        chunks=tuple(array("Q", read.chunks)),
        prompt_bytes=read.prompt_bytes,
        est_prompt_tokens=read.est_prompt_tokens,
        exact_tokens=read.exact_tokens,
        max_tokens=read.max_tokens,
        has_kv_params=read.has_kv_params,
        is_json=read.is_json,
        prompts=read.prompts,
        answers=read.answers,
        least_tokens=read.least_tokens,
        refers_to=read.refers_to,
        carriage=None if read.carriage is None else Carriage(*read.carriage),
        continues=read.continues,
    )


def told_options(options: RouteOptions) -> Options:
    """Routing options as a message."""
    return Options(
        options.rid,
        options.hops,
        tuple(options.visited),
        options.asked,
        options.deadline_s,
        options.force_target,
        options.force_source,
        options.no_pull,
    )


def options_of(told: Options) -> RouteOptions:
    """The routing options of a message."""
    return RouteOptions(*told)


def told_plan(plan: Plan) -> Planned:
    """A plan as a message; what each candidate would cost stays where it was decided."""
    return Planned(
        plan.rid,
        plan.model,
        plan.entry,
        plan.target,
        plan.source,
        plan.forced,
        plan.chunks,
        plan.matched_tokens,
        plan.prompt_tokens,
        plan.reason,
        plan.policy,
        plan.hops,
        plan.visited,
        plan.deadline_s,
        plan.patience_ms,
    )


def plan_of(told: Planned) -> Plan:
    """The plan of a message."""
    return Plan(*told)


def headers_of(pairs: Pairs) -> HeaderList:
    """Headers of a message."""
    return list(pairs)
