"""Names, units and labels of the metrics; the documentation and the dashboard name those that exist and no others."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from node.engine_metrics import with_node
from tests.node.fakes.certificates import Authority
from tests.node.fakes.client import ask
from tests.node.fakes.cluster import cluster
from tests.node.http.bodies import CHAT, chat

ROOT = Path(__file__).parents[2]
UNITS = ("seconds", "bytes", "ratio", "tokens", "blocks", "requests", "chunks", "info")
#: Gauges and counters of things that have no unit.
COUNTED = (
    "admin_calls",
    "client_refusals",
    "retries",
    "pulls",
    "members",
    "engine_ready",
    "draining",
    "broken_answers",
    "carries",
    "gathered_answers",
    "denials",
    "kv_busy_answers",
    "kv_refused_connections",
    "kv_unlike_nodes",
    "remote_errors",
    "silent_zero_hits",
    "worker_restarts",
    "workers",
)
LABELS = {"place", "status", "why", "cause", "result", "reason", "way", "what", "state", "node", "cluster", "version"}
#: At most as many values as there are clients in the file.
LABELS |= {"client", "limit"}
KEY = "a-key-of-a-client"
SUFFIXES = ("_total", "_bucket", "_count", "_sum", "_created")


@pytest.fixture(scope="module")
def text() -> str:
    return asyncio.run(scraped())


async def scraped() -> str:
    """The page of a node that has everything: a pool, a certificate, a client, workers."""
    async with cluster() as nodes:
        authority = Authority(nodes.folder / "ca")
        certificate, key = authority.issue()
        clients = nodes.folder / "clients"
        clients.write_text(f"one {KEY}\n")
        tls: dict[str, Any] = {"tls_cert": str(certificate), "tls_key": str(key)}
        a = await nodes.add("a", kv=True, kv_pool_gib=0.01, clients_file=str(clients), workers=2, **tls)
        trust = authority.trust()
        for model in ("m", "none"):
            await ask(a.port, "POST", CHAT, (("Authorization", f"Bearer {KEY}"),), chat(model), tls=trust)
        return (await ask(a.port, "GET", "/metrics", tls=trust)).body.decode()


def base(name: str) -> str:
    return next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)


def ours(text: str) -> dict[str, Any]:
    """Our families by name, without the client library's times of creation (gauges of their own in this format)."""
    families = text_string_to_metric_families(text)
    ours = (family for family in families if family.name.startswith("grapevine_"))
    return {family.name: family for family in ours if not family.name.endswith("_created")}


def test_every_name_ends_with_its_unit_and_labels_are_few(text: str) -> None:
    for name, family in ours(text).items():
        short = name.removeprefix("grapevine_")
        assert short.endswith(UNITS) or short in COUNTED, name
        assert family.documentation.endswith((".", "start.")), name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} <= LABELS, sample
            assert family.type != "counter" or sample.name.endswith(("_total", "_created")), sample


def test_the_page_of_metrics_is_well_formed_with_those_of_the_engine(text: str) -> None:
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["vllm:demo"].samples[0].labels == {"node": "a"}
    assert families["grapevine_build_info"].samples[0].labels["cluster"] == "default"
    counted = [s for s in families["grapevine_requests"].samples if s.value and not s.name.endswith("_created")]
    assert {(s.labels["place"], s.labels["status"]) for s in counted} == {("local", "200"), ("refused", "404")}


def test_the_documentation_names_every_metric_and_no_other(text: str) -> None:
    told = {base(name) for name in re.findall(r"`(grapevine_\w+)", (ROOT / "docs" / "metrics.md").read_text())}
    assert told == set(ours(text))


def test_the_dashboard_names_metrics_that_exist(text: str) -> None:
    board = json.loads((ROOT / "docs" / "grafana" / "grapevine.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    assert len(queries) > 25
    named = {name for query in queries for name in re.findall(r"grapevine_\w+", query)}
    exist = ours(text)
    samples = {sample.name for family in exist.values() for sample in family.samples}
    for name in named:
        # On a node where nothing has gone wrong yet: what begins with its first event shows no rate of it.
        assert base(name) in exist and name in samples, name
        kind = exist[base(name)].type
        assert name.endswith({"counter": "_total", "histogram": "_bucket"}.get(kind, "")), (name, kind)
    for query in queries:
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}"), query
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_dashboard_names_metrics_that_vllm_has() -> None:
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    folder = Path(found.origin).parent / "v1" / "metrics"
    source = "".join(path.read_text() for path in folder.glob("*.py"))
    board = (ROOT / "docs" / "grafana" / "grapevine.json").read_text()
    named = set(re.findall(r"vllm:\w+", board))
    assert len(named) >= 5 and [name for name in named if f'"{base(name)}"' not in source] == []


@pytest.mark.parametrize(
    ("line", "labelled"),
    [
        (b"vllm:x 1", b'vllm:x{node="n"} 1'),
        (b"vllm:x{} 1", b'vllm:x{node="n"} 1'),
        (b'vllm:x{a="b",le="+Inf"} 1 1700', b'vllm:x{node="n",a="b",le="+Inf"} 1 1700'),
        (b'vllm:x{a="}\\"{"} 2', b'vllm:x{node="n",a="}\\"{"} 2'),
        (b'vllm:x{a="b",node="theirs"} 2', b'vllm:x{a="b",node="theirs"} 2'),
        (b"# HELP vllm:x about node", b"# HELP vllm:x about node"),
        (b"", b""),
        (b"nonsense", b"nonsense"),
        (b'x{a="unclosed 1', b'x{a="unclosed 1'),
    ],
)
def test_the_node_is_added_to_each_sample(line: bytes, labelled: bytes) -> None:
    assert with_node(line, "n") == labelled


@given(st.binary(max_size=200))
def test_whatever_an_engine_says_is_passed_on(text: bytes) -> None:
    result = with_node(text, "n")
    assert result.count(b"\n") == text.count(b"\n")
    assert result.replace(b'{node="n"}', b"").replace(b'node="n",', b"").replace(b"{}", b"") == text.replace(b"{}", b"")
