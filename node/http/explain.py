"""What would be decided, and what was: both guarded like the requests themselves.

- ``POST /route/explain``: the cost of every candidate and the choice for a request body; nothing is run.
- ``GET /route/recent``: the last decisions of this node with what came of them. No text of any prompt.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from node.decisions import MAX_DECISIONS, DecisionLog
from node.explain import explain
from node.http.errors import ApiError, ApiFailure, json_response
from node.http.openai import OpenAi
from node.relay.dispatch import Dispatcher

#: The path a body is taken for when ``?path=`` does not say.
_DEFAULT_PATH = "/v1/chat/completions"
#: Longest number in a query.
_MAX_DIGITS = 9


class Explain:
    """The routes that explain routing."""

    def __init__(self, openai: OpenAi, dispatcher: Dispatcher, log: DecisionLog, clock: Callable[[], float]) -> None:
        self._openai = openai
        self._dispatcher = dispatcher
        self._log = log
        self._clock = clock

    async def explain(self, request: web.BaseRequest) -> web.Response:
        """Decide and tell. 200 also for a refusal: the question was answered."""
        client = self._openai.authorize(request)
        path = request.query.get("path") or _DEFAULT_PATH
        with self._openai.bodies.hold() as held:
            call = await self._openai.take(request, path, self._clock(), held, client)
            decision, view = self._dispatcher.explain(call.parsed, call.options)
            return json_response(explain(view, call.parsed, decision))

    async def recent(self, request: web.BaseRequest) -> web.Response:
        """Tell the last decisions, newest first; ``?limit=`` at most so many."""
        self._openai.authorize(request)
        given = request.query.get("limit", str(MAX_DECISIONS))
        if not given.isascii() or not given.isdigit() or len(given) > _MAX_DIGITS:
            raise ApiFailure(ApiError(400, "invalid_option", "limit must be a number of decisions, such as ?limit=20."))
        return json_response(self._log.recent(self._clock(), int(given)))
