"""The doctor and TLS: certificates and their files, who encrypts requests and KV blocks, and real clusters."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from node.cli import main
from node.doctor import encryption
from node.doctor.certificate import Certificate, Files, of_der, read_files
from node.doctor.facts import Facts, Peer
from node.doctor.finding import Finding, Grade
from tests.node.fakes.certificates import Authority
from tests.node.fakes.cluster import Cluster, cluster

DAY = encryption.DAY_S
NOW = 1_800_000_000.0
GOOD = Certificate(("host-a.example", "10.0.0.1"), NOW - 30 * DAY, NOW + 60 * DAY, b"1")
FILES = Files("/etc/c.pem", "/etc/c.key", GOOD)


def member(name: str, number: int, scheme: str = "https") -> dict[str, Any]:
    address = f"10.0.0.{number}:8100"
    return {"name": name, "state": "alive", "http": address, "url": f"{scheme}://{address}", "kv_encrypted": True}


STATE: dict[str, Any] = {"self": "a", "members": [member("a", 1), member("b", 2)]}
PEER = Peer("b", "alive", "1", host="10.0.0.2", certificate=replace(GOOD, names=("10.0.0.2",)))
WELL = Facts(state=STATE, peers=(PEER,), now=NOW, tls_files=FILES, shown=GOOD)

CHECKS = (
    encryption.check_certificate,
    encryption.check_peer_certificates,
    encryption.check_peer_tls,
    encryption.check_kv_tls,
)


def examined(**change: Any) -> list[Finding]:
    return [finding for check in CHECKS for finding in check(replace(WELL, **change))]


def files(**change: Any) -> dict[str, Any]:
    """The certificate as it is in the files and as it is shown."""
    certificate = replace(GOOD, **change)
    return {"tls_files": replace(FILES, certificate=certificate), "shown": certificate}


def peer(**change: Any) -> dict[str, Any]:
    return {"peers": (replace(PEER, **change),)}


def state(*members: dict[str, Any]) -> dict[str, Any]:
    return {"state": {**STATE, "members": list(members)}}


def test_a_cluster_that_encrypts_well_has_nothing_but_fine_findings() -> None:
    texts = [finding.text for finding in examined() if finding.grade is Grade.FINE]
    assert len(texts) == len(examined()) == 3
    assert "ends on 2027-03-16, its key fits" in texts[0] and "all 2 nodes encrypt" in texts[1]


NO_TLS = {"tls_files": None, "shown": None}
CASES: list[tuple[dict[str, Any], Grade, str]] = [
    ({"tls_files": Files("c", "k", fault="--tls-cert c cannot be read: No such file")}, Grade.PROBLEM, "No such file"),
    (files(ends=NOW - DAY), Grade.PROBLEM, "our certificate has ended on 2027-01-14"),
    (files(ends=NOW + 13 * DAY), Grade.WARNING, "our certificate ends in 13.0 days"),
    (files(begins=NOW + DAY), Grade.PROBLEM, "is good from 2027-01-16 only"),
    (files(names=("host-a.example",)), Grade.NOTE, "is for host-a.example, not for 10.0.0.1"),
    (files(names=("localhost", "127.0.0.1")), Grade.WARNING, "is for localhost, 127.0.0.1, and the node is reached"),
    (files(names=()), Grade.WARNING, "is for no name at all"),
    ({"tls_files": replace(FILES, exposed=True)}, Grade.WARNING, "every user of this host can read or change the key"),
    ({"shown": replace(GOOD, digest=b"2")}, Grade.WARNING, "still shows another certificate than /etc/c.pem"),
    ({"tls_files": None, "shown": replace(GOOD, ends=NOW - 1)}, Grade.PROBLEM, "our certificate has ended"),
    (NO_TLS | state(member("a", 1, "http")), Grade.NOTE, "prompts and answers are in clear"),
    (
        peer(certificate=replace(GOOD, names=("10.0.0.2",), ends=NOW - 1)),
        Grade.PROBLEM,
        "the certificate of b has ended",
    ),
    (peer(certificate=GOOD), Grade.NOTE, "the certificate of b is for host-a.example, not for 10.0.0.2"),
    (state(member("a", 1), member("b", 2, "http")), Grade.WARNING, "in clear to b, and over TLS to 1 nodes"),
    (
        state(member("a", 1), {**member("b", 2), "kv_encrypted": False}),
        Grade.PROBLEM,
        "KV blocks go over TLS at a and in clear at b: none move between the two",
    ),
]


@pytest.mark.parametrize(("change", "grade", "words"), CASES, ids=[words for _, _, words in CASES])
def test_each_fault_of_tls_is_found_with_its_mend(change: dict[str, Any], grade: Grade, words: str) -> None:
    (found,) = [finding for finding in examined(**change) if finding.grade is not Grade.FINE]
    assert words in found.text and found.grade is grade and found.mend


def test_a_certificate_of_a_few_days_is_not_always_about_to_end() -> None:
    short = files(begins=NOW - DAY, ends=NOW + 5 * DAY)
    assert all(finding.grade is Grade.FINE for finding in examined(**short))
    late = files(begins=NOW - 5 * DAY, ends=NOW + DAY)
    assert any(finding.grade is Grade.WARNING for finding in examined(**late))


def test_on_loopback_nobody_is_told_to_encrypt() -> None:
    alone = {"name": "a", "state": "alive", "http": "127.0.0.1:8100", "url": "http://127.0.0.1:8100"}
    assert examined(**NO_TLS, **state(alone), peers=()) == []


@pytest.mark.parametrize(
    ("name", "host", "covered"),
    [
        ("host-a", "HOST-A", True),
        ("*.example.com", "a.example.com", True),
        ("*.example.com", "a.b.example.com", False),
        ("*.example.com", "example.com", False),
        ("10.0.0.1", "10.0.0.1", True),
        ("::1", "0:0:0:0:0:0:0:1", True),
        ("10.0.0.1", "10.0.0.10", False),
        ("*.0.0.1", "10.0.0.1", False),
    ],
)
def test_names_cover_hosts_as_clients_read_them(name: str, host: str, covered: bool) -> None:
    assert replace(GOOD, names=(name,)).covers(host) is covered


def _missing(certificate: Path, key: Path) -> None:
    certificate.unlink()


def _other_key(certificate: Path, key: Path) -> None:
    key.write_bytes(Authority(key.parent / "other").issue()[1].read_bytes())


def _no_pem(certificate: Path, key: Path) -> None:
    certificate.write_text("nothing")


@pytest.mark.parametrize(
    ("harm", "words"),
    [(_missing, "cannot be read: No such file"), (_other_key, "is not the key of"), (_no_pem, "not a certificate")],
)
def test_files_that_no_node_could_use_are_told(harm: Callable[[Path, Path], None], words: str, tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path).issue()
    assert read_files(str(certificate), str(key)).fault == ""
    harm(certificate, key)
    assert words in read_files(str(certificate), str(key)).fault


def test_a_key_that_everybody_may_read_is_noticed(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path).issue()
    assert not read_files(str(certificate), str(key)).exposed
    key.chmod(0o644)
    assert read_files(str(certificate), str(key)).exposed


def test_rubbish_is_no_certificate() -> None:
    assert of_der(b"") is None and of_der(b"\x30\x80" * 40) is None


async def doctor(nodes: Cluster, *args: str) -> list[tuple[str, str, str]]:
    """Topic, grade and text of what the command finds about encryption."""
    words = ["doctor", "--json", "--no-mdns", "--state-dir", str(nodes.folder / "state"), *args]
    done = await asyncio.to_thread(CliRunner().invoke, main, words)
    found = json.loads(done.output)["findings"]
    return [(one["topic"], one["grade"], one["text"]) for one in found if one["topic"] in ("TLS", "KV encryption")]


async def test_the_command_finds_files_and_peers_of_a_real_cluster_by_itself() -> None:
    async with cluster() as nodes:
        authority = Authority(nodes.folder / "ca")
        for name, more in (("a", {"kv_tls": True}), ("b", {})):
            certificate, key = authority.issue(name, days=90)
            await nodes.add(
                name, tls_cert=str(certificate), tls_key=str(key), cluster_key="a long enough key", kv=True,
                kv_pool_gib=0.01, **more,
            )  # fmt: skip
        await nodes.agree()
        first = await doctor(nodes)
        assert ("TLS", "fine", "all 2 nodes encrypt requests") in first
        assert any("its key fits" in text for _, _, text in first)
        assert [
            (grade, "over TLS at a and in clear at b" in text)
            for topic, grade, text in first
            if topic == "KV encryption"
        ] == [("problem", True)]
        (nodes.folder / "ca" / "a.key").unlink()
        (fault,) = [text for _, grade, text in await doctor(nodes) if grade == "problem" and "--tls-key" in text]
        assert "cannot be read" in fault and "goes on with what it read before" in fault


async def test_nodes_that_exchange_kv_blocks_over_tls_are_fine() -> None:
    async with cluster() as nodes:
        for name in "ab":
            await nodes.add(name, kv_tls=True, cluster_key="a long enough key", kv=True, kv_pool_gib=0.01)
        await nodes.agree()
        assert ("KV encryption", "fine", "KV blocks travel over TLS between 2 nodes") in await doctor(nodes)


def test_before_the_first_start_the_files_of_the_options_are_looked_at(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path / "ca").issue(days=90)
    words = ["doctor", "--no-mdns", "--state-dir", str(tmp_path), "--tls-cert", str(certificate)]
    assert "its key fits" in CliRunner().invoke(main, [*words, "--tls-key", str(key)]).output
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1 and "--tls-key" in done.output and "-> put right" in done.output
