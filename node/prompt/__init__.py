"""A client's request, read once: model, prefix chunks, size, and what has to be stripped from it."""

from node.prompt.parse import parse_request
from node.prompt.request import ParsedRequest
from node.prompt.splice import splice

__all__ = ["ParsedRequest", "parse_request", "splice"]
