from __future__ import annotations

from dataclasses import fields, replace

import pytest

from kvmigrate.fingerprint import NO_FINGERPRINT, Fingerprint, differences, matching

FULL = Fingerprint(**{f.name: "x" if isinstance(f.default, str) else 2 for f in fields(Fingerprint)})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [f.name for f in fields(Fingerprint)])
def test_every_field_changes_the_digest_and_an_unknown_one_never_matches(name: str) -> None:
    known = getattr(FULL, name)
    other = replace(FULL, **{name: known + known})
    unknown = replace(FULL, **{name: type(known)()})
    assert FULL.complete and FULL.matches(replace(FULL))
    assert not FULL.matches(other)
    told = differences(FULL.to_fields(), other.to_fields())
    assert told == f"{name} is {getattr(other, name)} there and {known} here"
    assert differences(FULL.to_fields(), unknown.to_fields()) == f"{name} is unknown there and {known} here"
    assert differences(unknown.to_fields(), unknown.to_fields()) == f"{name} is unknown there and unknown here"
    assert not unknown.complete and unknown.missing == (name,)
    assert unknown.digest() == NO_FINGERPRINT
    assert not unknown.matches(unknown)


def test_values_do_not_run_into_each_other() -> None:
    assert replace(FULL, dtype="ab", cache_dtype="c").digest() != replace(FULL, dtype="a", cache_dtype="bc").digest()


def test_no_fingerprint_matches_nothing() -> None:
    assert not matching(NO_FINGERPRINT, NO_FINGERPRINT)
    assert not matching(b"short", b"short")
    assert matching(FULL.digest(), FULL.digest())


def test_fields_come_back_and_wrong_types_are_left_unknown() -> None:
    assert Fingerprint.from_fields(FULL.to_fields()) == FULL
    assert Fingerprint.from_fields({**FULL.to_fields(), "layers": "2"}).missing == ("layers",)
    assert Fingerprint.from_fields({**FULL.to_fields(), "layers": True}).missing == ("layers",)
    assert Fingerprint.from_fields({"unheard": 1}) == Fingerprint()
