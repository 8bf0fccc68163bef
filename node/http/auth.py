"""Who may ask: three separate credentials, compared in constant time.

- client API keys guard what costs engine time (``/v1/*`` and its kin);
- the admin token guards ``/admin/*``; without one set, ``/admin`` is closed;
- the cluster key guards ``/peer/*``: `PeerSigner` signs each call. Without a key, only the addresses of
  current members are accepted, which is no protection against somebody on the same network: the start-up
  log says so.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Collection, Sequence

from gossip import ClusterKey, Keyring
from node.http.errors import ApiError
from node.keys import USE_PEER_CALLS

AUTH_HEADER = "x-grapevine-auth"
_NONCE_BYTES = 12
_MAX_AUTH = 256


def bearer(authorization: str | None) -> str | None:
    """Return the token of an Authorization header, None when there is none."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def matches(given: str, wanted: Sequence[str]) -> bool:
    """Compare with every wanted secret, in a time that tells nothing."""
    found = False
    for secret in wanted:
        found |= hmac.compare_digest(_bytes(given), _bytes(secret))
    return found


def _bytes(text: str) -> bytes:
    """Return a header's text as it was on the wire, whatever it held."""
    return text.encode("utf-8", "surrogateescape")


def check_client(authorization: str | None, keys: Sequence[str]) -> ApiError | None:
    """Return why a client is refused, None when it may go on."""
    if not keys:
        return None
    token = bearer(authorization)
    if token is None:
        return ApiError(401, "missing_api_key", "Send an API key: `Authorization: Bearer KEY`.")
    if not matches(token, keys):
        return ApiError(401, "invalid_api_key", "Incorrect API key provided.")
    return None


def check_admin(authorization: str | None, token: str) -> ApiError | None:
    """Return why an administrator's call is refused, None when it may go on."""
    if not token:
        message = "/admin is closed: start the node with an admin token (GRAPEVINE_ADMIN_TOKEN) to use it."
        return ApiError(403, "admin_disabled", message)
    given = bearer(authorization)
    if given is None:
        return ApiError(401, "missing_admin_token", "Send the admin token: `Authorization: Bearer TOKEN`.")
    if not matches(given, (token,)):
        return ApiError(403, "invalid_admin_token", "This is not the admin token of this node.")
    return None


class PeerSigner:
    """Signs and checks calls between nodes.

    The signature covers method, target, request id and plan with a nonce of its own; the key is derived from the
    cluster's (`gossip.keyring`), so that a signature says nothing about the gossip encryption. The first key of the
    ring signs, every key verifies. Bodies are not covered: where the network itself is hostile, run the nodes over
    an encrypted link.
    """

    def __init__(self, ring: Keyring) -> None:
        self._ring = ring

    @property
    def enabled(self) -> bool:
        """Whether the cluster has a key."""
        return self._ring.first is not None

    def sign(self, method: str, target: str, rid: str, plan: str) -> str:
        """Return the value of the auth header."""
        assert self._ring.first is not None, "there is no key to sign with"
        nonce = secrets.token_hex(_NONCE_BYTES)
        return f"{nonce}.{_mac(self._ring.first, nonce, method, target, rid, plan)}"

    def verify(self, header: str, method: str, target: str, rid: str, plan: str) -> bool:
        """Say whether ``header`` was made with one of our keys for exactly this call."""
        nonce, _, mac = header.partition(".")
        if not nonce or not mac or len(header) > _MAX_AUTH:
            return False
        return matches(mac, [_mac(key, nonce, method, target, rid, plan) for key in self._ring])


def _mac(key: ClusterKey, *parts: str) -> str:
    text = b"\0".join(map(_bytes, parts))
    return hmac.new(key.derive(USE_PEER_CALLS), text, hashlib.sha256).hexdigest()


def check_peer(
    signer: PeerSigner,
    *,
    call: tuple[str, str, str, str],
    header: str | None,
    remote: str | None,
    member_hosts: Collection[str],
) -> ApiError | None:
    """Return why a call to /peer is refused. ``call`` is (method, target, rid, plan)."""
    if signer.enabled:
        if header is None or not signer.verify(header, *call):
            return ApiError(403, "peer_key", "This node belongs to a cluster with a key that you do not hold.")
        return None
    if remote not in member_hosts:
        return ApiError(403, "peer_unknown", "Only members of the cluster may call /peer.")
    return None
