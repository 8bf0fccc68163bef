"""What a client may ask of us by header. Every other ``x-grapevine-*`` header is dropped.

- ``x-grapevine-force-target: NAME``    run on that node; an unknown name is a 400
- ``x-grapevine-force-source: NAME``    pull KV blocks from that node first, worth it or not; an operator's (`auth`)
- ``x-grapevine-no-pull: 1``            never pull KV blocks for this request
- ``x-request-timeout: SECONDS``        all of it must be over in that time, counted from its arrival
- ``x-request-priority: NUMBER``        lower is earlier; wins over ``x-vllm-priority``, that over the body's field
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from functools import lru_cache

from node.errors import BadRequest
from node.http.errors import ApiError, ApiFailure
from node.plan import FORCE_SOURCE, FORCE_TARGET, MAX_DEADLINE_S, NO_PULL, RouteOptions
from node.relay.headers import LOWER, HeaderList, replaced

TIMEOUT = "x-request-timeout"
PRIORITY = "x-request-priority"
#: The header by which vLLM takes a priority; engines of other kinds ignore it.
VLLM_PRIORITY = "X-Vllm-Priority"
#: Highest and lowest number of a priority.
MAX_PRIORITY = 100
#: Shortest time that a request may be given, seconds.
MIN_TIMEOUT_S = 0.001

_DECIMAL = re.compile(r"[0-9]{1,9}(\.[0-9]{0,9})?|\.[0-9]{1,9}")
_WHOLE = re.compile(r"[+-]?[0-9]{1,9}")
#: Bits of an IPv6 address that one subscriber usually has to himself are not looked at.
_IPV6_PREFIX = 64
#: Addresses of clients that are remembered in that form.
ADDRESSES = 4096


def read_options(
    headers: Mapping[str, str], known: Callable[[str], bool], *, rid: str, timeout: str | None = None
) -> RouteOptions:
    """Read the options from our headers (lower-case names). ``known`` says whether a node is a member.

    :raises ApiFailure: 400 when a named node is unknown or a value makes no sense.
    """
    if not headers and timeout is None:
        return RouteOptions(rid)
    try:
        options = RouteOptions.from_headers(headers, rid=rid, deadline_s=_deadline(timeout))
    except BadRequest as error:
        raise _refused(str(error)) from error
    for name, node in ((FORCE_TARGET, options.force_target), (FORCE_SOURCE, options.force_source)):
        if node is not None and not known(node):
            raise ApiFailure(ApiError(400, "unknown_node", f"{name}: no node of this cluster is called {node!r}."))
    if options.no_pull and options.force_source:
        raise _refused(f"{NO_PULL} and {FORCE_SOURCE} contradict each other")
    return options


def read_priority(headers: Mapping[str, str], in_body: int | None) -> int | None:
    """Return the priority of a request, None when it names none. ``headers``: by lower-case name.

    :raises ApiFailure: 400 when it is no whole number, or out of range.
    """
    for name in (PRIORITY, VLLM_PRIORITY):
        if (given := headers.get(LOWER[name])) is not None:
            if _WHOLE.fullmatch(given.strip()) is None:
                raise _bad_priority(name, given)
            return _within(name, int(given))
    return None if in_body is None else _within("priority", in_body)


def with_priority(headers: HeaderList, priority: int | None) -> HeaderList:
    """Return the headers for the engine: it hears of the priority that counts, whatever the body says."""
    return headers if priority is None else replaced(headers, VLLM_PRIORITY, str(priority))


def client_of(remote: str | None) -> str:
    """Name a client that needs no API key, for fairness: by its address.

    Anybody could write anything into a header, and would be served once for each name that he invents.
    """
    return _subscriber(remote or "")


@lru_cache(ADDRESSES)
def _subscriber(remote: str) -> str:
    """Whose address this is: of IPv6 its network."""
    try:
        address = ipaddress.ip_address(remote.partition("%")[0])
    except ValueError:
        return remote
    if address.version == 6:
        return str(ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))
    return str(address)


def _deadline(given: str | None) -> float:
    if given is None:
        return 0.0
    text = given.strip()
    seconds = float(text) if _DECIMAL.fullmatch(text) else 0.0
    if not MIN_TIMEOUT_S <= seconds <= MAX_DEADLINE_S:
        least, most = f"{MIN_TIMEOUT_S:g}", f"{MAX_DEADLINE_S:g}"
        raise BadRequest(f"{TIMEOUT} must be a time in seconds from {least} to {most}, such as 30 or 2.5")
    return seconds


def _within(name: str, priority: int) -> int:
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise _bad_priority(name, str(priority))
    return priority


def _bad_priority(name: str, given: str) -> ApiFailure:
    what = f"{name} must be a whole number from -{MAX_PRIORITY} (first) to {MAX_PRIORITY} (last), not {given[:40]!r}"
    return ApiFailure(ApiError(400, "invalid_option", what + ".", param=name))


def _refused(message: str) -> ApiFailure:
    return ApiFailure(ApiError(400, "invalid_option", message + "."))
