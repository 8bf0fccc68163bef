"""Who may ask: three separate credentials, compared in constant time.

- client API keys guard what costs engine time (``/v1/*`` and its kin): `node.clients`;
- the admin token guards ``/admin/*``; without one set, ``/admin`` is closed;
- the cluster key guards ``/peer/*``: each call is signed (`node.http.signature`). Without a key, only the addresses
  of current members are accepted, which is no protection against somebody on the same network: the start-up
  log says so.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection, Sequence

from node.http.errors import ApiError, ApiFailure
from node.http.signature import AUTH_HEADER, PeerCall, PeerSigner, SignedBody

#: Where an operator shows the admin token on a path whose Authorization is the client's.
OPERATOR_HEADER = "x-grapevine-admin-token"


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


def check_operator(given: str | None, token: str) -> ApiError | None:
    """Return why somebody may not use what is for operators on the paths of clients; None when he may.

    ``given``: the header `OPERATOR_HEADER`.
    """
    if not token:
        message = "Naming a KV source is for operators: start the node with an admin token (GRAPEVINE_ADMIN_TOKEN)."
        return ApiError(403, "admin_disabled", message)
    if given is None:
        message = f"Naming a KV source is for operators: send the admin token in {OPERATOR_HEADER}."
        return ApiError(401, "missing_admin_token", message)
    if not matches(given, (token,)):
        return ApiError(403, "invalid_admin_token", "This is not the admin token of this node.")
    return None


def check_peer(
    signer: PeerSigner, call: PeerCall, *, remote: str | None, member_hosts: Collection[str]
) -> SignedBody | None:
    """Return what the body of a call to /peer has to be; None where the cluster has no key and nothing is signed.

    :raises ApiFailure: 403.
    """
    if signer.enabled:
        body = signer.verify(call.ours.get(AUTH_HEADER, ""), call)
        if body is None:
            message = "The call is not signed with a key of this cluster, for this node, and for the first time."
            raise ApiFailure(ApiError(403, "peer_key", message))
        return body
    if remote not in member_hosts:
        raise ApiFailure(ApiError(403, "peer_unknown", "Only members of the cluster may call /peer."))
    return None
