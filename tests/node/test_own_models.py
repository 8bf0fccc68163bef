"""The records of what our engine serves."""

from __future__ import annotations

import pytest

from node.engine.events import EngineModel
from node.models import MAX_KV_TOKENS, decode
from node.own_models import own_models

SERVED = (EngineModel("base", max_model_len=4096), EngineModel("tuned", parent="base"))


@pytest.mark.parametrize(("told", "known"), [(0, 0), (46_592, 46_592), (MAX_KV_TOKENS + 1, MAX_KV_TOKENS)])
def test_all_models_of_an_engine_share_its_cache_and_peers_can_read_its_size(told: int, known: int) -> None:
    records = own_models(SERVED, None, name="a", created=1, kv_tokens=told)
    assert [decode(record.encode()).kv_tokens for record in records.values()] == [known, known]
