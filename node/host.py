"""What this host has, for those who plan: the GPUs, looked at once after the start."""

from __future__ import annotations

import threading

from node.doctor.gpus import find_gpus, joined


class HostFacts:
    """Asked for by `/gossip/state`."""

    def __init__(self) -> None:
        self._told: dict[str, object] = {"gpus": None}
        #: Nobody waits for it, the node's end neither: nvidia-smi may take seconds.
        self.looking = threading.Thread(target=self._look, name="host-facts", daemon=True)

    def look(self) -> None:
        """Begin to look, once."""
        self.looking.start()

    def snapshot(self) -> dict[str, object]:
        """JSON-able; `gpus` is null until they are known."""
        return self._told

    def _look(self) -> None:
        gpus, links, _ = find_gpus()
        self._told = {
            "gpus": [{"name": gpu.name, "memory_mib": gpu.memory_mib} for gpu in gpus],
            "nvlink": joined(links),
        }
