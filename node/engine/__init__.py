"""The engine of a node: how it is started, kept, asked and ended."""
