"""Stands for a node: starts stubborn.py under a guard, passes its output on and waits. Tests kill it.

Usage: fake_node.py MARKER GRACE_S [leak] KIND...   leak: another process keeps the guard's pipe open
"""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from node.engine.processes import spawn


async def main() -> None:
    kinds = [kind for kind in sys.argv[3:] if kind != "leak"]
    argv = [sys.executable, str(Path(__file__).with_name("stubborn.py")), *kinds]
    process = await spawn(argv, dict(os.environ), sys.argv[1], grace_s=float(sys.argv[2]))
    print("pid guard", process.pid, flush=True)
    if "leak" in sys.argv:
        waiting = [sys.executable, "-c", "import signal; signal.pause()"]
        other = subprocess.Popen(waiting, pass_fds=(process._control,))  # noqa: ASYNC220 - a test
        print("pid leak", other.pid, flush=True)
    pump = asyncio.create_task(process.pump(lambda line: print(line, flush=True)))
    await process.wait()
    await pump


asyncio.run(main())
