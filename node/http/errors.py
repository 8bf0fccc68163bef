"""Errors as OpenAI's API words them, so that every client library raises what it would raise there."""

from __future__ import annotations

from dataclasses import dataclass

import orjson
from aiohttp import web

#: Of every other status below 500 it is the request that is wrong.
_TYPES = {403: "permission_error", 429: "rate_limit_error"}
_JSON = "application/json"


@dataclass(frozen=True, slots=True)
class ApiError:
    """One error answer. ``code`` is a stable word; ``retry_after_s`` becomes Retry-After."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: int | None = None

    def body(self) -> bytes:
        """Return the JSON body."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    def response(self, headers: dict[str, str] | None = None) -> web.Response:
        """Return the answer for a client."""
        sent = dict(headers or {})
        if self.retry_after_s is not None:
            sent["Retry-After"] = str(self.retry_after_s)
        return web.Response(status=self.status, body=self.body(), content_type=_JSON, headers=sent)


class ApiFailure(Exception):
    """Raised inside a handler to answer with an `ApiError`."""

    def __init__(self, error: ApiError, headers: dict[str, str] | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.headers = headers


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Answer with JSON."""
    body = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    return web.Response(status=status, body=body, content_type=_JSON, headers=headers)


def model_not_found(model: str) -> ApiError:
    """Say that no node of the cluster serves ``model``, as OpenAI words it."""
    message = f"The model `{model}` does not exist or you do not have access to it."
    return ApiError(404, "model_not_found", message, param="model")
