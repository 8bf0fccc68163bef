"""The HTTP surface of a node: one file for each group of routes, `server` puts them together."""
