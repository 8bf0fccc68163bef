"""One span of a request, and how its context travels: in the header `traceparent` (W3C Trace Context)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from node.relay.headers import HeaderList

Attributes = Mapping[str, str | int | float | bool]

_PROPAGATOR = TraceContextTextMapPropagator()
_CARRIED = ("traceparent", "tracestate")
#: Longest text of an attribute or an error, characters.
MAX_TEXT = 400


class Trace:
    """A span that is open. `end` it once; more is no harm."""

    __slots__ = ("_context", "_span", "_tracer", "engine")

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._context = set_span_in_context(span)
        #: The span of the engine, while an attempt on it runs (`node.tracing.runners`).
        self.engine: Trace | None = None

    def child(self, name: str, attributes: Attributes, *, kind: SpanKind = SpanKind.INTERNAL) -> Trace:
        """Begin a span within this one."""
        return begin(self._tracer, name, attributes, parent=self._context, kind=kind)

    def past(self, name: str, seconds: float, attributes: Attributes) -> None:
        """Note something within this span that took so long and has just ended."""
        now = time.time_ns()
        begun = now - round(seconds * 1e9)
        span = self._tracer.start_span(name, context=self._context, attributes=clipped(attributes), start_time=begun)
        span.end(now)

    def event(self, name: str, attributes: Attributes) -> None:
        """Note something that has just happened."""
        self._span.add_event(name, clipped(attributes))

    def end(self, attributes: Attributes | None = None, *, error: str = "") -> None:
        """End it. ``error`` says what went wrong; empty where nothing did."""
        if not self._span.is_recording():
            return
        if attributes:
            self._span.set_attributes(clipped(attributes))
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error[:MAX_TEXT]))
        self._span.end()

    @property
    def tag(self) -> str:
        """The context as one short text, for whoever has no headers."""
        return dict(self.carried()).get(_CARRIED[0], "")

    def carried(self) -> HeaderList:
        """The headers that take this span to whoever works on it."""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, self._context)
        return list(carrier.items())


def traceparent(tag: str) -> Context:
    """The context in a tag of a peer; an empty one where it makes no sense."""
    return _PROPAGATOR.extract({_CARRIED[0]: tag}, Context())


def begin(
    tracer: Tracer,
    name: str,
    attributes: Attributes,
    *,
    parent: Context | None,
    kind: SpanKind,
    ago_s: float = 0.0,
) -> Trace:
    """Begin a span, which has really begun ``ago_s`` seconds ago."""
    start = time.time_ns() - round(ago_s * 1e9)
    return Trace(
        tracer, tracer.start_span(name, context=parent, kind=kind, attributes=clipped(attributes), start_time=start)
    )


def parent_in(headers: Iterable[tuple[str, str]]) -> Context:
    """The context that a caller sent; an empty one where there is none or it makes no sense."""
    carrier = {lower: value for name, value in headers if (lower := name.lower()) in _CARRIED}
    return _PROPAGATOR.extract(carrier, Context())


def without_context(headers: Iterable[tuple[str, str]]) -> HeaderList:
    """The headers without a caller's context: what is behind us works within our span."""
    return [item for item in headers if item[0].lower() not in _CARRIED]


def clipped(attributes: Attributes) -> Attributes:
    """No text longer than `MAX_TEXT`."""
    return {name: value[:MAX_TEXT] if isinstance(value, str) else value for name, value in attributes.items()}
