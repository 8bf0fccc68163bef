"""Waiting for processes that are not our children, without polling: a pidfd is readable when its process ends."""

import asyncio
import os
import select
from collections.abc import Iterable


def watch(pids: Iterable[int]) -> list[int]:
    """One pidfd for each process that lives."""
    found = []
    for pid in pids:
        try:
            found.append(os.pidfd_open(pid))
        except ProcessLookupError:
            continue
    return found


def wait_gone(fds: Iterable[int], timeout_s: float = 15.0) -> None:
    """Until all have ended; fails after `timeout_s`."""
    for fd in fds:
        try:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            assert poll.poll(timeout_s * 1000), f"a process is alive after {timeout_s} s"
        finally:
            os.close(fd)


async def gone(fds: Iterable[int], timeout_s: float = 15.0) -> None:
    """As `wait_gone`, off the loop."""
    await asyncio.to_thread(wait_gone, list(fds), timeout_s)
