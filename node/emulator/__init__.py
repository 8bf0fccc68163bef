"""An engine without a model: what a router can see of vLLM, in virtual time or behind an OpenAI-compatible server.

`engine` is the pure core (events in, actions out), `serve` the asyncio shell around it. docs/emulator.md says what
is modelled and what is not.
"""

from node.emulator.config import PRESETS, EngineConfig, Timing
from node.emulator.engine import EmulatedEngine
from node.emulator.job import Action, Done, Evicted, Job, Preempted, Started, Stored, Tokens

__all__ = [
    "PRESETS",
    "Action",
    "Done",
    "EmulatedEngine",
    "EngineConfig",
    "Evicted",
    "Job",
    "Preempted",
    "Started",
    "Stored",
    "Timing",
    "Tokens",
]
