"""Carrying a streamed answer from an engine that is lost to another one, so that its client sees only a pause."""
