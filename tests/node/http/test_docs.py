"""docs/http.md names every error code that a client or an administrator can meet."""

import re
from pathlib import Path

from node.eligible import _CAUSES

ROOT = Path(__file__).parents[3]
#: How a code is written in the sources: `ApiError(404, "not_found"`, `Refusal(503, ...`, `_stop(400, ...`, `code="`.
WRITTEN = re.compile(r"""(?:ApiError|Refusal|_stop|_refuse)\(\s*\d{3},\s*"(\w+)"|code="(\w+)\"""")


def test_every_error_code_is_documented() -> None:
    sources = [path for path in (ROOT / "node").rglob("*.py") if path.name not in ("peer.py", "take.py")]
    codes = {code for path in sources for match in WRITTEN.findall(path.read_text()) for code in match if code}
    codes |= {code for _, code, _ in _CAUSES}
    codes -= {"peer_key", "peer_unknown"}  # from node to node
    assert {"not_found", "no_node_answered", "model_loading", "cluster_busy"} <= codes
    text = (ROOT / "docs" / "http.md").read_text()
    assert [code for code in sorted(codes) if f"`{code}`" not in text] == []
