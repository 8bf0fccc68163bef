"""Another member as this host reaches it: its ports, its clock, the packets on the way, its certificate."""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import socket
import ssl
import time
from collections.abc import Mapping
from typing import Any

from node import addresses
from node.doctor.certificate import Certificate, of_der
from node.doctor.facts import Peer

DIAL_S = 3.0
#: Linux' numbers: ask a connected datagram socket for the size of packets on its way.
_IP_MTU_DISCOVER, _IP_PMTUDISC_DO, _IP_MTU = 10, 2, 14


def look_at(member: Mapping[str, Any]) -> Peer:
    """One member, dialled on each of its ports."""
    name, state = str(member.get("name")), str(member.get("state"))
    version, url = str(member.get("version") or ""), str(member.get("url") or "")
    if state != "alive":
        return Peer(name, state, version)
    failed: dict[str, str] = {}
    for what, key in (("HTTP", "http"), ("gossip", "address"), ("KV blocks", "kv")):
        if member.get(key) and (why := _dial(str(member[key]))):
            failed[what] = f"{why} at {member[key]}"
    offset, certificate = ask_clock(url) if url and "HTTP" not in failed else (None, None)
    return Peer(
        name,
        state,
        version,
        failed,
        clock_offset_s=offset,
        path_mtu=_path_mtu(str(member.get("address"))),
        host=addresses.split_address(str(member["http"]))[0] if member.get("http") else "",
        certificate=certificate,
    )


def ask_clock(url: str) -> tuple[float | None, Certificate | None]:
    """A node's clock less ours, by the date of an answer, and the certificate that it shows to clients.

    In the middle of its second and of the way there and back. Nothing secret is asked, so a certificate that is not
    known here is no reason not to.
    """
    scheme, _, address = url.partition("://")
    host, port = addresses.split_address(address)
    connection = http.client.HTTPConnection(host, port, timeout=DIAL_S)
    if scheme == "https":
        connection = http.client.HTTPSConnection(host, port, timeout=DIAL_S, context=_unverified())
    certificate = None
    try:
        connection.connect()
        if isinstance(connection.sock, ssl.SSLSocket):
            certificate = of_der(connection.sock.getpeercert(binary_form=True) or b"")
        began = time.time()
        connection.request("GET", "/healthz")
        date = connection.getresponse().getheader("Date") or ""
        ours = (began + time.time()) / 2
        return email.utils.parsedate_to_datetime(date).timestamp() + 0.5 - ours, certificate
    except (OSError, http.client.HTTPException, ValueError):
        return None, certificate
    finally:
        connection.close()


def _dial(address: str) -> str:
    """Why a TCP port cannot be reached; empty when it can."""
    try:
        socket.create_connection(addresses.split_address(address), DIAL_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _unverified() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _path_mtu(address: str) -> int | None:
    with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_DO)
        probe.connect(addresses.split_address(address))
        return probe.getsockopt(socket.IPPROTO_IP, _IP_MTU)
    return None
