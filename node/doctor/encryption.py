"""Checks of TLS: the certificate of the HTTP port here and at peers, who encrypts what and who does not."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from typing import Any

from node import addresses
from node.doctor.certificate import Certificate, Files
from node.doctor.facts import Facts, members_of, own_of
from node.doctor.finding import Finding, fine, note, problem, warning

DAY_S = 86_400.0
#: A certificate that ends sooner should have been renewed; of a short-lived one the last third of its life.
SOON_S = 14 * DAY_S
_TOPIC = "TLS"
_READ_AGAIN = "nodes read the files again when they change"


def check_certificate(facts: Facts) -> Iterator[Finding]:
    """The node's own certificate: its files can be used, it is the one that is shown, good in time and by name."""
    files, own = facts.tls_files, own_of(facts.state)
    host = addresses.split_address(str(own["http"]))[0] if own.get("http") else ""
    if files is not None and files.fault:
        running = " The node goes on with what it read before, until it is restarted." if facts.shown else ""
        mend = "put right --tls-cert and --tls-key: PEM, readable by the node's user, the key without a passphrase"
        yield problem(_TOPIC, f"{files.fault}.{running}", mend)
        return
    certificate = files.certificate if files is not None and files.certificate is not None else facts.shown
    if certificate is None:
        if own and not _encrypts(own) and not _on_loopback(host):
            yield note(
                _TOPIC,
                "the HTTP port does not encrypt: prompts and answers are in clear",
                "start with --tls-cert and --tls-key; or leave it where the network is yours",
            )
        return
    found = [*_file_findings(files, facts.shown), *_judge(certificate, "our certificate", host, facts.now)]
    yield from found
    if not found:
        fits = ", its key fits" if files is not None else ""
        yield fine(_TOPIC, f"our certificate ends on {_date(certificate.ends)}{fits}")


def _file_findings(files: Files | None, shown: Certificate | None) -> Iterator[Finding]:
    if files is None or files.certificate is None:
        return
    if files.exposed:
        text = f"every user of this host can read or change the key {files.key_path}"
        yield warning(_TOPIC, text, f"`chmod 600 {files.key_path}`, owned by the node's user")
    if shown is not None and shown.digest != files.certificate.digest:
        text = f"the node still shows another certificate than {files.certificate_path} holds"
        mend = f"{_READ_AGAIN}, unless their user may not: the node's log says why; SIGHUP lets it try again"
        yield warning(_TOPIC, text, mend)


def check_peer_certificates(facts: Facts) -> Iterator[Finding]:
    """What clients see at the peers."""
    for peer in facts.peers:
        if peer.certificate is not None:
            yield from _judge(peer.certificate, f"the certificate of {peer.name}", peer.host, facts.now)


def _judge(certificate: Certificate, whose: str, host: str, now: float) -> Iterator[Finding]:
    """Whether clients will take it. ``host``: where the node says that it can be reached; empty where not known."""
    left = certificate.ends - now
    if left <= 0:
        text = f"{whose} has ended on {_date(certificate.ends)}: clients refuse it"
        yield problem(_TOPIC, text, f"renew it; {_READ_AGAIN}. Calls between nodes do not mind")
    elif left < min(SOON_S, (certificate.ends - certificate.begins) / 3):
        text = f"{whose} ends in {left / DAY_S:.1f} days, on {_date(certificate.ends)}"
        yield warning(_TOPIC, text, f"renew it, and see why that did not happen by itself; {_READ_AGAIN}")
    if certificate.begins > now:
        text = f"{whose} is good from {_date(certificate.begins)} only: clients refuse it"
        yield problem(_TOPIC, text, "look at the clock of this host, and of the one that issued it")
    if host and not certificate.covers(host):
        names = certificate.dns_names
        if names:
            text = (
                f"{whose} is for {', '.join(names[:5])}, not for {host}: only by those names can clients use the node"
            )
            yield note(_TOPIC, text, f"where clients use {host}: have it issued for that too, or set --advertise")
        else:
            known = ", ".join(certificate.names[:5]) or "no name at all"
            text = f"{whose} is for {known}, and the node is reached at {host}: clients refuse it"
            yield warning(_TOPIC, text, f"have it issued for {host} or a name of the host, or set --advertise")


def check_peer_tls(facts: Facts) -> Iterator[Finding]:
    """All nodes encrypt requests, or none does."""
    alive = [member for member in members_of(facts.state) if member.get("state") == "alive" and member.get("url")]
    clear = [str(member.get("name")) for member in alive if not _encrypts(member)]
    if clear and len(clear) < len(alive):
        text = f"requests travel in clear to {', '.join(clear[:5])}, and over TLS to {len(alive) - len(clear)} nodes"
        mend = "give them --tls-cert and --tls-key too; nodes may be changed one after the other"
        yield warning(_TOPIC, text, mend)
    elif len(alive) > 1 and not clear:
        yield fine(_TOPIC, f"all {len(alive)} nodes encrypt requests")


def check_kv_tls(facts: Facts) -> Iterator[Finding]:
    """All nodes exchange KV blocks over TLS, or none does: the two kinds do not talk to each other."""
    told = [member for member in members_of(facts.state) if member.get("kv_encrypted") is not None]
    alive = [member for member in told if member.get("state") == "alive"]
    over_tls = [str(member.get("name")) for member in alive if member["kv_encrypted"]]
    in_clear = [str(member.get("name")) for member in alive if not member["kv_encrypted"]]
    if over_tls and in_clear:
        text = f"KV blocks go over TLS at {', '.join(over_tls[:5])} and in clear at {', '.join(in_clear[:5])}"
        yield problem(
            "KV encryption", f"{text}: none move between the two", "--kv-tls on every node of the cluster, or on none"
        )
    elif len(over_tls) > 1:
        yield fine("KV encryption", f"KV blocks travel over TLS between {len(over_tls)} nodes")


def _encrypts(member: Mapping[str, Any]) -> bool:
    return str(member.get("url")).startswith("https:")


def _on_loopback(host: str) -> bool:
    return host.startswith("127.") or host in ("", "::1", "localhost")


def _date(when: float) -> str:
    return f"{datetime.datetime.fromtimestamp(when, datetime.UTC):%Y-%m-%d}"
