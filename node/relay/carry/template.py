"""What the events of one stream have in common: nearly all differ in their text and token ids alone.

A `Template` is learnt from one event that was read as JSON. From then on one pass of C over a run of events tells
whether all of them are of that form, and what is left of them (text and ids between three marks) is kept as it is and
read only when somebody asks (`node.relay.carry.record`). What is of another form in any way is read event by event.

Nothing is guessed: a learnt form is tried on another text and id first, a text must be a JSON string, ids numbers as
JSON writes them, and the bytes of all events must add up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import orjson

from node.errors import RemoteError
from node.relay.carry.events import read

Fields = Mapping[str, Any]
#: A text and its token ids, for each event of a run.
Said = list[tuple[str, list[int]]]

#: What stands for the bytes in front of a text, between text and ids, and behind. No JSON holds these characters.
_FRONT, _MIDDLE, _BACK = b"\x00", b"\x01", b"\x02"
_STRING = rb'(?:[^"\\\x00-\x1f]++|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*+'
_ID = rb"(?:0|[1-9][0-9]{0,8}+)"  # below 2**32
_TEXTS = re.compile(rb"(?:\x00" + _STRING + rb"\x02)++")
_TEXTS_AND_IDS = re.compile(rb"(?:\x00" + _STRING + rb"\x01" + _ID + rb"(?:," + _ID + rb")*+\x02)++")
_ONE_STRING = re.compile(_STRING + rb'"')
_ONE_LIST = re.compile(_ID + rb"(?:," + _ID + rb")*+\]")
_IDS = b'"token_ids":['
_ALL_IDS = re.compile(rb'"token_ids":\[[0-9,]*+\]')
_NO_IDS = b'"token_ids":null'
#: Text and id by which a form is tried.
_PROBE, _PROBE_ID = "?", 7


class Template:
    """The bytes around text and ids. `middle` is empty where the events carry no ids."""

    __slots__ = ("_form", "_taken", "back", "front", "middle")

    def __init__(self, front: bytes, middle: bytes, back: bytes) -> None:
        self.front = front
        self.middle = middle
        self.back = back
        self._form = _TEXTS_AND_IDS if middle else _TEXTS
        #: Bytes of an event that its marks stand for, less the marks.
        self._taken = len(front) + len(back) - 2 + (len(middle) - 1 if middle else 0)

    def rest(self, run: bytes) -> bytes | None:
        """Texts and ids of a run of whole events, for `said`; None unless every one of them is of this form."""
        short = self._shortened(run)
        # A mark that came in the bytes themselves makes the sum wrong.
        if len(run) - len(short) != short.count(_FRONT) * self._taken or self._form.fullmatch(short) is None:
            return None
        if not short.isascii():
            try:
                short.decode()
            except UnicodeDecodeError:
                return None
        return short

    def beginning(self, run: bytes) -> int:
        """Bytes of the events at the beginning of a run that are of this form, one after the other."""
        short = self._shortened(run)
        found = self._form.match(short)
        return 0 if found is None else found.end() + short.count(_FRONT, 0, found.end()) * self._taken

    def _shortened(self, run: bytes) -> bytes:
        short = run.replace(self.front, _FRONT).replace(self.back, _BACK)
        return short.replace(self.middle, _MIDDLE) if self.middle else short


def without_ids(run: bytes) -> bytes:
    """The events of a run as the engine writes them where nobody asks for ids."""
    return _ALL_IDS.sub(_NO_IDS, run)


def said(rest: bytes) -> Said:
    """Read what `Template.rest` gave, of one run or of several one after the other."""
    listed = rest.replace(_FRONT, b'["')
    listed = (
        listed.replace(_MIDDLE, b'",[').replace(_BACK, b"]],") if _MIDDLE in rest else listed.replace(_BACK, b'",[]],')
    )
    listed = b"[" + listed[:-1] + b"]"
    try:
        found: Said = orjson.loads(listed)
    except ValueError:  # a lone surrogate, which JSON can carry
        found = json.loads(listed)
    return found


def learnt(event: bytes, fields: Fields) -> Template | None:
    """The form of an event that shows text of the first choice and nothing else; None of any other."""
    choices = fields["choices"]
    if len(choices) != 1 or not _plain(fields, choices[0]):
        return None
    front = event.find(b'"text":"' if "text" in choices[0] else b'"content":"')
    start = event.find(b':"', front) + 2
    text = _ONE_STRING.match(event, start) if front >= 0 else None
    if text is None:
        return None
    end, back, with_ids = text.end() - 1, text.end() - 1, bool(choices[0].get("token_ids"))
    middle = b""
    if with_ids:
        ids = event.find(_IDS, end) + len(_IDS)
        listed = _ONE_LIST.match(event, ids)
        if listed is None:
            return None
        middle, back = event[end:ids], listed.end() - 1
    template = Template(event[:start], middle, event[back:])
    return template if _holds(template, fields) else None


def _plain(fields: Fields, choice: Fields) -> bool:
    """Whether it only adds text and ids to the first choice."""
    delta = choice.get("delta")
    text = choice.get("text") if delta is None else delta.get("content")
    return (
        type(choice["index"]) is int
        and choice["index"] == 0
        and isinstance(text, str)
        and (delta is None or all(value is None for name, value in delta.items() if name != "content"))
        and choice.get("logprobs") is None
        and choice.get("finish_reason") is None
        and not choice.get("prompt_token_ids")
        and not fields.get("prompt_token_ids")
        and "error" not in fields
    )


def _holds(template: Template, fields: Fields) -> bool:
    """Whether another text and another id give the event that they should, and no other."""
    choice = dict(fields["choices"][0])
    if choice.get("delta") is not None:
        choice["delta"] = {**choice["delta"], "content": _PROBE}
    else:
        choice["text"] = _PROBE
    number = b""
    if template.middle:
        choice["token_ids"] = [_PROBE_ID]
        number = b"%d" % _PROBE_ID
    elif choice.get("token_ids"):
        return False
    tried = template.front + _PROBE.encode() + template.middle + number + template.back
    try:
        return tried.endswith(b"\n\n") and tried.count(b"\n") == 2 and read(tried) == {**fields, "choices": [choice]}
    except RemoteError:
        return False
