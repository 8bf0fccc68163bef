"""Benches: one module each, with `run(options) -> Result` and its `TARGETS`. See `scripts/bench`."""
