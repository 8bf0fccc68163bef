"""What may be expected of the cluster, and which requests fit nowhere; by hand-computed numbers."""

from __future__ import annotations

import pytest

from node.load import LoadVector
from node.models import ModelInfo
from node.outlook import PRIOR_USUAL_S, full_peers, outlook
from node.oversize import too_large
from node.prompt import ParsedRequest
from node.view import Candidate, ClusterView, NodeState, Unseen


def candidate(
    name: str, *, length: int = 4096, state: NodeState = NodeState.ALIVE, me: bool = False, **load: object
) -> Candidate:
    vector = LoadVector(ready=True, slots=4, **load)  # type: ignore[arg-type]
    return Candidate(name, vector, state=state, is_self=me, models={"m": ModelInfo("m", max_model_len=length)})


def test_the_outlook_is_the_share_of_one_entry_in_all_places() -> None:
    view = ClusterView((candidate("a", e2e_p50_ms=1000.0), candidate("b", e2e_p50_ms=3000.0)))
    assert outlook(view, "m").usual_s == 2.0
    assert outlook(view, "m").places_per_s == pytest.approx(8 / 2.0 / 2)
    alone = ClusterView((candidate("a"), Candidate("b", LoadVector())))
    assert outlook(alone, "m").usual_s == PRIOR_USUAL_S
    assert outlook(alone, "m").places_per_s == pytest.approx(4 / PRIOR_USUAL_S / 2)
    assert outlook(ClusterView(()), None).places_per_s > 0


def test_a_peer_is_full_by_its_vector_and_what_we_sent_and_got_back_since() -> None:
    view = ClusterView(
        (
            candidate("me", me=True, running=9),
            candidate("free", running=3),
            candidate("full", running=3, waiting=1),
            candidate("ours", running=3),
            candidate("freed", running=4),
            candidate("dead", running=4, state=NodeState.DEAD),
        ),
        unseen={"ours": Unseen(sent=1), "freed": Unseen(finished=1)},
    )
    assert full_peers(view, "m") == ["full", "ours"]
    assert full_peers(view, "other") == []


@pytest.mark.parametrize(
    ("request_", "lengths", "refused"),
    [
        (ParsedRequest("/v1/x", "m", max_tokens=4097), (4096, 2048), True),
        (ParsedRequest("/v1/x", "m", max_tokens=4096), (4096, 2048), False),
        (ParsedRequest("/v1/x", "m", max_tokens=3000), (4096, 2048), False),
        (ParsedRequest("/v1/x", "m", least_tokens=4097), (4096,), True),
        (ParsedRequest("/v1/x", "m", least_tokens=4097), (4096, 0), False),
        (ParsedRequest("/v1/x", "m", least_tokens=4097), (), False),
        (ParsedRequest("/v1/x", "m"), (4096,), False),
    ],
)
def test_only_what_is_certain_is_refused(request_: ParsedRequest, lengths: tuple[int, ...], refused: bool) -> None:
    view = ClusterView(tuple(candidate(f"n{length}", length=length) for length in lengths))
    refusal = too_large(view, request_, "m")
    assert (refusal is not None) is refused
    if refusal is not None:
        assert (refusal.status, refusal.code) == (400, "context_length_exceeded") and "4096" in refusal.message


def test_a_context_that_nobody_has_any_more_does_not_count() -> None:
    view = ClusterView((candidate("a"), candidate("b", length=9999, state=NodeState.DEAD)))
    assert too_large(view, ParsedRequest("/v1/x", "m", max_tokens=5000), "m") is not None
