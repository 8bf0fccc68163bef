"""Whom our KV blocks could be left to, and who holds them already, as the registry knows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from node.registry import Registry
from node.view import Candidate


class Heirs:
    """Peers that take work and whose engine could use our blocks."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def candidates(self) -> dict[str, Candidate]:
        """Return them by name, those with the least to do first."""
        model, ours = self._model(), self._registry.roster.get(self._registry.name)
        if ours is None or not model:
            return {}
        fingerprint = ours.models[model].fingerprint
        found: list[Candidate] = []
        for name in self._registry.roster.names():
            node = self._registry.roster.get(name)
            if node is None or node is ours or not node.exchanges_kv_with(ours):
                continue
            offered = node.offers.get(model)
            if offered is not None and offered.fingerprint == fingerprint and self._registry.kv_address(name):
                found.append(node)
        return {node.name: node for node in sorted(found, key=lambda node: (busy(node), node.name))}

    def held(self, chunks: Sequence[int]) -> Mapping[str, int]:
        """Return the nodes other than ours that hold these chunks, how many from the first on, and do not go either."""
        held = self._registry.holders(self._model(), chunks)
        return {
            name: count
            for name, count in held.items()
            if name != self._registry.name and not self._registry.load(name).draining
        }

    def _model(self) -> str:
        """A model of our engine whose blocks may move; all of them have one fingerprint."""
        ours = self._registry.roster.get(self._registry.name)
        models = ours.models if ours is not None else {}
        return next((name for name, info in models.items() if info.fingerprint), "")


def busy(node: Candidate) -> float:
    """The share of a node's places that are taken, 0 where it does not say how many it has."""
    return min(1.0, node.load.active / node.load.slots) if node.load.slots else 0.0
