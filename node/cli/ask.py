"""Asking a running node over HTTP, with nothing but the standard library: it starts in no time."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import click

from node.runfiles import running_nodes

TIMEOUT_S = 10.0
#: Largest answer read, bytes.
MAX_ANSWER_BYTES = 64 * 1024 * 1024

#: The file of the certificate that a node of this host shows, by its URLs: ours and that of its peers.
_shown: dict[str, str] = {}


class Unreachable(click.ClickException):
    """No node could be asked."""

    exit_code = 3


class Refused(click.ClickException):
    """A node answered, and not with what was asked for."""

    exit_code = 1


def find_node(url: str | None, state_dir: Path | None) -> str:
    """The URL of the node to ask: the given one, else the first that runs on this host."""
    if url:
        return (url if "://" in url else f"http://{url}").rstrip("/")
    nodes = running_nodes(state_dir)
    if not nodes:
        raise Unreachable(
            "no node of this user and no service runs here: start one with `grapevine start`, or give --node URL"
        )
    for node in nodes:
        if node.tls_cert:
            _shown[node.url.rstrip("/")] = _shown[node.peer_url] = node.tls_cert
    return nodes[0].url.rstrip("/")


def ask(url: str, path: str, body: bytes | None = None, token: str | None = None) -> Any:
    """The JSON answer of a node; ends the command with a message when there is none."""
    try:
        return json.loads(_ask(url, path, body, token))
    except ValueError as error:
        raise Refused(f"{url}{path} does not answer as a Grapevine node does: check --node") from error


def ask_text(url: str, path: str) -> str:
    """The answer of a node as text; ends the command with a message when there is none."""
    return _ask(url, path, None, None).decode("utf-8", "replace")


def _ask(url: str, path: str, body: bytes | None, token: str | None) -> bytes:
    headers = {"accept": "application/json"}
    if body is not None:
        headers["content-type"] = "application/json"
    if token:
        headers["authorization"] = f"Bearer {token}"
    # A node is asked directly: a proxy of the environment is for the outside.
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if url.startswith("https:"):
        handlers.append(urllib.request.HTTPSHandler(context=trust(url)))
    opener = urllib.request.build_opener(*handlers)
    try:
        with opener.open(urllib.request.Request(url + path, body, headers), timeout=TIMEOUT_S) as response:
            return bytes(response.read(MAX_ANSWER_BYTES))
    except urllib.error.HTTPError as error:
        told = _message(error.read(4096))
        raise Refused(f"{url} answers {path} with status {error.code}: {told}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            told = f"{url} shows a certificate that is not trusted here ({reason.verify_message}): "
            raise Unreachable(told + "name the file of its authority in SSL_CERT_FILE") from error
        text = f"{url} cannot be reached ({reason}): is the node running? `--node URL` asks another one"
        raise Unreachable(text) from error


def trust(url: str) -> ssl.SSLContext:
    """Whom to believe.

    A node of this host that we found by ourselves has to show the certificate of its own file, whatever the name in it.
    Everybody else is checked as usual, with SSL_CERT_FILE for an authority of one's own.
    """
    context = ssl.create_default_context()
    if own := _shown.get(url):
        try:
            context.load_verify_locations(own)
        except OSError:  # of a service, and not for this user's eyes: it is one of the others
            return context
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.check_hostname = False
    return context


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace").strip()[:300] or "no reason given"
