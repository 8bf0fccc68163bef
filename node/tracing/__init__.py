"""OpenTelemetry traces: one trace across entry, target, source and engine.

Off unless asked for: then nothing of this is imported, and a request costs one look at None on each node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from node.errors import SettingsError
from node.settings import Settings

if TYPE_CHECKING:
    from node.tracing.tracing import Tracing

__all__ = ["make_tracing"]


def make_tracing(settings: Settings) -> Tracing | None:
    """What the settings ask for. :raises SettingsError: OpenTelemetry is not installed."""
    if not settings.otlp_traces_endpoint:
        return None
    try:
        from node.tracing.export import exporting

        return exporting(settings)
    except ImportError as error:
        raise SettingsError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}): pip install 'vllm-grapevine[otel]'"
        ) from error
