"""Property tests draw the same examples on every run, and none of them is timed.

A change is judged by what it changed, not by the luck of the draw; and a busy machine fails no test. To search
further: `scripts/test --hypothesis-profile=search`, which draws anew and ten times as many.
"""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("search", max_examples=1000, deadline=None)
settings.load_profile("fixed")
