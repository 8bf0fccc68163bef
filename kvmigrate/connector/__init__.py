"""The connector that vLLM loads by `kv_connector_module_path: kvmigrate.connector`.

`connector` and `identity` import vLLM; the rest of the package can be tested without it, so the class that vLLM asks
for by name is imported only then.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "GrapevineConnector":
        from kvmigrate.connector.connector import GrapevineConnector

        return GrapevineConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
