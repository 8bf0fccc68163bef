"""What the node says that the commands ask."""

from __future__ import annotations

STATE = {
    "self": "a",
    "cluster": "home",
    "members": [
        {
            "name": "a", "state": "alive", "incarnation": 3, "address": "127.0.0.1:18100", "state_age_s": 12.3,
            "rtt_ms": None, "models": ["SmolLM2"], "load_age_s": 0.21, "load_seq": 9, "digest_size": 42,
            "load": {"ready": True, "draining": False, "running": 2, "waiting": 1, "kv_use": 0.255, "ttft_p50_ms": 87},
        },
        {"name": "b[x]", "state": "dead", "state_age_s": 4.0, "models": [], "load": None},
        {"name": "c"},
    ],
    "engine": {"state": "failed", "reason": "the model /x does not exist"},
}  # fmt: skip


EXPLAINED = {
    "plan": {"target": "a", "source": "b", "policy": "cost", "reason": "prefix"},
    "candidates": [{"node": "a", "total_ms": 12.345, "source": None}, {"node": "b", "total_ms": 99.0, "source": "a"}],
    "excluded": [{"node": "c", "why": "not ready"}],
}


RECENT = {
    "decisions": [
        {"target": "a", "reason": "prefix 6 chunks", "model": "m", "ago_s": 3.0, "status": 200, "predicted_ms": 40.2,
         "ran_ms": 44.9, "stream": True, "cached_tokens": 768, "predicted_cached_tokens": 800},
        {"target": None, "reason": "refused", "status": 503},
    ],
    "forecast": {"streams": 1, "error_median": 0.105, "cached_tokens": 768, "predicted_cached_tokens": 800},
}  # fmt: skip
