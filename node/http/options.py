"""What a client may ask of the routing by header. Every other ``x-grapevine-*`` header is dropped.

- ``x-grapevine-force-target: NAME``    run on that node; an unknown name is a 400
- ``x-grapevine-force-source: NAME``    pull KV blocks from that node first, worth it or not
- ``x-grapevine-no-pull: 1``            never pull KV blocks for this request
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from node.errors import BadRequest
from node.http.errors import ApiError, ApiFailure
from node.plan import FORCE_SOURCE, FORCE_TARGET, NO_PULL, RouteOptions


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
    if options.no_pull and options.force_source:
        raise _refused(f"{NO_PULL} and {FORCE_SOURCE} contradict each other")
    return options


def _refused(message: str) -> ApiFailure:
    return ApiFailure(ApiError(400, "invalid_option", message + "."))
