"""All checks, in the order in which they are shown."""

from __future__ import annotations

from node.doctor import cluster, encryption, host
from node.doctor.facts import Facts
from node.doctor.finding import Finding, Grade

CHECKS = (
    cluster.check_node,
    host.check_ports,
    host.check_versions,
    cluster.check_same_version,
    host.check_gpus,
    host.check_shared_memory,
    host.check_limits,
    cluster.check_members,
    cluster.check_mtu,
    cluster.check_clocks,
    cluster.check_keys,
    encryption.check_certificate,
    encryption.check_peer_certificates,
    encryption.check_peer_tls,
    encryption.check_kv_tls,
    cluster.check_models,
    cluster.check_mdns,
)


def examine(facts: Facts) -> list[Finding]:
    """Everything that was found, in a fixed order."""
    return [finding for check in CHECKS for finding in check(facts)]


def well(findings: list[Finding]) -> bool:
    """Whether nothing is broken; warnings do not count."""
    return all(finding.grade is not Grade.PROBLEM for finding in findings)
