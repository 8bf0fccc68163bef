"""The command line: `grapevine`. Kept light: what a command needs is imported when it runs."""

from node.cli.main import main

__all__ = ["main"]
