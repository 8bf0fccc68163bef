"""Clients of the API: who they are by their key, what each may use, and what it has used."""

from node.clients.access import Access
from node.clients.client import Client, Denied, Limits

__all__ = ["Access", "Client", "Denied", "Limits"]
