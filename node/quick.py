"""Frozen dataclasses that are made as fast as plain ones.

Python sets each field of a frozen dataclass through `object.__setattr__`, which takes five times as long as setting it,
and a request makes some 150 fields of such values on its way. `quick` lets those of a class be made like the values of
a plain dataclass; that nobody changes one is seen to by mypy, for which the class stays frozen.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any


def quick(*classes: type[Any]) -> None:
    """Let these frozen dataclasses be made fast. For those that every request makes."""
    for cls in classes:
        fields = [(field.name, field.type, copy.copy(field)) for field in dataclasses.fields(cls)]
        own = {"__post_init__": cls.__post_init__} if hasattr(cls, "__post_init__") else {}
        plain = dataclasses.make_dataclass(cls.__name__, fields, namespace=own, repr=False, eq=False, match_args=False)
        cls.__init__ = plain.__init__  # type: ignore[misc]
        del cls.__setattr__, cls.__delattr__
