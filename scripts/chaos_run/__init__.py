"""A cluster under load while a seeded schedule breaks it: what `scripts/chaos` runs. See docs/chaos.md."""
