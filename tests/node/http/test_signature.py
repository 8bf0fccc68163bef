"""Signatures of calls between nodes: what they cover, and that none is good twice."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gossip import ClusterKey, Keyring
from node.http.signature import AUTH_HEADER, MAX_CALLERS, OVERTAKING, PeerCall, PeerSigner
from node.peers import PLAN_HEADER
from node.plan import Plan
from tests.node.fakes.client import ask
from tests.node.fakes.cluster import Member, cluster
from tests.node.http.bodies import CHAT, chat

KEY, OTHER = ClusterKey.from_root(b"k" * 32), ClusterKey.from_root(b"o" * 32)
CALL = PeerCall("POST", "/peer/v1/x", "r1", {"x-grapevine-plan": "p"})
TEXT = st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), max_size=20)


def signer(*keys: ClusterKey) -> PeerSigner:
    return PeerSigner(Keyring(keys or (KEY,)))


@given(parts=st.lists(TEXT, min_size=5, max_size=5), body=st.binary(max_size=300), data=st.data())
def test_a_signature_covers_every_part_of_the_call(parts: list[str], body: bytes, data: st.DataObject) -> None:
    ours, theirs = signer(), signer()
    method, target, rid, name, value = parts
    call = PeerCall(method, target, rid, {f"x-grapevine-{name}": value})
    more = data.draw(TEXT.filter(bool))
    for changed in (
        replace(call, method=method + more),
        replace(call, target=target + more),
        replace(call, rid=rid + more),
        replace(call, ours={f"x-grapevine-{name}": value + more}),
        replace(call, ours={f"x-grapevine-{name}{more}": value}),
        replace(call, ours={}),
    ):
        assert theirs.verify(ours.sign(call, body, receiver=theirs.boot), changed) is None
    assert signer(OTHER).verify(ours.sign(call, body, receiver=theirs.boot), call) is None
    signed = theirs.verify(ours.sign(call, body, receiver=theirs.boot), call)
    assert signed is not None and signed.matches(body)
    assert not signed.matches(body + b"x") and not signed.matches(bytes(len(body) + 1))
    if body:
        place = data.draw(st.integers(0, len(body) - 1))
        assert not signed.matches(body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :])


def test_a_call_is_taken_once_and_by_the_process_that_it_was_made_for() -> None:
    ours, theirs = signer(), signer()
    header = ours.sign(CALL, b"", receiver=theirs.boot)
    assert theirs.verify(header, CALL) is not None
    assert theirs.verify(header, CALL) is None, "played again"
    assert signer().verify(ours.sign(CALL, b"", receiver=theirs.boot), CALL) is None, "theirs, restarted"


def test_calls_may_overtake_each_other() -> None:
    ours, theirs = signer(), signer()
    headers = [ours.sign(CALL, b"", receiver=theirs.boot) for _ in range(OVERTAKING + 1)]
    assert theirs.verify(headers[-1], CALL) is not None
    assert all(theirs.verify(header, CALL) is not None for header in headers[1:-1])
    assert all(theirs.verify(header, CALL) is None for header in headers)


def test_a_key_that_is_rotated_in_is_known_before_it_signs() -> None:
    theirs = signer(KEY, OTHER)
    for key in (KEY, OTHER):
        assert theirs.verify(signer(key).sign(CALL, b"", receiver=theirs.boot), CALL) is not None


def test_callers_are_forgotten_in_the_order_of_their_silence() -> None:
    theirs = signer()
    first = signer()
    for caller in [first, *(signer() for _ in range(MAX_CALLERS))]:
        assert theirs.verify(caller.sign(CALL, b"", receiver=theirs.boot), CALL) is not None
    assert len(theirs._callers) == MAX_CALLERS and first.boot not in theirs._callers


GOOD = signer().sign(CALL, b"", receiver="0" * 24)


PARTS = st.sampled_from([*GOOD.split("."), "", "-1", "٣", "00"])


@given(st.one_of(st.text(max_size=300), st.lists(PARTS).map(".".join)))
def test_no_header_breaks_the_check(header: str) -> None:
    assert signer().verify(header, CALL) is None


# --- between nodes


def forged(to: Member, body: bytes, **ours: str) -> tuple[tuple[str, str], ...]:
    """Headers of a call that a holder of the key signs by hand."""
    plan = Plan(rid="r", model="m", entry="a", target=to.name, hops=1).header()
    by = PeerSigner(to.node.keys.ring)
    headers = {PLAN_HEADER: plan, **ours}
    signed = by.sign(PeerCall("POST", "/peer" + CHAT, "r1", headers), body, receiver=to.node.signer.boot)
    return (*headers.items(), ("X-Request-Id", "r1"), (AUTH_HEADER, signed))


async def test_a_body_that_was_changed_on_its_way_reaches_no_engine() -> None:
    async with cluster(1, cluster_key="k" * 20) as nodes:
        a, body = nodes[0], chat()
        answer = await ask(a.port, "POST", "/peer" + CHAT, forged(a, body), body.replace(b"hi", b"ho"))
        assert answer.status == 403 and answer.one("x-grapevine-refused")
        assert not a.fake.received
        headers = forged(a, body)
        assert (await ask(a.port, "POST", "/peer" + CHAT, headers, body)).status == 200
        assert (await ask(a.port, "POST", "/peer" + CHAT, headers, body)).status == 403, "a recorded call"
        assert len(a.fake.received) == 1


async def test_a_call_without_a_good_head_is_refused_before_its_body_comes() -> None:
    async with cluster(1, cluster_key="k" * 20) as nodes:
        a = nodes[0]
        headers = (*forged(a, b"x")[:-1], (AUTH_HEADER, "0.0"), ("Content-Length", "1000"))
        async with asyncio.timeout(60):
            assert (await ask(a.port, "POST", "/peer" + CHAT, headers)).status == 403
