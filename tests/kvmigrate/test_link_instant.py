"""Socket calls of the engine's link: what they return, and that no other thread gets Python's lock meanwhile."""

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvmigrate.link.instant import Room, recv_now, send_now

CALLS = 300
LONG_S = 60.0


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def test_nothing_is_none_and_the_end_is_empty(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    room = Room(16)
    assert recv_now(ours, room) is None
    theirs.sendall(b"\0ab\0")
    assert recv_now(ours, room) == b"\0ab\0"
    theirs.close()
    assert recv_now(ours, room) == b""


def test_no_more_than_the_room_is_taken_at_once(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.sendall(bytes(range(10)))
    room = Room(4)
    assert [recv_now(ours, room) for _ in range(4)] == [b"\0\1\2\3", b"\4\5\6\7", b"\x08\t", None]


def test_what_the_socket_does_not_take_now_is_left(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    sent = 0
    while count := send_now(ours, bytes(64 << 10)):
        sent += count
    got = 0
    while got < sent:
        got += len(theirs.recv(1 << 20))
    assert send_now(ours, b"\0more") == 5
    assert theirs.recv(16) == b"\0more"


def test_a_broken_connection_raises(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.close()
    with pytest.raises(BrokenPipeError):
        send_now(ours, b"x")
    ours.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        recv_now(ours, Room(4))


def _turns_of_another_thread(call: Callable[[], object]) -> int:
    """How often a thread that always has work gets Python's lock in CALLS calls."""
    turns, stop = [0], False

    def work() -> None:
        while not stop:
            turns[0] += 1
            time.sleep(0)  # give the lock back

    thread = threading.Thread(target=work, daemon=True)
    before_s = sys.getswitchinterval()
    try:
        thread.start()
        while not turns[0]:
            time.sleep(0)
        sys.setswitchinterval(LONG_S)  # from now on the lock goes only to who is given it
        before = turns[0]
        for _ in range(CALLS):
            call()
        return turns[0] - before
    finally:
        stop = True
        sys.setswitchinterval(before_s)
        thread.join()


def test_no_other_thread_runs_meanwhile(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = pair
    room = Room(64)

    def exchange() -> None:
        send_now(ours, b"x")
        recv_now(ours, room)

    assert _turns_of_another_thread(exchange) == 0
