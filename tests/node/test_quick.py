"""Values that are made fast are made alike."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import dataclass, field, replace

from node.load import LoadVector
from node.models import ModelInfo
from node.quick import quick
from node.view import Candidate


@dataclass(frozen=True, slots=True)
class Slow:
    first: int
    second: str = "two"
    third: dict[str, int] = field(default_factory=dict)
    hidden: float = field(default=0.5, repr=False, compare=False)
    made: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "made", self.first + 1)


@dataclass(frozen=True, slots=True)
class Fast:
    first: int
    second: str = "two"
    third: dict[str, int] = field(default_factory=dict)
    hidden: float = field(default=0.5, repr=False, compare=False)
    made: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "made", self.first + 1)


quick(Fast)


def test_they_have_the_same_fields_however_they_are_made() -> None:
    for given in ({"first": 1}, {"first": 2, "second": "x"}, {"first": 3, "third": {"a": 1}, "hidden": 2.0}):
        slow, fast = Slow(**given), Fast(**given)  # type: ignore[arg-type]
        for made in (fast, replace(fast), copy.copy(fast), pickle.loads(pickle.dumps(fast))):
            assert dataclasses.asdict(made) == dataclasses.asdict(slow)
            assert repr(made) == repr(slow).replace("Slow", "Fast")
            assert made == fast
    assert Fast(1).third is not Fast(1).third, "a default that is made is made anew"


def test_equal_ones_are_equal_and_the_hidden_field_does_not_count() -> None:
    assert Fast(1, hidden=1.0) == Fast(1, hidden=2.0) != Fast(2)


def test_what_follows_from_others_follows_from_changed_ones() -> None:
    node = Candidate("a", LoadVector(ready=True), models={"m": ModelInfo("m", "base")})
    assert replace(node, load=LoadVector(ready=True, draining=True)).offers == {} != node.offers
