"""What the documents say: their commands, as somebody would type them, and the examples between fences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
#: What a line of a command begins with.
PROGRAMS = re.compile(r"([A-Z_]+=\S+ )?(grapevine|scripts/\w+|python3?|pip|curl|eval|export|for|docker|kubectl)\b")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_PROMPT = re.compile(r"^[\w.-]+\$ ")
#: What stands beside a command: a comment, or a description in a column of its own.
_BESIDE = re.compile(r"\s{2,}#.*$|\s{3,}\S.*$")


@dataclass(frozen=True, slots=True)
class Example:
    """What stands between two fences. `kind`: the word at the first one."""

    page: Path
    kind: str
    text: str

    @property
    def is_commands(self) -> bool:
        return not self.kind and PROGRAMS.match(_PROMPT.sub("", self.text)) is not None


def examples() -> Iterator[Example]:
    """All of them, page by page."""
    for page in PAGES:
        for kind, text in _FENCE.findall(page.read_text()):
            yield Example(page, kind, text)


def commands() -> list[tuple[str, str]]:
    """Page and text of each command between fences, in their order."""
    return [
        (str(one.page.relative_to(ROOT)), line) for one in examples() if one.is_commands for line in split(one.text)
    ]


def split(text: str) -> list[str]:
    """The commands of a block: a line each, but for continued lines and loops."""
    if text.startswith("for "):
        return [text.strip()]
    whole = re.sub(r"\s*\\\n\s*", " ", text)
    lines = [_BESIDE.sub("", _PROMPT.sub("", line)) for line in whole.splitlines() if line.strip()]
    return [re.sub(r"\s+", " ", line).strip() for line in lines]


def inline(page: Path) -> list[str]:
    """What stands between backquotes within a line, outside of fences."""
    return re.findall(r"`([^`\n]+)`", _FENCE.sub("", page.read_text()))


def links(page: Path) -> list[str]:
    """The targets of links, those to other hosts left out."""
    found = re.findall(r"\]\(([^)\s]+)\)", _FENCE.sub("", page.read_text()))
    return [target for target in found if "://" not in target]


def anchors(page: Path) -> set[str]:
    """The names of the headings of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
