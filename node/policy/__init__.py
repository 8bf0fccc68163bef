"""Balancing policies, chosen by name."""

from node.policy.base import CandidateCost, Choice, Policy, Question
from node.policy.registry import POLICIES, make_policy

__all__ = ["POLICIES", "CandidateCost", "Choice", "Policy", "Question", "make_policy"]
