"""The doctor: each check told what it should find, nvidia-smi's words read, and the command on a real cluster."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from node.cli import main
from node.doctor import cluster as of_cluster
from node.doctor import host
from node.doctor.checks import examine, well
from node.doctor.facts import Facts, Gpu, Peer, Port
from node.doctor.finding import Finding, Grade
from node.doctor.nvidia import parse_gpus, parse_topology
from node.settings import GIB
from tests.node.fakes.cluster import cluster

H100 = Gpu(0, "NVIDIA H100 80GB HBM3", 81559, "570.1")
STATE: dict[str, Any] = {
    "self": "a",
    "engine": {"state": "ready"},
    "members": [
        {"name": "a", "state": "alive", "version": "1", "rtt_ms": None, "fingerprints": {"m": "aa"}},
        {"name": "b", "state": "alive", "version": "1", "rtt_ms": 0.5, "fingerprints": {"m": "aa"}},
    ],
    "gossip": {"counters": {}},
}
WELL = Facts(
    state=STATE,
    ports=(Port("HTTP", 8100, "ours"),),
    peers=(Peer("b", "alive", "1", clock_offset_s=0.4, path_mtu=1500),),
    shm_total=400 * GIB,
    shm_free=200 * GIB,
    gpus=(H100, replace(H100, index=1)),
    links={(0, 1): "NV18"},
    python="3.11.7",
    grapevine="0.1.0",
    vllm="0.32.1",
    mdns=frozenset({"a", "b"}),
    max_files=65536,
)


def told(**more: Any) -> dict[str, Any]:
    return {**STATE, **more}


def members(*changes: dict[str, Any]) -> dict[str, Any]:
    both = [{**member, **change} for member, change in zip(STATE["members"], changes, strict=True)]
    return told(members=both)


def test_a_healthy_cluster_has_nothing_but_fine_findings() -> None:
    findings = examine(WELL)
    assert {finding.grade for finding in findings} == {Grade.FINE} and well(findings)
    topics = {finding.topic for finding in findings}
    assert topics == {
        "node", "ports", "versions", "GPU", "GPU topology", "shared memory", "members", "MTU", "clock", "keys",
        "models", "mDNS",
    }  # fmt: skip


Check = Callable[[Facts], Any]
CASES: list[tuple[Check, dict[str, Any], Grade, str]] = [
    (host.check_ports, {"ports": (Port("HTTP", 8100, "taken"),)}, Grade.PROBLEM, "8100"),
    (host.check_ports, {"ports": (Port("HTTP", 80, "forbidden"),)}, Grade.PROBLEM, "may not"),
    (host.check_shared_memory, {"shm_total": 64 * 2**20}, Grade.PROBLEM, "too small"),
    (host.check_shared_memory, {"shm_total": 16 * GIB}, Grade.WARNING, "half of the GPUs' memory"),
    (host.check_shared_memory, {"shm_total": None}, Grade.WARNING, "missing"),
    (host.check_gpus, {"links": {(0, 1): "SYS"}}, Grade.WARNING, "0-1 SYS"),
    (host.check_gpus, {"gpus": (H100, replace(H100, name="A100"))}, Grade.WARNING, "different kinds"),
    (host.check_gpus, {"vllm_cpu": True}, Grade.PROBLEM, "CPU build"),
    (host.check_gpus, {"gpu_error": "Driver/library version mismatch", "gpus": ()}, Grade.PROBLEM, "mismatch"),
    (host.check_gpus, {"gpus": (), "links": {}}, Grade.NOTE, "no NVIDIA GPU"),
    (host.check_versions, {"vllm": "0.31.0"}, Grade.WARNING, "0.32"),
    (host.check_versions, {"vllm": None}, Grade.NOTE, "not installed"),
    (host.check_limits, {"max_files": 1024}, Grade.WARNING, "1024"),
    (of_cluster.check_node, {"state": None}, Grade.NOTE, "no node"),
    (
        of_cluster.check_node,
        {"state": told(engine={"state": "failed", "reason": "no memory"})},
        Grade.PROBLEM,
        "no memory",
    ),
    (of_cluster.check_node, {"state": told(engine={"state": "starting", "progress": "60 %"})}, Grade.NOTE, "60 %"),
    (of_cluster.check_members, {"peers": (Peer("b", "dead", "1"),)}, Grade.WARNING, "b is dead"),
    (
        of_cluster.check_members,
        {"peers": (Peer("b", "alive", "1", {"KV blocks": "refused"}),)},
        Grade.PROBLEM,
        "refused",
    ),
    (of_cluster.check_members, {"state": members({}, {"rtt_ms": None})}, Grade.WARNING, "UDP"),
    (of_cluster.check_members, {"peers": ()}, Grade.NOTE, "alone"),
    (
        of_cluster.check_members,
        {"peers": (), "state": told(gossip={"failed_dials": {"10.0.0.1:18100": "closes without an answer"}})},
        Grade.PROBLEM,
        "found nobody: 10.0.0.1:18100 closes without an answer",
    ),
    (
        of_cluster.check_clocks,
        {"peers": (Peer("b", "alive", "1", clock_offset_s=-30.0),)},
        Grade.WARNING,
        "30 s behind",
    ),
    (of_cluster.check_mtu, {"peers": (Peer("b", "alive", "1", path_mtu=1280),)}, Grade.WARNING, "1280"),
    (
        of_cluster.check_keys,
        {"state": told(gossip={"counters": {"unknown_key": 7}})},
        Grade.PROBLEM,
        "7 gossip packets",
    ),
    (of_cluster.check_keys, {"state": told(gossip={"counters": {"wrong_cluster": 2}})}, Grade.NOTE, "another label"),
    (of_cluster.check_models, {"state": members({}, {"fingerprints": {"m": "bb"}})}, Grade.WARNING, "(a; b)"),
    (of_cluster.check_models, {"state": members({}, {"fingerprints": {"m": ""}})}, Grade.NOTE, "b serve m without"),
    (of_cluster.check_same_version, {"state": members({}, {"version": "2"})}, Grade.WARNING, "1: a; 2: b"),
    (of_cluster.check_mdns, {"mdns": frozenset()}, Grade.NOTE, "none of the members"),
    (of_cluster.check_mdns, {"mdns": None, "mdns_error": "no multicast"}, Grade.NOTE, "no multicast"),
]


@pytest.mark.parametrize(("check", "change", "grade", "words"), CASES)
def test_each_check_finds_its_fault_and_says_what_to_do(
    check: Check, change: dict[str, Any], grade: Grade, words: str
) -> None:
    findings: list[Finding] = list(check(replace(WELL, **change)))
    (found,) = [finding for finding in findings if words in finding.text]
    assert found.grade is grade
    assert found.mend or grade is Grade.NOTE


def test_a_host_without_anything_is_examined_all_the_same() -> None:
    assert well(examine(replace(Facts(), shm_total=8 * GIB, shm_free=8 * GIB)))


TOPOLOGY = """
\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47
GPU1\tNV18\t X \tPHB\tSYS\t0-47
GPU2\tSYS\tPHB\t X \tSYS\t48-95
NIC0\tPIX\tSYS\tSYS\t X

Legend:
  X    = Self
"""


def test_the_topology_of_nvidia_smi_is_read() -> None:
    assert parse_topology(TOPOLOGY) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "PHB"}
    assert parse_topology("") == {}


def test_the_list_of_nvidia_smi_is_read_and_shared_memory_has_no_size() -> None:
    text = "0, NVIDIA H100 80GB HBM3, 81559, 570.1\n1, NVIDIA GB10, [N/A], 580\n"
    assert parse_gpus(text) == (H100, Gpu(1, "NVIDIA GB10", 0, "580"))
    with pytest.raises(ValueError, match="no devices"):
        parse_gpus("no devices were found")


@given(st.text(max_size=300))
def test_whatever_a_tool_prints_is_read_or_refused(text: str) -> None:
    parse_topology(text)
    with contextlib.suppress(ValueError):
        parse_gpus(text)


async def test_the_command_examines_a_real_cluster() -> None:
    async with cluster(2) as nodes:
        args = ["doctor", "--json", "--no-mdns", "--node", nodes[0].url]
        result = await asyncio.to_thread(CliRunner().invoke, main, args, env={"COLUMNS": "200"})
        findings = json.loads(result.output)["findings"]
        reach = [finding for finding in findings if finding["topic"] in ("members", "reach", "clock", "keys")]
        assert {finding["grade"] for finding in reach} == {"fine"}, reach
        assert any("1 peers are alive and reachable" in finding["text"] for finding in reach)
        port = nodes[0].port
        alone = await asyncio.to_thread(
            CliRunner().invoke, main, ["doctor", "--no-mdns", "--port", str(port)],
            env={"GRAPEVINE_STATE_DIR": str(nodes.folder / "nowhere")},
        )  # fmt: skip
        assert alone.exit_code == 1 and f"port {port} (HTTP) is taken" in alone.output and "->" in alone.output


def test_a_node_that_was_named_and_is_not_there_is_an_error() -> None:
    assert CliRunner().invoke(main, ["doctor", "--no-mdns", "--node", "127.0.0.1:1"]).exit_code == 3
