"""Everything this node knows about the cluster, kept up to date by events; gives the view for a decision.

Feed it with what gossip reports (`member`, `row`, `models`, `prefixes`), with this node's own sends, and ask for
`view`. Candidates are built when gossip changes something, not per request.

Bounded: `MAX_NODES` nodes (dead ones go first), one catalogue each, and the bounds of `PeerPrefixes` and
`OwnSends`. Load vectors are ordered by (incarnation, seq): an older one never replaces a newer one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from node.load import LoadVector
from node.models import ModelInfo
from node.peerprefix import PeerPrefixes
from node.prompt.request import TYPICAL_BYTES_PER_TOKEN
from node.sends import OwnSends
from node.view import PRIOR_REUSE, Candidate, ClusterView, NodeState, Typical

#: Nodes remembered, dead ones included.
MAX_NODES = 2048

#: Seconds that the means over all candidates are kept: they move slowly, and cost a pass over the cluster.
TYPICAL_S = 0.25

#: Models whose bytes per token are learnt, how fast, and the range that is believed.
MAX_RATIOS = 256
RATIO_STEP = 0.05
RATIO_RANGE = (0.5, 16.0)

#: How fast the share of prompts that somebody holds is learnt: half of it in 14 requests.
REUSE_STEP = 0.05

#: Shorter prompts tell more about the chat template than about the text.
MIN_RATIO_BYTES = 2048

_GONE = (NodeState.DEAD, NodeState.LEFT)


class Roster:
    """The mutable whole behind the immutable `ClusterView`."""

    def __init__(self, self_name: str, *, prefixes: PeerPrefixes | None = None, sends: OwnSends | None = None) -> None:
        self.self_name = self_name
        self.prefixes = PeerPrefixes() if prefixes is None else prefixes  # an empty one is false
        self.sends = OwnSends() if sends is None else sends
        #: This node first, if it is known: every decision needs it.
        self._nodes: dict[str, Candidate] = {}
        #: When each node last told us its load itself. One entry a node at most.
        self._told: dict[str, float] = {}
        self._typical: dict[str, Typical] = {}
        self._typical_at = float("-inf")
        #: Emptied whenever a node comes, goes or serves other models.
        self._shortest: dict[str, int] = {}
        self._ratios: OrderedDict[str, float] = OrderedDict()
        self._reuse = PRIOR_REUSE

    def member(
        self,
        name: str,
        state: NodeState,
        *,
        incarnation: int,
        rtt_ms: float | None = None,
        kv_tls: bool | None = None,
    ) -> None:
        """Gossip saw a member or a change of one. A new incarnation has lost its load and its prefixes."""
        known = self._nodes.get(name)
        if known is not None and incarnation < known.incarnation:
            return
        node = known or Candidate(name, LoadVector(), is_self=name == self.self_name)
        if known is None:
            self._shortest = {}
        reborn = incarnation > node.incarnation
        if state in _GONE or reborn:
            self.prefixes.drop(name)
            self.sends.forget(name)
        if reborn:
            node = replace(node, load=LoadVector(), seq=0)
        rtt_ms = node.rtt_ms if rtt_ms is None else rtt_ms
        self._set(replace(node, state=state, incarnation=incarnation, rtt_ms=rtt_ms, kv_tls=kv_tls))
        self._bound()

    def remove(self, name: str) -> None:
        """Forget a node altogether."""
        if self._nodes.pop(name, None) is not None:
            self._shortest = {}
            self._told.pop(name, None)
            self.prefixes.drop(name)
            self.sends.forget(name)

    def row(self, name: str, *, incarnation: int, seq: int, load: LoadVector, age_s: float, now: float) -> bool:
        """A load vector, `age_s` old. False: unknown node, or not newer than what is known.

        A row that was on its way while the node told us its load itself (`fresh`) is older than that, whatever its
        number.
        """
        node = self._nodes.get(name)
        if node is None or (incarnation, seq) <= (node.incarnation, node.seq):
            return False
        as_of = now - max(0.0, age_s)
        if incarnation == node.incarnation and as_of < self._told.get(name, float("-inf")):
            self._set(replace(node, seq=seq))
            return False
        self._set(replace(node, load=load, incarnation=incarnation, seq=seq, as_of=as_of))
        self.sends.vector(name, as_of, node.hop_ms)
        return True

    def fresh(self, name: str, load: LoadVector, now: float) -> None:
        """A vector that came with a node's own answer (a refusal): true now, whatever its sequence number."""
        node = self._nodes.get(name)
        if node is not None:
            self._told[name] = now
            self._set(replace(node, load=load, as_of=now))
            self.sends.vector(name, now, node.hop_ms)

    def rtt(self, name: str, rtt_ms: float) -> None:
        """A round trip was measured."""
        node = self._nodes.get(name)
        if node is not None and node.rtt_ms != rtt_ms:
            self._set(replace(node, rtt_ms=rtt_ms))

    def models(self, name: str, models: Mapping[str, ModelInfo]) -> None:
        """What a node serves now. An empty catalogue of a dead node is not taken: errors name what it served."""
        node = self._nodes.get(name)
        if node is not None and (models or node.state not in _GONE):
            self._shortest = {}
            self._set(replace(node, models=dict(models)))

    def learn_ratio(self, model: str, prompt_bytes: int, prompt_tokens: int) -> None:
        """A finished request had so many bytes of canonical text and so many tokens."""
        if prompt_bytes < MIN_RATIO_BYTES or prompt_tokens <= 0:
            return
        low, high = RATIO_RANGE
        ratio = min(high, max(low, prompt_bytes / prompt_tokens))
        old = self._ratios.get(model, TYPICAL_BYTES_PER_TOKEN)
        self._ratios[model] = old + RATIO_STEP * (ratio - old)
        self._ratios.move_to_end(model)
        if len(self._ratios) > MAX_RATIOS:
            self._ratios.popitem(last=False)

    def asked(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A request of ours goes to a node that should find so many tokens of its prompt."""
        if prompt_tokens > 0:
            self._reuse += REUSE_STEP * (min(1.0, cached_tokens / prompt_tokens) - self._reuse)

    def names(self) -> list[str]:
        """Every known node."""
        return list(self._nodes)

    def get(self, name: str) -> Candidate | None:
        """One node as it is known."""
        return self._nodes.get(name)

    def catalogues(self) -> Iterable[Mapping[str, ModelInfo]]:
        """What live nodes serve, for `/v1/models`."""
        return [node.models for node in self._nodes.values() if node.state not in _GONE]

    def view(self, chunks: Sequence[int], own_load: LoadVector, now: float) -> ClusterView:
        """The view for one decision about a prompt of `chunks`; `own_load` is this node's live vector."""
        if now - self._typical_at > TYPICAL_S:
            self._typical, self._typical_at = {}, now
        candidates = list(self._nodes.values())
        if candidates and candidates[0].is_self:
            candidates[0] = candidates[0].with_load(own_load, now)
        return ClusterView(
            candidates=tuple(candidates),
            matched=self.prefixes.longest(chunks),
            given=self.prefixes.given(chunks),
            reuse=self._reuse,
            unseen=self.sends.unseen,
            bytes_per_token=self._ratios,
            typical=self._typical,
            shortest=self._shortest,
        )

    def _set(self, node: Candidate) -> None:
        if node.is_self and node.name not in self._nodes:
            self._nodes = {node.name: node, **self._nodes}
        self._nodes[node.name] = node

    def _bound(self) -> None:
        while len(self._nodes) > MAX_NODES:
            gone = (name for name, node in self._nodes.items() if node.state in _GONE)
            oldest = next(gone, None) or next(name for name in self._nodes if name != self.self_name)
            self.remove(oldest)
