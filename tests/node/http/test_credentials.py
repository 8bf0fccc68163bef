"""Who may call: clients with their keys, peers with their signatures, keys that change, and plans that make sense."""

from __future__ import annotations

import json

import pytest

from gossip import ClusterKey, Keyring
from node.http.signature import AUTH_HEADER, PeerCall, PeerSigner
from node.peers import PLAN_HEADER
from node.plan import Plan
from tests.node.fakes.client import ask, bearer, connect, get
from tests.node.fakes.cluster import Cluster
from tests.node.http.bodies import CHAT, chat


@pytest.mark.parametrize(
    ("path", "header", "status"),
    [
        (b"/v1/models", b"Authorization: Bearer \xff", 401),
        (b"/admin/drain", b"Authorization: Bearer \xff", 403),
        (b"/peer/v1/x", b"x-grapevine-auth: a.\xff", 403),
    ],
)
async def test_a_credential_that_is_no_text_is_a_wrong_one(
    nodes: Cluster, path: bytes, header: bytes, status: int
) -> None:
    a = await nodes.add("a", api_key=("s",), admin_token="t", cluster_key="a long enough key")
    async with connect("127.0.0.1", a.port) as client:
        client.writer.write(b"POST " + path + b" HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n" + header + b"\r\n\r\n")
        assert (await client.answer()).status == status


@pytest.mark.parametrize("target", [CHAT + "?", CHAT + "#part", CHAT + "?#", CHAT + "?a=%20&b=c+d|{}"])
async def test_a_signed_call_arrives_whatever_the_target_looks_like(nodes: Cluster, target: str) -> None:
    """A target loses its fragment on the way: the signature is over what arrives."""
    a = await nodes.add("a", models=["other"], cluster_key="a long enough key")
    b = await nodes.add("b", cluster_key="a long enough key")
    await nodes.agree()
    answer = await ask(a.port, "POST", target, (), chat())
    assert answer.status == 200 and answer.one("x-grapevine-target") == "b", answer.body
    assert b.fake.received[0].target == target.partition("#")[0]


async def test_client_keys_guard_the_api_and_stay_here(nodes: Cluster) -> None:
    a, b = await nodes.add("a", api_key=("k1", "k2")), await nodes.add("b", api_key=("k1", "k2"))
    await nodes.agree()
    assert (await ask(a.port, "POST", CHAT, (), chat())).status == 401
    wrong = await ask(a.port, "POST", CHAT, (bearer("k3"),), chat())
    assert wrong.status == 401 and json.loads(wrong.body)["error"]["code"] == "invalid_api_key"
    assert (await get(a.port, "/v1/models")).status == 401
    assert (await ask(a.port, "POST", "/route/explain", (), chat())).status == 401
    assert (await ask(a.port, "GET", "/route/recent", (), b"")).status == 401
    for target in (a, b):
        forced = (bearer("k2"), ("x-grapevine-force-target", target.name))
        assert (await ask(a.port, "POST", CHAT, forced, chat())).status == 200
        assert not target.fake.received[-1].header("Authorization")
    assert (await get(a.port, "/healthz")).status == 200


async def test_without_client_keys_the_authorization_goes_to_the_engine(nodes: Cluster) -> None:
    a, b = await nodes.add("a"), await nodes.add("b")
    await nodes.agree()
    for target in (a, b):
        forced = (bearer("theirs"), ("x-grapevine-force-target", target.name))
        await ask(a.port, "POST", CHAT, forced, chat())
        assert target.fake.received[-1].header("Authorization") == ["Bearer theirs"]


def plan_for(target: str) -> tuple[str, str]:
    return (PLAN_HEADER, Plan(rid="r", model="m", entry="a", target=target, hops=1).header())


def signer(text: str) -> PeerSigner:
    return PeerSigner(Keyring([ClusterKey.from_text(text, "default")]))


async def test_with_a_cluster_key_only_its_holders_may_call_peer_routes(nodes: Cluster) -> None:
    a, b = await nodes.add("a", cluster_key="k" * 20), await nodes.add("b", cluster_key="k" * 20)
    await nodes.agree()
    assert (await ask(a.port, "POST", CHAT, (("x-grapevine-force-target", "b"),), chat())).status == 200
    path, plan, rid = "/peer" + CHAT, plan_for("b"), ("X-Request-Id", "r1")

    def signed(text: str, header: str) -> tuple[str, str]:
        call = PeerCall("POST", path, "r1", {PLAN_HEADER: header})
        return (AUTH_HEADER, signer(text).sign(call, chat(), receiver=b.node.signer.boot))

    assert (await ask(b.port, "POST", path, (plan, rid), chat())).status == 403
    assert (await ask(b.port, "POST", path, (plan, rid, signed("another key", plan[1])), chat())).status == 403
    assert (await ask(b.port, "POST", path, (plan, rid, signed("k" * 20, "x")), chat())).status == 403
    assert (await ask(b.port, "POST", path, (plan, rid, signed("k" * 20, plan[1])), chat())).status == 200


async def test_without_a_key_only_addresses_of_members_may_call_peer_routes(nodes: Cluster) -> None:
    a = await nodes.add("a")
    path, plan = "/peer" + CHAT, plan_for("a")
    assert (await ask(a.port, "POST", path, (plan,), chat())).status == 200
    a.node.registry._up = frozenset({"192.0.2.7"})
    answer = await ask(a.port, "POST", path, (plan,), chat())
    assert answer.status == 403 and answer.one("x-grapevine-refused")


@pytest.mark.parametrize("plan", ["", "!", "AAAA", "A" * 5000])
async def test_a_plan_that_makes_no_sense_is_refused(nodes: Cluster, plan: str) -> None:
    a = await nodes.add("a")
    answer = await ask(a.port, "POST", "/peer" + CHAT, ((PLAN_HEADER, plan),), chat())
    assert answer.status == 400 and not a.fake.received


async def test_cluster_keys_are_rotated_while_the_cluster_serves_and_never_shown(nodes: Cluster) -> None:
    more = {"cluster_key": "first secret", "admin_token": "secret"}
    a, b = await nodes.add("a", **more), await nodes.add("b", **more)
    await nodes.agree()
    admin = bearer("secret")

    async def step(**what: str) -> list[str]:
        for member in (a, b):
            answer = await ask(member.port, "POST", "/admin/keys", (admin,), json.dumps(what).encode())
            assert answer.status == 200, answer.body
            assert b"secret" not in answer.body
        return [key["id"] for key in json.loads(answer.body)["keys"]]

    async def served() -> int:
        return (await ask(a.port, "POST", CHAT, (("x-grapevine-force-target", "b"),), chat())).status

    (old,) = [key["id"] for key in json.loads((await get(a.port, "/admin/keys", admin)).body)["keys"]]
    _, new = await step(add="second secret")
    assert await served() == 200
    assert await step(use=new) == [new, old]
    assert await served() == 200
    assert await step(remove=old) == [new]
    assert await served() == 200
    path, plan, rid = "/peer" + CHAT, plan_for("b"), ("X-Request-Id", "r1")
    for text, status in (("first secret", 403), ("second secret", 200)):
        call = PeerCall("POST", path, "r1", {PLAN_HEADER: plan[1]})
        signed = (AUTH_HEADER, signer(text).sign(call, chat(), receiver=b.node.signer.boot))
        assert (await ask(b.port, "POST", path, (plan, rid, signed), chat())).status == status


async def test_a_wrong_step_of_a_key_rotation_is_refused(nodes: Cluster) -> None:
    a = await nodes.add("a", cluster_key="first secret", admin_token="secret")
    assert (await get(a.port, "/admin/keys")).status == 401
    for body, status in (
        (b"{}", 400),
        (b"x", 400),
        (b'{"add": 5}', 400),
        (b'{"use": "00"}', 409),
        (b'{"add": "x"}', 409),
    ):
        assert (await ask(a.port, "POST", "/admin/keys", (bearer("secret"),), body)).status == status
