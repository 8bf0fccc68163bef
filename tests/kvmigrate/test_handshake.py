from __future__ import annotations

import pytest

from kvmigrate.errors import RemoteError
from kvmigrate.handshake import PullerHandshake, Secrets, SourceHandshake
from kvmigrate.messages import Busy, Challenge, Error, Hello, Message, Proof, Welcome

KEY = b"key"


def shake(puller: PullerHandshake, source: SourceHandshake) -> Message | None:
    """Run a handshake to its end; returns the source's last answer."""
    message: Message | None = puller.start()
    answer: Message | None = None
    while message is not None:
        answer = source.receive(message)
        message = puller.receive(answer)
    return answer


@pytest.mark.parametrize("key", [KEY, None])
def test_two_nodes_of_one_cluster_agree(key: bytes | None) -> None:
    puller, source = PullerHandshake("c", "a", key, bytes(16)), SourceHandshake("c", key, bytes(16))
    assert shake(puller, source) == Welcome()
    assert puller.done and source.done and source.peer == "a"


@pytest.mark.parametrize(("ours", "theirs"), [(KEY, b"other"), (KEY, None), (None, KEY)])
def test_different_keys_never_agree(ours: bytes | None, theirs: bytes | None) -> None:
    puller, source = PullerHandshake("c", "a", ours, bytes(16)), SourceHandshake("c", theirs, b"n" * 16)
    with pytest.raises(RemoteError, match="cluster key"):
        shake(puller, source)
    assert not puller.done and not source.done


def test_a_puller_that_does_not_check_the_source_is_still_refused_without_the_key() -> None:
    source = SourceHandshake("c", KEY, b"n" * 16)
    challenge = source.receive(PullerHandshake("c", "a", None, bytes(16)).start())
    assert isinstance(challenge, Challenge)
    for forged in (b"", challenge.proof, bytes(32)):  # none, the source's own played back, a guess
        assert isinstance(source.receive(Proof(forged)), Error)
        assert not source.done


@pytest.mark.parametrize("answer", [Welcome(), Challenge(bytes(16), bytes(32)), Challenge(bytes(16), b"")])
def test_a_source_that_only_says_welcome_or_guesses_is_not_believed(answer: Message) -> None:
    puller = PullerHandshake("c", "a", KEY, bytes(16))
    puller.start()
    with pytest.raises(RemoteError):
        puller.receive(answer)
    assert not puller.done


def test_a_source_may_not_play_the_pullers_own_proof_back() -> None:
    puller = PullerHandshake("c", "a", KEY, bytes(16))
    challenge = SourceHandshake("c", KEY, bytes(16)).receive(puller.start())
    proof = puller.receive(challenge)
    assert proof is not None
    with pytest.raises(RemoteError):
        PullerHandshake("c", "a", KEY, bytes(16)).receive(Challenge(bytes(16), proof.proof))


def test_a_proof_is_good_for_one_connection() -> None:
    first = SourceHandshake("c", KEY, b"1" * 16)
    puller = PullerHandshake("c", "a", KEY, bytes(16))
    challenge = first.receive(puller.start())
    proof = puller.receive(challenge)
    assert proof is not None and first.receive(proof) == Welcome()
    second = SourceHandshake("c", KEY, b"2" * 16)
    second.receive(puller.start())
    assert isinstance(second.receive(proof), Error)


def test_another_cluster_is_refused_by_name() -> None:
    with pytest.raises(RemoteError, match="cluster 'c'"):
        shake(PullerHandshake("d", "a", KEY, bytes(16)), SourceHandshake("c", KEY, bytes(16)))


@pytest.mark.parametrize("message", [Busy(), Proof(b""), Welcome()])
def test_a_source_that_hears_something_else_first_hangs_up(message: Message) -> None:
    with pytest.raises(RemoteError, match="unexpected"):
        SourceHandshake("c", KEY, bytes(16)).receive(message)


def test_a_second_hello_and_a_second_proof_are_refused() -> None:
    source = SourceHandshake("c", None, bytes(16))
    hello = Hello(1, "c", "a", bytes(16))
    source.receive(hello)
    with pytest.raises(RemoteError):
        source.receive(hello)
    source.receive(Proof(b""))
    with pytest.raises(RemoteError):
        source.receive(Proof(b""))


@pytest.mark.parametrize(
    ("puller", "source"),
    [
        ((b"old", b"new"), b"old"),
        (b"old", (b"old", b"new")),
        ((b"old", b"new"), (b"new", b"old")),
        ((b"new", b"old"), (b"old", b"new")),
        (b"new", (b"new", b"old")),
        ((b"new",), (b"new",)),
    ],
)
def test_every_step_of_a_rotation_keeps_both_sides_together(puller: Secrets, source: Secrets) -> None:
    one, other = PullerHandshake("c", "a", puller, bytes(16)), SourceHandshake("c", source, b"n" * 16)
    assert shake(one, other) == Welcome()


def test_a_key_that_was_removed_opens_nothing() -> None:
    with pytest.raises(RemoteError, match="cluster key"):
        shake(PullerHandshake("c", "a", b"old", bytes(16)), SourceHandshake("c", (b"new", b"newer"), bytes(16)))
