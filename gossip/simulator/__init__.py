"""Clusters in virtual time: the real endpoints and the real bytes, on a network that is one heap of events.

Everything follows from one seed. Tests, benches and the sweep use it; a running node never does.
"""

from gossip.simulator.checkers import Checker, Violation, standard_checkers
from gossip.simulator.clock import Clock
from gossip.simulator.network import Network
from gossip.simulator.node import SimNode
from gossip.simulator.report import Report, VacuousRunError
from gossip.simulator.simulator import Simulator

__all__ = [
    "Checker",
    "Clock",
    "Network",
    "Report",
    "SimNode",
    "Simulator",
    "VacuousRunError",
    "Violation",
    "standard_checkers",
]
