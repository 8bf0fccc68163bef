"""Checks of the cluster as the node sees it: reach, clocks, packet sizes, keys, models, versions, discovery."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from node.doctor.facts import Facts, members_of
from node.doctor.finding import Finding, fine, note, problem, warning

#: Gossip sends datagrams of up to this size; IP and UDP headers come on top, bytes.
DATAGRAM = 1400
HEADERS = 48
#: Seconds of clock offset from which logs of several hosts no longer tell what came first.
CLOCK_S = 5.0
#: Addresses shown of those that were dialled in vain.
SHOWN_DIALS = 5
#: Counters of refused packets: counter -> (what it means, what to do).
_SEALS = {
    "unknown_key": (
        "sealed with a key that this node does not have",
        "give every node the same key: `grapevine keys list --all`",
    ),
    "unsealed": (
        "in clear, while this cluster has a key",
        "set GRAPEVINE_CLUSTER_KEY where the sender is started from",
    ),
    "sealed_without_key": ("sealed, while this node has no key", "set GRAPEVINE_CLUSTER_KEY here"),
    "forged": (
        "changed on their way, or made by somebody without the key",
        "look at who can send to the gossip port",
    ),
}


def check_node(facts: Facts) -> Iterator[Finding]:
    """A node runs, and its engine does."""
    if facts.state is None:
        yield note("node", "no node runs here: only the host was looked at", "start one: `grapevine start`")
        return
    engine = facts.state.get("engine") or {}
    word, why = engine.get("state"), engine.get("reason") or engine.get("progress") or "no reason given"
    name = facts.state.get("self")
    if word == "failed":
        log = f" ({engine['log']})" if engine.get("log") else ""
        yield problem(
            "node", f"the engine of {name} has failed: {why}", f"its log{log} has all of it; then restart the node"
        )
    elif word == "ready":
        yield fine("node", f"{name} runs, its engine is ready")
    else:
        yield note("node", f"the engine of {name} is {word}: {why}")


def check_members(facts: Facts) -> Iterator[Finding]:
    """Every member is alive, and can be reached from here."""
    for peer in facts.peers:
        if peer.state != "alive":
            mend = "is it down, or cut off? Once it is up again it is found by itself"
            yield warning("members", f"{peer.name} is {peer.state}", mend)
            continue
        for what, why in peer.failed.items():
            mend = "open the port between the hosts (TCP; gossip also UDP), and check --advertise there"
            yield problem("reach", f"{peer.name} does not take connections for {what}: {why}", mend)
    for member in members_of(facts.state):
        if member.get("state") == "alive" and member.get("rtt_ms") is None and member.get("name") != _self(facts):
            text = f"{member.get('name')} never answered a probe over UDP"
            yield warning("reach", text, "open the gossip port for UDP, in both directions")
    alive = [peer for peer in facts.peers if peer.state == "alive" and not peer.failed]
    if alive and len(alive) == len(facts.peers):
        more = f", {facts.unlooked} more were not looked at" if facts.unlooked else ""
        yield fine("members", f"{len(alive)} peers are alive and reachable from here{more}")
    elif facts.state is not None and not facts.peers and (dials := _gossip(facts).get("failed_dials")):
        told = "; ".join(f"{address} {why}" for address, why in list(dials.items())[:SHOWN_DIALS])
        mend = "look at the address, at its gossip port (UDP and TCP), and at key and label there"
        yield problem("members", f"this node has found nobody: {told}", mend)
    elif facts.state is not None and not facts.peers:
        yield note("members", "this node is alone", "join another: `grapevine join HOST:18100`, or --join at start")


def check_clocks(facts: Facts) -> Iterator[Finding]:
    """Clocks agree. Nothing in the cluster rests on them; reading logs does."""
    asked = [peer for peer in facts.peers if peer.clock_offset_s is not None]
    wrong = [peer for peer in asked if abs(peer.clock_offset_s or 0.0) > CLOCK_S]
    for peer in wrong:
        offset = peer.clock_offset_s or 0.0
        text = f"the clock of {peer.name} is {abs(offset):.0f} s {'ahead of' if offset > 0 else 'behind'} ours"
        yield warning(
            "clock", text, "run chrony or systemd-timesyncd on both: routing does not mind, logs and tokens do"
        )
    if asked and not wrong:
        yield fine("clock", f"within {CLOCK_S:.0f} s of {len(asked)} peers")


def check_mtu(facts: Facts) -> Iterator[Finding]:
    """A gossip datagram fits into one packet everywhere."""
    known = [peer for peer in facts.peers if peer.path_mtu is not None]
    small = [peer for peer in known if (peer.path_mtu or 0) < DATAGRAM + HEADERS]
    for peer in small:
        text = f"packets to {peer.name} may have {peer.path_mtu} bytes, gossip needs {DATAGRAM + HEADERS}"
        mend = "raise the MTU of the tunnel or bridge on the way: fragments are lost more easily than whole packets"
        yield warning("MTU", text, mend)
    if known and not small:
        yield fine("MTU", f"at least {min(peer.path_mtu or 0 for peer in known)} bytes to {len(known)} peers")


def check_keys(facts: Facts) -> Iterator[Finding]:
    """Nobody sends packets that our keys do not open, or of another cluster."""
    counters = _counters(facts)
    for counter, (meaning, mend) in _SEALS.items():
        if counters.get(counter):
            yield problem("keys", f"{counters[counter]} gossip packets were {meaning}", mend)
    if counters.get("wrong_cluster"):
        text = f"{counters['wrong_cluster']} gossip packets came from a cluster with another label"
        yield note("keys", text, "fine if two clusters share a network; else give them the same --cluster")
    if facts.state is not None and not any(counters.get(counter) for counter in _SEALS):
        yield fine("keys", "no packet was refused for its key")


def check_models(facts: Facts) -> Iterator[Finding]:
    """Who serves one model by name serves the same thing, so that KV blocks can move."""
    kinds: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for member in members_of(facts.state):
        for model, print_ in (member.get("fingerprints") or {}).items():
            kinds[model][print_].append(str(member.get("name")))
    for model, prints in sorted(kinds.items()):
        known = {print_: names for print_, names in prints.items() if print_}
        if len(known) > 1:
            groups = "; ".join(", ".join(names) for names in known.values())
            text = f"{model} is not the same everywhere ({groups}): no KV blocks move between these groups"
            yield warning(
                "models", text, "use equal weights, dtype, tensor parallelism and vLLM version on all of them"
            )
        elif known and "" in prints:
            text = f"{', '.join(prints[''])} serve {model} without our KV connector"
            yield note("models", text, "start the engine by `grapevine start --model` to let KV blocks move")
        elif known:
            yield fine("models", f"{model}: equal on {sum(map(len, known.values()))} nodes, KV blocks can move")


def check_same_version(facts: Facts) -> Iterator[Finding]:
    """All nodes run one version, or are on their way to it."""
    versions: dict[str, list[str]] = defaultdict(list)
    for member in members_of(facts.state):
        if member.get("version") and member.get("state") in ("alive", "suspect"):
            versions[str(member["version"])].append(str(member.get("name")))
    if len(versions) > 1:
        told = "; ".join(f"{version}: {', '.join(names[:5])}" for version, names in sorted(versions.items()))
        yield warning("versions", f"nodes run different versions ({told})", "finish the upgrade, one node at a time")


def check_mdns(facts: Facts) -> Iterator[Finding]:
    """Multicast DNS shows the nodes of this network. Only a note: --join does without it."""
    if facts.mdns is None:
        if facts.mdns_error:
            yield note("mDNS", f"multicast DNS cannot be used here: {facts.mdns_error}", "use --join")
        return
    expected = {str(member.get("name")) for member in members_of(facts.state) if member.get("state") == "alive"}
    missing = sorted(expected - facts.mdns)
    if expected and len(missing) == len(expected):
        yield note(
            "mDNS", "multicast DNS shows none of the members", "switches and clouds often drop multicast: use --join"
        )
    else:
        yield fine("mDNS", f"multicast DNS shows {len(facts.mdns)} nodes")


def _self(facts: Facts) -> object:
    return (facts.state or {}).get("self")


def _gossip(facts: Facts) -> Mapping[str, Any]:
    return (facts.state or {}).get("gossip") or {}


def _counters(facts: Facts) -> Mapping[str, Any]:
    return _gossip(facts).get("counters") or {}
