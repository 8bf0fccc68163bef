"""``/v1/*``, ``/tokenize``, ``/detokenize``: routed by model, relayed as bytes. ``/v1/models`` is the cluster's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol

from aiohttp import web

from node.clients import Access, Client, Denied
from node.http.auth import OPERATOR_HEADER, bearer, check_operator
from node.http.cors import Cors
from node.http.errors import ApiError, ApiFailure, json_response, model_not_found
from node.http.intake import BodyRoom, Held, first_headers, header_list, parse, read_body, request_id
from node.http.options import TIMEOUT, client_of, read_options, read_priority, with_priority
from node.logs import set_request
from node.plan import Refusal
from node.prompt import ParsedRequest
from node.relay.call import Call
from node.relay.dispatch import Dispatcher
from node.relay.headers import REQUEST_ID, for_upstream, internal, replaced
from node.relay.refused import Refused
from node.settings import Settings

if TYPE_CHECKING:
    from node.tracing.tracing import Tracing

_MODELS = "/v1/models"
#: Asks vLLM to tell its load in a header of its answer, where that is not a stream.
_LOAD_HEADER = "endpoint-load-metrics-format"


class Names(Protocol):
    """What is asked of the cluster; `node.registry.Registry` is it."""

    def known(self, name: str) -> bool:
        """Say whether a node of that name is or was a member."""
        ...

    def models_union(self) -> dict[str, object]:
        """Return the answer to `GET /v1/models`."""
        ...


class OpenAi:
    """The routes that clients of the OpenAI API use."""

    def __init__(
        self,
        settings: Settings,
        registry: Names,
        dispatcher: Dispatcher,
        *,
        bodies: BodyRoom,
        access: Access,
        tracing: Tracing | None,
        clock: Callable[[], float],
    ) -> None:
        self.bodies = bodies
        self._cors = Cors(settings.cors_origin)
        self._access = access
        self._tracing = tracing
        self._settings = settings
        self._registry = registry
        self._dispatcher = dispatcher
        self._clock = clock

    def authorize(self, request: web.BaseRequest) -> Client | None:
        """Return the client whose API key it is; None where nobody needs one.

        :raises ApiFailure: 401.
        """
        if self._access.open:
            return None
        key = bearer(request.headers.get("Authorization"))
        client = None if key is None else self._access.find(key)
        if client is not None:
            return client
        self._access.strangers += 1
        if key is None:
            raise ApiFailure(ApiError(401, "missing_api_key", "Send an API key: `Authorization: Bearer KEY`."))
        raise ApiFailure(ApiError(401, "invalid_api_key", "Incorrect API key provided."))

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer any request of the API."""
        arrived = self._clock()
        origin = request.headers.get("Origin")
        if origin is not None and (permission := self._cors.meet(request, origin)) is not None:
            return permission  # a browser asks without the key
        client = self.authorize(request)
        path = request.raw_path.partition("?")[0]
        if (
            request.method != "POST"
            and request.method in {"GET", "HEAD"}
            and (path == _MODELS or path.startswith(_MODELS + "/"))
        ):
            return self._models(request, path)
        if client is None:
            return await self._serve(request, path, arrived, None)
        return await self._as_client(request, path, arrived, client)

    async def _as_client(
        self, request: web.BaseRequest, path: str, arrived: float, client: Client
    ) -> web.StreamResponse:
        """Serve a client whose requests and tokens are counted."""
        _unless(client.enter(arrived))
        try:
            return await self._serve(request, path, arrived, client)
        finally:
            client.leave(self._clock() - arrived)

    async def _serve(
        self, request: web.BaseRequest, path: str, arrived: float, client: Client | None
    ) -> web.StreamResponse:
        with self.bodies.hold() as held:
            call = await self.take(request, path, arrived, held, client)
            if client is not None:
                self._spend(client, call.parsed)
            try:
                if self._tracing is None:
                    return await self._dispatcher.run(call, request)
                run = partial(self._dispatcher.run, request=request)
                return await self._tracing.request(call, self._clock() - arrived, run)
            except Refused as refused:
                return refusal_response(refused.refusal, call.rid)

    def _spend(self, client: Client, parsed: ParsedRequest) -> None:
        _unless(client.spend(most_tokens(parsed), self._clock()))

    async def take(
        self, request: web.BaseRequest, path: str, arrived: float, held: Held, client: Client | None
    ) -> Call:
        """Read a client's request whole.

        :raises ApiFailure: it cannot be understood or is too large.
        """
        # Any other upgrade is an offer that a server may ignore: some clients offer HTTP/2 with every first request.
        given = first_headers(request)
        if "upgrade" in given and "websocket" in given["upgrade"].lower():
            raise ApiFailure(ApiError(501, "no_upgrade", "Protocol upgrades (WebSocket) are not relayed."))
        headers = header_list(request)
        rid = request_id(request)
        set_request(rid)
        timeout = given.get(TIMEOUT)
        ours = internal(headers)
        options = read_options(ours, self._registry.known, rid=rid, timeout=timeout)
        if options.force_source is not None:
            self._check_operator(ours)
        body = await read_body(request, self._settings.max_body_mib, held)
        # Parsing a large body takes milliseconds: off the loop, so that streams do not stutter.
        if len(body) > _LARGE_BODY:
            parsed = await asyncio.to_thread(parse, request, path, body)
        else:
            parsed = parse(request, path, body)
        priority = read_priority(given, parsed.priority)
        sent = with_priority(for_upstream(headers), priority)
        if client is not None:  # that key was for us
            sent = replaced(sent, "Authorization", None)
        return Call(
            request.method,
            request.raw_path,
            sent,
            parsed,
            rid,
            options,
            arrived,
            client=client_of(request.remote) if client is None else client.name,
            priority=priority or 0,
            carries=_carries(parsed, given),
        )

    def _check_operator(self, ours: Mapping[str, str]) -> None:
        """:raises ApiFailure: clients and operators are told apart here, and this is no operator."""
        settings = self._settings
        if settings.admin_token or settings.has_clients:
            error = check_operator(ours.get(OPERATOR_HEADER), settings.admin_token)
            if error is not None:
                raise ApiFailure(error)

    def _models(self, request: web.BaseRequest, path: str) -> web.Response:
        union = self._registry.models_union()
        if path == _MODELS:
            return json_response(union)
        wanted = request.path.removeprefix(_MODELS + "/")
        cards = union["data"]
        assert isinstance(cards, list)
        for card in cards:
            if card["id"] == wanted:
                return json_response(card)
        raise ApiFailure(model_not_found(wanted))


def _carries(parsed: ParsedRequest, given: Mapping[str, str]) -> bool:
    """Whether we can carry its answer; a gathered one has none of the headers that vLLM adds for a client who asks."""
    carriage = parsed.carriage
    return carriage is not None and not (carriage.gathers and _LOAD_HEADER in given)


def _unless(denied: Denied | None) -> None:
    """:raises ApiFailure: 429 for a limit that is reached, 400 for one that the request can never keep."""
    if denied is None:
        return
    if denied.after_s is None:
        raise ApiFailure(ApiError(400, "client_limit_exceeded", denied.message))
    raise ApiFailure(ApiError(429, "client_limit_reached", denied.message, retry_after_s=denied.after_s))


def most_tokens(parsed: ParsedRequest) -> int:
    """Tokens that a request is counted for before it runs: its prompts', and the most that it asks for."""
    return parsed.est_prompt_tokens + (parsed.max_tokens or 0) * parsed.answers * parsed.prompts


#: Bytes of a body from which it is parsed in a thread.
_LARGE_BODY = 1024 * 1024


def refusal_response(refusal: Refusal, rid: str) -> web.Response:
    """Return the answer to a request that nobody runs."""
    headers = {REQUEST_ID: rid}
    if refusal.retry_after_s is not None:
        headers["Retry-After"] = str(refusal.retry_after_s)
    return web.Response(status=refusal.status, body=refusal.body(), content_type="application/json", headers=headers)
