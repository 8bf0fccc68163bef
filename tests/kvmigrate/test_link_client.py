from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmigrate.link import Clear, Disconnected, FrameSplitter, Hello, LinkClient, Message, Want, encode
from kvmigrate.link.client import BACKOFF_MAX_S, MAX_SEND_BUFFER
from kvmigrate.link.messages import Filled, Role

from .helpers import Clock

HELLO = Hello(Role.WORKER, 0, 1, 7, bytes(16), 4096, 128)


class Node:
    """The other end, without any of our code but the codec."""

    def __init__(self, path: Path) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(path))
        self.listener.listen(1)
        self.listener.settimeout(5)
        self.socket: socket.socket | None = None

    def accept(self) -> None:
        self.socket = self.listener.accept()[0]
        self.socket.settimeout(5)

    def receive(self, n: int) -> list[Message]:
        assert self.socket is not None
        splitter, got = FrameSplitter(), list[Message]()
        while len(got) < n:
            got += splitter.feed(self.socket.recv(1 << 20))
        return got

    def send(self, data: bytes) -> None:
        assert self.socket is not None
        self.socket.sendall(data)

    def hang_up(self) -> None:
        assert self.socket is not None
        self.socket.close()

    def close(self) -> None:
        self.listener.close()
        if self.socket is not None:
            self.socket.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "link"


@pytest.fixture
def node(path: Path) -> Iterator[Node]:
    node = Node(path)
    yield node
    node.close()


@pytest.fixture
def client(path: Path, clock: Clock) -> Iterator[LinkClient]:
    client = LinkClient(path, lambda: HELLO, clock=clock)
    yield client
    client.close()
    client.close()
    assert client.poll() == [] and not client.send(Want(1))


def test_hello_goes_first_and_messages_go_both_ways(node: Node, client: LinkClient) -> None:
    assert client.send(Want(3)) and client.connected
    node.accept()
    assert node.receive(2) == [HELLO, Want(3)]
    assert client.poll() == []
    node.send(encode(Clear(1)) + encode(Clear(2))[:3])
    assert client.poll() == [Clear(1)]
    node.send(encode(Clear(2))[3:])
    assert client.poll() == [Clear(2)]


def test_without_a_node_nothing_is_sent_nothing_raised_and_it_tries_again_with_growing_waits(
    path: Path, client: LinkClient, clock: Clock
) -> None:
    attempts = 0
    for _ in range(400):  # 40 seconds
        before = client._retry_at
        assert not client.send(Want(1)) and client.poll() == []
        attempts += client._retry_at != before
        clock.now += 0.1
    assert 15 <= attempts <= 30  # about every BACKOFF_MAX_S
    assert client.refused == 400
    node = Node(path)
    clock.now += BACKOFF_MAX_S
    assert client.send(Want(2))
    node.accept()
    assert node.receive(2) == [HELLO, Want(2)]
    node.close()


def test_a_node_that_hangs_up_is_told_of_once_and_what_came_before_is_void(
    node: Node, client: LinkClient, clock: Clock
) -> None:
    client.poll()
    node.accept()
    node.send(encode(Clear(1)))
    node.hang_up()
    (lost,) = client.poll()
    assert isinstance(lost, Disconnected) and not client.connected
    assert client.poll() == [] and not client.send(Want(1))
    clock.now += BACKOFF_MAX_S
    assert client.send(Want(2))
    node.accept()
    assert node.receive(2) == [HELLO, Want(2)]  # nothing of the first connection


def test_a_loss_found_by_send_is_reported_before_anything_of_the_next_connection(
    node: Node, client: LinkClient, clock: Clock
) -> None:
    client.poll()
    node.accept()
    node.hang_up()
    while client.send(Want(1)):
        pass
    clock.now += BACKOFF_MAX_S
    assert not client.send(Want(2))  # not before the caller has heard of the loss
    (lost,) = client.poll()
    assert isinstance(lost, Disconnected)
    assert client.send(Want(3))


@pytest.mark.parametrize("junk", [b"\xff\xff\xff\xff", b"\0\0\0\1\x00", b"\0\0\0\0"])
def test_a_node_that_breaks_the_protocol_is_left(node: Node, client: LinkClient, junk: bytes) -> None:
    client.poll()
    node.accept()
    node.send(junk)
    (lost,) = client.poll()
    assert isinstance(lost, Disconnected) and "protocol" in lost.why


def test_a_node_that_does_not_read_costs_messages_and_never_time_or_memory(node: Node, client: LinkClient) -> None:
    client.poll()
    node.accept()
    big = Filled("r", (bytes(32),) * 20_000, 1)
    taken = sum(client.send(big) for _ in range(40))
    assert 0 < taken < 40 and client.refused == 40 - taken
    assert len(client._out) <= MAX_SEND_BUFFER
    got, splitter = [], FrameSplitter()
    assert node.socket is not None
    while len(got) < taken + 1:  # what was accepted arrives whole
        client.poll()
        got += splitter.feed(node.socket.recv(1 << 20))
    assert got == [HELLO] + [big] * taken


def test_a_message_that_cannot_be_encoded_is_refused_not_raised(node: Node, client: LinkClient) -> None:
    assert not client.send(Filled("r", (bytes(32),) * 200_000, 1))
    assert client.connected
