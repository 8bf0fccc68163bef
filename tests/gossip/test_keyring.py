"""Keys: what they are made of, and how they are added, used and removed."""

from __future__ import annotations

import pytest

from gossip import ClusterKey, Keyring, LocalError
from gossip.keyring import MAX_KEYS


def key(number: int) -> ClusterKey:
    return ClusterKey.from_root(bytes([number]) * 32)


def test_a_key_depends_on_its_text_and_on_the_cluster_and_on_nothing_else() -> None:
    one = ClusterKey.from_text("correct horse", "home")
    assert one == ClusterKey.from_text("correct horse", "home")
    assert one.root != ClusterKey.from_text("correct horse", "away").root
    assert one.root != ClusterKey.from_text("Correct horse", "home").root


def test_neither_the_text_nor_the_key_is_shown() -> None:
    one = ClusterKey.from_text("correct horse", "home")
    for shown in (repr(one), repr(Keyring([one]).ids), one.id):
        assert "correct" not in shown
        assert one.root.hex() not in shown
        assert str(one.root) not in shown


def test_each_use_has_a_key_of_its_own() -> None:
    uses = {key(1).derive(use) for use in (b"gossip", b"peer calls", b"transfers")} | {key(1).root}
    assert len(uses) == 4


@pytest.mark.parametrize("text", ["", "short", "x" * 1025])
def test_a_text_that_is_no_secret_is_refused(text: str) -> None:
    with pytest.raises(LocalError, match="8 to 1024"):
        ClusterKey.from_text(text, "home")


def test_a_rotation_adds_uses_and_removes() -> None:
    ring = Keyring([key(1)])
    assert ring.add(key(2))
    assert not ring.add(key(2))
    assert ring.ids == (key(1).id, key(2).id)
    ring.use(key(2).id)
    assert ring.first == key(2)
    ring.remove(key(1).id)
    assert ring.ids == (key(2).id,)


def test_the_key_in_use_cannot_be_removed_and_an_unknown_one_is_named() -> None:
    ring = Keyring([key(1), key(2)])
    with pytest.raises(LocalError, match="in use"):
        ring.remove(key(1).id)
    for change in (ring.use, ring.remove):
        with pytest.raises(LocalError, match="no key 00"):
            change("00")
    assert ring.ids == (key(1).id, key(2).id)


def test_a_cluster_in_clear_takes_no_key_while_it_runs() -> None:
    ring = Keyring()
    with pytest.raises(LocalError, match="in clear"):
        ring.add(key(1))
    assert ring.first is None


def test_a_ring_is_bounded() -> None:
    ring = Keyring(key(n) for n in range(MAX_KEYS))
    with pytest.raises(LocalError, match="remove those"):
        ring.add(key(99))
