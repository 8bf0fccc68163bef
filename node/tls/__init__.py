"""TLS on the HTTP port, for clients by the operator's certificate, between nodes by the cluster key."""

from node.tls.cluster import PEER_NAME, ClusterTrust
from node.tls.server import ServerTls

__all__ = ["PEER_NAME", "ClusterTrust", "ServerTls"]
