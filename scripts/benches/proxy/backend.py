"""A backend as fast as Python gets, that speaks OpenAI's chat protocol: what it costs to reach it is what is measured.

What is generated is a function of the request: `max_tokens` tokens, at once or, with `seed` N > 0, N ms apart. Every
chunk is different, since some routers end a stream that repeats itself. The parser is for this bench's own requests and
routers: a body has a Content-Length or comes in chunks, and nothing more is looked at.

    python -m benches.proxy.backend --port 9000 --name a
"""

from __future__ import annotations

import argparse
import asyncio
import re

import uvloop

#: Largest request kept, bytes.
MAX_REQUEST = 8 * 1024 * 1024
MODEL = "bench"
#: A chunk that is not paced goes out by itself; so many are handed to the socket between two looks at others.
BURST = 4

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:[ \t]*chunked", re.IGNORECASE)
_TOKENS = re.compile(rb'"max_(?:completion_)?tokens":\s*(\d+)')
_PACE = re.compile(rb'"seed":\s*(\d+)')
_STREAM = re.compile(rb'"stream":\s*true')


def _json(body: bytes, status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 " + status + b"\r\ncontent-type: application/json\r\ncontent-length: "
    return head + str(len(body)).encode() + b"\r\n\r\n" + body


class Answers:
    """The answers of one backend; `model` is what it serves."""

    def __init__(self, name: str, model: str) -> None:
        self._name = name.encode()
        self._model = model.encode()
        self._whole: dict[int, bytes] = {}
        listed = b'{"object":"list","data":[{"id":"%s","object":"model","created":1,"owned_by":"bench"}]}' % self._model
        self.fixed = {
            b"/health": _json(b"{}"),
            b"/v1/models": _json(listed),
            b"/version": _json(b'{"version":"bench"}'),
            b"/get_server_info": _json(b'{"model_path":"bench","served_model_name":"%s"}' % self._model),
            b"/server_info": _json(b'{"model_path":"bench","served_model_name":"%s"}' % self._model),
            b"/get_model_info": _json(b'{"model_path":"bench","is_generation":true}'),
            b"/model_info": _json(b'{"model_path":"bench","is_generation":true}'),
        }
        self.absent = _json(b'{"error":{"message":"not here"}}', b"404 Not Found")

    def whole(self, tokens: int) -> bytes:
        """An answer that is no stream."""
        made = self._whole.get(tokens)
        if made is None:
            text = b" ".join(b"word%d" % i for i in range(tokens))
            made = self._whole[tokens] = _json(
                b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"%s","system_fingerprint":"backend-%s",'
                b'"choices":[{"index":0,"message":{"role":"assistant","content":"%s"},"logprobs":null,'
                b'"finish_reason":"stop"}],"usage":{"prompt_tokens":5,"total_tokens":%d,"completion_tokens":%d}}'
                % (self._model, self._name, text, 5 + tokens, tokens)
            )
        return made

    def event(self, number: int) -> bytes:
        """One chunk of a stream, framed."""
        data = (
            b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"%s",'
            b'"system_fingerprint":"backend-%s","choices":[{"index":0,"delta":{"content":" word%d"},"logprobs":null,'
            b'"finish_reason":null}]}\n\n' % (self._model, self._name, number)
        )
        return b"%x\r\n%s\r\n" % (len(data), data)


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Connection(asyncio.Protocol):
    """One client of the backend."""

    def __init__(self, answers: Answers, loop: asyncio.AbstractEventLoop) -> None:
        self._answers = answers
        self._loop = loop
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; it is uvloop's."""
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop what streams."""
        self._transport = None

    def pause_writing(self) -> None:
        """Hold a stream back: the router is slow."""
        self._paused = True

    def resume_writing(self) -> None:
        """Go on."""
        self._paused = False

    def data_received(self, data: bytes) -> None:
        """Answer every whole request at hand."""
        self._buffer += data
        if len(self._buffer) > MAX_REQUEST and self._transport is not None:
            self._transport.abort()
            return
        while (request := self._next()) is not None:
            self._answer(*request)

    def _next(self) -> tuple[bytes, bytes] | None:
        """Take path and body of the next request out of the buffer, None while it is not whole."""
        buffer = self._buffer
        end = buffer.find(b"\r\n\r\n")
        if end < 0:
            return None
        head, start = bytes(buffer[:end]), end + 4
        if (length := _LENGTH.search(head)) is not None:
            stop = start + int(length[1])
        elif _CHUNKED.search(head) is not None:
            last = buffer.find(b"0\r\n\r\n", start)
            if last < 0:
                return None
            stop = last + 5
        else:
            stop = start
        if len(buffer) < stop:
            return None
        body = bytes(buffer[start:stop])
        del buffer[:stop]
        return head.split(b" ", 2)[1], body

    def _answer(self, path: bytes, body: bytes) -> None:
        assert self._transport is not None
        if not path.startswith(b"/v1/chat/completions"):
            self._transport.write(self._answers.fixed.get(path, self._answers.absent))
            return
        limit = _TOKENS.search(body)
        tokens = int(limit[1]) if limit else 8
        if _STREAM.search(body) is None:
            self._transport.write(self._answers.whole(tokens))
            return
        pace = _PACE.search(body)
        wait = int(pace[1]) / 1000 if pace else 0.0
        self._transport.write(STREAM_HEAD)
        self._later(wait, 0, tokens, wait)

    def _later(self, delay: float, number: int, tokens: int, wait: float) -> None:
        if delay:
            self._loop.call_later(delay, self._piece, number, tokens, wait)
        else:
            self._loop.call_soon(self._piece, number, tokens, wait)

    def _piece(self, number: int, tokens: int, wait: float) -> None:
        if self._transport is None:
            return
        if self._paused:
            self._later(0.001, number, tokens, wait)
            return
        for _ in range(1 if wait else BURST):
            if number == tokens:
                self._transport.write(STREAM_END)
                return
            self._transport.write(self._answers.event(number))
            number += 1
        self._later(wait, number, tokens, wait)


async def _serve(port: int, name: str, model: str) -> None:
    loop, answers = asyncio.get_running_loop(), Answers(name, model)
    server = await loop.create_server(lambda: Connection(answers, loop), "127.0.0.1", port, backlog=2048)
    async with server:
        await server.serve_forever()


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--model", default=MODEL)
    options = parser.parse_args()
    uvloop.run(_serve(options.port, options.name, options.model))


if __name__ == "__main__":
    main()
