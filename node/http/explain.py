"""``POST /route/explain``: the cost of every candidate and the choice for a request body; nothing is run."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from node.explain import explain
from node.http.errors import json_response
from node.http.openai import OpenAi
from node.relay.dispatch import Dispatcher

#: The path a body is taken for when ``?path=`` does not say.
_DEFAULT_PATH = "/v1/chat/completions"


class Explain:
    """The route that explains routing."""

    def __init__(self, openai: OpenAi, dispatcher: Dispatcher, clock: Callable[[], float]) -> None:
        self._openai = openai
        self._dispatcher = dispatcher
        self._clock = clock

    async def explain(self, request: web.BaseRequest) -> web.Response:
        """Decide and tell. 200 also for a refusal: the question was answered."""
        self._openai.authorize(request)
        path = request.query.get("path") or _DEFAULT_PATH
        with self._openai.bodies.hold() as held:
            call = await self._openai.take(request, path, self._clock(), held)
            decision, view = self._dispatcher.explain(call.parsed, call.options)
            return json_response(explain(view, call.parsed, decision))
