"""Request bodies that tests send."""

from __future__ import annotations

import json

CHAT = "/v1/chat/completions"


def chat(model: str | None = "m", **more: object) -> bytes:
    body: dict[str, object] = {"messages": [{"role": "user", "content": "hi"}], **more}
    if model is not None:
        body["model"] = model
    return json.dumps(body).encode()
