"""``/v1/*``, ``/tokenize``, ``/detokenize``: routed by model, relayed as bytes. ``/v1/models`` is the cluster's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from node.http.auth import check_client
from node.http.errors import ApiError, ApiFailure, json_response, model_not_found
from node.http.intake import BodyRoom, Held, first_headers, header_list, parse, read_body, request_id
from node.http.options import TIMEOUT, client_of, read_options, read_priority, with_priority
from node.plan import Refusal
from node.registry import Registry
from node.relay.call import Call
from node.relay.dispatch import Dispatcher
from node.relay.headers import REQUEST_ID, for_upstream, internal, replaced
from node.relay.refused import Refused
from node.settings import Settings

_MODELS = "/v1/models"


class OpenAi:
    """The routes that clients of the OpenAI API use."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        dispatcher: Dispatcher,
        bodies: BodyRoom,
        clock: Callable[[], float],
    ) -> None:
        self.bodies = bodies
        self._settings = settings
        self._registry = registry
        self._dispatcher = dispatcher
        self._clock = clock

    def authorize(self, request: web.BaseRequest) -> None:
        """Check the client's API key.

        :raises ApiFailure: 401.
        """
        if not self._settings.api_key:
            return
        error = check_client(request.headers.get("Authorization"), self._settings.api_key)
        if error is not None:
            raise ApiFailure(error)

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer any request of the API."""
        arrived = self._clock()
        self.authorize(request)
        path = request.raw_path.partition("?")[0]
        if (
            request.method != "POST"
            and request.method in {"GET", "HEAD"}
            and (path == _MODELS or path.startswith(_MODELS + "/"))
        ):
            return self._models(request, path)
        with self.bodies.hold() as held:
            call = await self.take(request, path, arrived, held)
            try:
                return await self._dispatcher.run(call, request)
            except Refused as refused:
                return refusal_response(refused.refusal, call.rid)

    async def take(self, request: web.BaseRequest, path: str, arrived: float, held: Held) -> Call:
        """Read a client's request whole.

        :raises ApiFailure: it cannot be understood or is too large.
        """
        # Any other upgrade is an offer that a server may ignore: some clients offer HTTP/2 with every first request.
        given = first_headers(request)
        if "upgrade" in given and "websocket" in given["upgrade"].lower():
            raise ApiFailure(ApiError(501, "no_upgrade", "Protocol upgrades (WebSocket) are not relayed."))
        headers = header_list(request)
        rid = request_id(request)
        timeout = given.get(TIMEOUT)
        options = read_options(internal(headers), self._registry.known, rid=rid, timeout=timeout)
        body = await read_body(request, self._settings.max_body_mib, held)
        # Parsing a large body takes milliseconds: off the loop, so that streams do not stutter.
        if len(body) > _LARGE_BODY:
            parsed = await asyncio.to_thread(parse, request, path, body)
        else:
            parsed = parse(request, path, body)
        priority = read_priority(given, parsed.priority)
        sent = with_priority(for_upstream(headers), priority)
        keys = bool(self._settings.api_key)
        if keys:  # that key was for us
            sent = replaced(sent, "Authorization", None)
        return Call(
            request.method,
            request.raw_path,
            sent,
            parsed,
            rid,
            options,
            arrived,
            client=client_of(given.get("authorization"), request.remote, keys=keys),
            priority=priority or 0,
            carries=parsed.carriage is not None,
        )

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


#: Bytes of a body from which it is parsed in a thread.
_LARGE_BODY = 1024 * 1024


def refusal_response(refusal: Refusal, rid: str) -> web.Response:
    """Return the answer to a request that nobody runs."""
    headers = {REQUEST_ID: rid}
    if refusal.retry_after_s is not None:
        headers["Retry-After"] = str(refusal.retry_after_s)
    return web.Response(status=refusal.status, body=refusal.body(), content_type="application/json", headers=headers)
