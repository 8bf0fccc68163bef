"""Coverage-guided fuzzing of whatever gossip reads from the network. The promise under test: the only error that a
remote can cause is the remote kind (`RemoteError`), and no input leaves an endpoint with a broken invariant.

The first byte of an input picks the reader, the rest is what it reads.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

import msgpack

sys.path.insert(0, str(Path(__file__).parents[1]))

try:
    import atheris
except ImportError:
    sys.exit("atheris is not installed, and is in no lock file: install it with  pip install atheris  and run again")

with atheris.instrument_imports(include=["gossip"]):
    from gossip import Endpoint, GossipConfig, Identity, RemoteError
    from gossip import actions as io
    from gossip import messages as m
    from gossip.decode import decode_packet, decode_row
    from gossip.encode import encode_packet, encode_part, make_row
    from gossip.envelope import Envelope
    from gossip.incarnation import first
    from gossip.keyring import ClusterKey, Keyring

CLUSTER = "test"
MAX_INPUT = 1500
PEER = ("10.0.0.2", 7946)
#: Inputs after which the endpoint starts afresh, so that a crash can be told from few of them.
AFRESH = 200


def packet(data: bytes) -> None:
    """A whole packet, in clear."""
    decode_packet(b"\x01" + data, CLUSTER, 9000)


def part(data: bytes) -> None:
    """One part of an otherwise good packet."""
    decode_packet(b"\x01" + msgpack.packb([CLUSTER, "peer", 70_000, [data]]), CLUSTER, 9000)


def row(data: bytes) -> None:
    """One load row."""
    decode_row(data)


KEYS = Keyring([ClusterKey.from_root(bytes(range(32)))])
ENVELOPE = Envelope(KEYS, CLUSTER, random.Random(1).randbytes)


def sealed(data: bytes) -> None:
    """What goes around a packet when there is a key: datagrams, requests and replies."""
    for kind in (1, 2, 3):
        for read in (ENVELOPE.open, ENVELOPE.open_request, lambda raw: ENVELOPE.open_reply(raw, None)):
            try:
                read(bytes([0xE5, kind]) + data)
            except RemoteError:
                continue


class Node:
    """An endpoint that takes whatever comes, in any of the three ways that bytes come in."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        identity = Identity("me", CLUSTER, 2, "10.0.0.1", 7946)
        self._endpoint = Endpoint(identity, GossipConfig.lan(), random.Random(1))
        self._now, self._inputs = 10.0, 0
        self._endpoint.handle(io.Started(), self._now)

    def __call__(self, data: bytes) -> None:
        """One event; the clock moves on, and every invariant is checked."""
        if self._inputs >= AFRESH:
            self._start()
        self._inputs += 1
        self._now += 0.3
        raw = b"\x01" + msgpack.packb([CLUSTER, "peer", 70_000, [data[1:]]])
        way = data[:1] or b"\0"
        if way[0] % 3 == 0:
            actions = self._endpoint.handle(io.DatagramReceived(PEER, raw), self._now)
        elif way[0] % 3 == 1:
            actions = self._endpoint.handle(io.StreamRequested(self._inputs, PEER, raw), self._now)
        else:
            actions = self._endpoint.handle_timeout(self._now)
            opened = [action.session for action in actions if isinstance(action, io.OpenStream)]
            for session in opened:
                self._endpoint.handle(io.StreamReplied(session, raw), self._now)
        self._endpoint.validate()


READERS = [packet, part, row, sealed, Node()]


def one_input(data: bytes) -> None:
    """Called by the fuzzer. Anything but the remote kind of error is a finding."""
    if not data:
        return
    try:
        READERS[data[0] % len(READERS)](data[1:])
    except RemoteError:
        return


def seeds() -> list[bytes]:
    """Good messages to start from."""
    parts: list[m.Part] = [
        m.Ping(7, "me"),
        m.Ack(7, "peer"),
        m.Nack(7),
        m.PingRequest(7, "other", "10.0.0.3", 7946),
        m.Alive("other", first(1), "10.0.0.3", 7946, b"meta"),
        m.Suspect("other", first(1), "peer"),
        m.Dead("me", first(2), "peer"),
        m.Left("other", first(1)),
        m.Rows((3,), (make_row("peer", 1, 5, b"load"),)),
        m.SlowDigest((m.SlowMark("peer", 1, 4),)),
        m.SlowPull("me", 2, 0, 0),
        m.SlowDelta("peer", 1, 0, 2, 2, 0, ((b"a", b"1", 1), (b"b", None, 2))),
    ]
    bare = [msgpack.unpackb(encode_part(p)) for p in parts]
    whole = encode_packet(CLUSTER, m.Packet("peer", first(1), tuple(parts)))[1:]
    found = [b"\x00" + whole, b"\x02" + make_row("peer", 1, 5, b"load").encoded, b"\x03" + ENVELOPE.seal(b"x" * 40)[2:]]
    return [*found, *(b"\x01" + p for p in bare), *(b"\x04" + way + p for p in bare for way in (b"\0", b"\1", b"\2"))]


def main() -> None:
    """Fuzz for a while, or repeat given inputs. Ends with the fuzzer's own exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("inputs", nargs="*", help="files to repeat instead")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(seeds()):
            Path(corpus, f"seed{number}").write_bytes(seed)
        limits = [f"-max_total_time={options.seconds}", f"-max_len={MAX_INPUT}", "-timeout=10", "-rss_limit_mb=2048"]
        atheris.Setup([sys.argv[0], *(options.inputs or [*limits, corpus])], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
