"""Stands for a node: starts stubborn.py under a guard, passes its output on and waits. Tests kill it.

Usage: fake_node.py MARKER GRACE_S KIND...
"""

import asyncio
import os
import sys
from pathlib import Path

from node.engine.processes import spawn


async def main() -> None:
    argv = [sys.executable, str(Path(__file__).with_name("stubborn.py")), *sys.argv[3:]]
    process = await spawn(argv, dict(os.environ), sys.argv[1], grace_s=float(sys.argv[2]))
    print("pid guard", process.pid, flush=True)
    pump = asyncio.create_task(process.pump(lambda line: print(line, flush=True)))
    await process.wait()
    await pump


asyncio.run(main())
