"""The node: HTTP surface, routing decision, engine supervision and command line of Grapevine."""

#: Version of Grapevine, as peers and users see it; the same as in pyproject.toml (a test keeps it so).
__version__ = "0.1.0"
