"""What a client may ask of the routing by header. Every other ``x-grapevine-*`` header is dropped.

- ``x-grapevine-force-target: NAME``    run on that node; an unknown name is a 400
- ``x-grapevine-force-source: NAME``    pull KV blocks from that node first, worth it or not
- ``x-grapevine-no-pull: 1``            never pull KV blocks for this request
- ``x-grapevine-force-recompute: 1``    the same
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from node.errors import BadRequest
from node.http.errors import ApiError, ApiFailure
from node.plan import FORCE_SOURCE, FORCE_TARGET, RouteOptions

NO_PULL = "x-grapevine-no-pull"
_TRUE = frozenset({"1", "true"})
_FALSE = frozenset({"0", "false", ""})


def read_options(headers: Mapping[str, str], known: Callable[[str], bool], *, rid: str) -> RouteOptions:
    """Read the options from our headers (lower-case names). ``known`` says whether a node is a member.

    :raises ApiFailure: 400 when a named node is unknown or a value makes no sense.
    """
    try:
        options = RouteOptions.from_headers(headers, rid=rid)
    except BadRequest as error:
        raise _refused(str(error)) from error
    for name, node in ((FORCE_TARGET, options.force_target), (FORCE_SOURCE, options.force_source)):
        if node is not None and not known(node):
            raise ApiFailure(ApiError(400, "unknown_node", f"{name}: no node of this cluster is called {node!r}."))
    raw = headers.get(NO_PULL, "").strip().lower()
    if raw not in _TRUE | _FALSE:
        raise _refused(f"{NO_PULL} must be 1 or 0")
    if raw in _TRUE:
        options = replace(options, force_recompute=True)
    if options.force_recompute and options.force_source:
        raise _refused(f"{NO_PULL} and {FORCE_SOURCE} contradict each other")
    return options


def _refused(message: str) -> ApiFailure:
    return ApiFailure(ApiError(400, "invalid_option", message + "."))
