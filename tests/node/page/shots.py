"""Pictures of the page for the documentation: `python -m tests.node.page.shots FOLDER`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from gossip import MemberState
from tests.node.page.chromium import chromium
from tests.node.page.stage import Stage, served

SETS = {"one": (["red"], True), "three": (["red", "green", "blue"], False), "hundred": ([], True)}
SECONDS = 4.0


async def shoot(folder: Path) -> None:
    async with chromium() as browser:
        for title, (names, dark) in SETS.items():
            stage = Stage(list(names) or [f"gpu-{index:03}" for index in range(100)])
            stage.age(600)
            if not names:
                for name, state in (("gpu-031", MemberState.SUSPECT), ("gpu-064", MemberState.DEAD)):
                    stage.states[name] = state
            async with served(stage) as (url, _), browser.tab() as tab:
                for shade in (dark, not dark):
                    await tab.open(url, dark=shade)
                    await tab.until("document.querySelector('#link.live') && document.querySelector('.tile')")
                    await asyncio.sleep(SECONDS)  # until something flows
                    kind = "dark" if shade else "light"
                    await tab.picture(folder / f"page-{title}-{kind}.png")
                    await tab.js("window.scrollTo(0, 640)")
                    await tab.picture(folder / f"page-{title}-{kind}-below.png")
                    print(title, kind, tab.errors)


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    asyncio.run(shoot(Path(sys.argv[1])))
