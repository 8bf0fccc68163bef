"""Where spans go: to a collector, in batches, from a thread of the SDK with a bounded queue."""

from __future__ import annotations

from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from node import __version__
from node.settings import Settings
from node.tracing.tracing import Tracing

#: Where collectors take traces (OTLP specification, "OTLP/HTTP request").
_PATH = "/v1/traces"
#: Seconds for one batch, tries included: so long may a collector that is away hold up the end of a node.
EXPORT_S = 3.0


def exporting(settings: Settings) -> Tracing:
    """Send spans to the collector of the settings. The variables OTEL_* of the SDK count: sampling, headers, limits."""
    exporter = OTLPSpanExporter(endpoint=endpoint(settings.otlp_traces_endpoint), timeout=EXPORT_S)
    provider = TracerProvider(resource=resource(settings), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(settings.name, provider)


def resource(settings: Settings) -> Resource:
    """Who sends them."""
    return Resource.create(
        {
            "service.name": "grapevine",
            "service.namespace": settings.cluster,
            "service.instance.id": settings.name,
            "service.version": __version__,
        }
    )


def endpoint(url: str) -> str:
    """The usual path, where the URL has none."""
    return url if urlsplit(url).path.strip("/") else url.rstrip("/") + _PATH
