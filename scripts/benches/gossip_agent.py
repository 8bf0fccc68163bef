"""One real agent on loopback, fed with what the simulated peers really sent to its twin in the simulation.

The simulated node with the last name is replaced: every datagram that it got during `RECORD_S` virtual seconds is sent
to a real agent in a process of its own, at the recorded moments and from the recorded addresses (all in 127.1.0.0/16).
What the agent asks, by datagram or stream, the simulated endpoints answer. Measured is the CPU time of its process.
"""

from __future__ import annotations

import multiprocessing
import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Self

from benches.child import Child
from benches.result import Result, say
from gossip import actions as io
from gossip.identity import Address
from gossip.simulator import SimNode, Simulator

SUBNET = "127.1"
#: Where the node lives that the agent replaces.
AGENT_HOST = "127.1.255.1"
#: Sizes of the simulated clusters at which the agent is measured.
AGENT_SIZES = (100, 1000)
RECORD_S = 10.0
#: Seconds for the agent to know everybody, and for its rumours about them to run out.
JOIN_S, QUIET_S = 60.0, 180.0
#: Linux: tells, and sets, the local address of a datagram on a socket that is bound to all of them.
_IP_PKTINFO = 8
_PKTINFO = struct.Struct("=I4s4s")


class Port:
    """One port number, on all addresses of 127.0.0.0/8, on which the crowd of peers speaks; and one for the agent."""

    def __init__(self) -> None:
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.tcp = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.udp.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
        self.udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        self.udp.bind(("0.0.0.0", 0))
        self.number = int(self.udp.getsockname()[1])
        self.tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.tcp.bind(("0.0.0.0", self.number))
        self.tcp.listen(128)
        self.udp.setblocking(False)
        self.tcp.setblocking(False)
        # Another number: the crowd holds its own on every address.
        self.agent: Address = (AGENT_HOST, self.number - 1 if self.number > 40_000 else self.number + 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.udp.close()
        self.tcp.close()


@dataclass(frozen=True, slots=True)
class Recording:
    """What one node got, with times from its beginning, and the cluster that sent it, standing still since."""

    sim: Simulator
    subject: SimNode
    datagrams: list[tuple[float, Address, bytes]]


def record(sim: Simulator) -> Recording:
    """Let time pass and keep what the last node gets."""
    subject = next(n for n in sim.nodes.values() if n.address[0] == AGENT_HOST)
    subject.recording = []
    start = sim.now
    sim.run(RECORD_S)
    heard, subject.recording = subject.recording, None
    return Recording(sim, subject, [(at - start, source, data) for at, source, data in heard])


def measure(result: Result, recording: Recording, port: Port) -> None:
    """Run the real agent through the recording, in a copy of this process: the simulation is to go on untouched."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_measure, args=(recording, port, theirs))
    process.start()
    theirs.close()
    try:
        share, datagrams = ours.recv()
    except EOFError as error:
        raise RuntimeError("the measurement of the real agent failed, see above") from error
    finally:
        process.join()
    peers = len(recording.sim.running()) - 1
    result.add(f"agent_core_share_n{peers}", share)
    result.add(f"agent_datagrams_in_s_n{peers}", datagrams)


def _measure(recording: Recording, port: Port, answer: Connection) -> None:
    peers = len(recording.sim.running()) - 1
    identity = recording.subject.endpoint.identity
    arguments = (identity.name, identity.host, str(identity.port), str(port.number), str(peers + 1))
    with Child("benches.agent_process", *arguments) as child:
        crowd = _Crowd(recording, port)
        crowd.serve_until(lambda: child.ask("state")["members"] == peers + 1, JOIN_S)
        crowd.serve_until(lambda: child.ask("state")["broadcasts"] == 0, QUIET_S)
        before = child.ask("state")
        took = crowd.replay(recording.datagrams)
        after = child.ask("state")
    if after["rows"] < peers or after["malformed"] or after["alive"] < peers:
        raise AssertionError(f"the agent did not take part: {after}")
    answer.send(((after["cpu_s"] - before["cpu_s"]) / took, len(recording.datagrams) / took))


class _Crowd:
    """The simulated endpoints behind real sockets."""

    def __init__(self, recording: Recording, port: Port) -> None:
        self._sim = recording.sim
        self._port = port
        self._agent = recording.subject.address
        self._nodes = {n.address: n for n in self._sim.running() if n is not recording.subject}
        self._streams = 0
        self._began = time.monotonic()

    def serve_until(self, holds: Callable[[], bool], limit_s: float) -> None:
        """Answer the agent until it says so."""
        until = time.monotonic() + limit_s
        while not holds():
            if time.monotonic() > until:
                raise TimeoutError("the real agent did not get to know the simulated peers")
            self._serve(time.monotonic() + 0.2)

    def replay(self, datagrams: list[tuple[float, Address, bytes]]) -> float:
        """Send everything at its time; gives the seconds that it took."""
        start = time.monotonic()
        for at, source, data in datagrams:
            self._serve(start + at)
            self._send(source, data)
        self._serve(start + RECORD_S)
        return time.monotonic() - start

    def _serve(self, until: float) -> None:
        while True:
            left = until - time.monotonic()
            ready, _, _ = select.select([self._port.udp, self._port.tcp], [], [], max(0.0, left))
            if self._port.udp in ready:
                self._datagram()
            if self._port.tcp in ready:
                self._stream()
            if left <= 0:
                return

    def _datagram(self) -> None:
        data, ancillary, _, source = self._port.udp.recvmsg(65_536, socket.CMSG_SPACE(_PKTINFO.size))
        host = next(socket.inet_ntoa(_PKTINFO.unpack(raw)[2]) for _, kind, raw in ancillary if kind == _IP_PKTINFO)
        self._feed((host, self._port.number), io.DatagramReceived(source, data))

    def _stream(self) -> None:
        connection, source = self._port.tcp.accept()
        with connection:
            connection.settimeout(2.0)
            host = connection.getsockname()[0]
            file = connection.makefile("rb")
            data = file.read(int.from_bytes(file.read(4), "big"))
            self._streams += 1
            for action in self._feed((host, self._port.number), io.StreamRequested(self._streams, source, data)):
                if isinstance(action, io.ReplyStream):
                    connection.sendall(len(action.data).to_bytes(4, "big") + action.data)

    def _feed(self, address: Address, event: io.Input) -> list[Any]:
        """Let the simulated endpoint at that address react; only what it says to the agent is sent."""
        node = self._nodes.get(address)
        if node is None:
            say(f"the agent spoke to {address}, where nobody is")
            return []
        now = node.clock.read(self._sim.now + time.monotonic() - self._began)
        actions = node.endpoint.handle(event, now)
        for action in actions:
            if isinstance(action, io.SendDatagram) and action.to == self._agent:
                self._send(address, action.data)
        return actions

    def _send(self, source: Address, data: bytes) -> None:
        info = _PKTINFO.pack(0, socket.inet_aton(source[0]), b"\0\0\0\0")
        self._port.udp.sendmsg([data], [(socket.IPPROTO_IP, _IP_PKTINFO, info)], 0, self._agent)
