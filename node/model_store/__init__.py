"""The default model: fetched, checked and converted once, then shared by all nodes of the host."""

from node.model_store.source import DEFAULT_MODEL, Source
from node.model_store.store import ModelStore, ensure_default_model, fetch_default_model

__all__ = ["DEFAULT_MODEL", "ModelStore", "Source", "ensure_default_model", "fetch_default_model"]
