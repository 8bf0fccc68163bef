"""`grapevine kv` as tables. Every field may be missing: the node may be of another version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape

from node.cli.render import plain_table

_GB = 1e9


def show(name: str, section: Mapping[str, Any], console: Console | None = None) -> None:
    """Everything that the node tells of its KV."""
    console = console or Console()
    if not section.get("enabled"):
        console.print(f"[bold]{escape(name)}[/] has no KV pool (started with --no-kv)")
        return
    _summary(name, section, console)
    _top(section.get("top") or [], console)
    _peers(section.get("peers") or {}, console)
    for peer, why in (section.get("unlike") or {}).items():
        console.print(f"[yellow]blocks of {escape(str(peer))} cannot be used here:[/] {escape(str(why))}")


def _summary(name: str, section: Mapping[str, Any], console: Console) -> None:
    pool, tokens, served = section.get("pool") or {}, section.get("tokens") or {}, section.get("served") or {}
    used, capacity = pool.get("used_bytes", 0), pool.get("capacity_bytes", 0) or 1
    console.print(
        f"[bold]{escape(name)}[/]: pool {used / _GB:.2f} of {capacity / _GB:.2f} GB, {pool.get('blocks', 0)} blocks "
        f"({pool.get('protected', 0)} used again), {pool.get('evictions', 0)} evicted "
        f"({pool.get('recalled', 0)} of them came back), {section.get('corrupt', 0)} corrupt"
    )
    if section.get("why") or not section.get("connected"):
        console.print(f"[yellow]no block moves:[/] {escape(str(section.get('why') or 'the engine is not connected'))}")
    if section.get("encrypted"):
        console.print("blocks travel over TLS, and only to and from nodes that do the same (--kv-tls)")
    prompt = tokens.get("prompt", 0)
    if prompt:
        console.print(
            f"prompt tokens {prompt}: {_share(tokens.get('engine'), prompt)} found in the engine's cache, "
            f"{_share(tokens.get('pool'), prompt)} in the pool, the rest computed"
        )
    if section.get("copy_bytes_s"):
        console.print(f"the engine copies blocks out of the pool at {section['copy_bytes_s'] / _GB:.2f} GB/s")
    pulls = section.get("pulls") or {}
    if pulls.get("shared") or pulls.get("taken_over"):
        console.print(
            f"{pulls.get('shared', 0)} pulls had several sources, {pulls.get('taken_over', 0)} blocks were asked of "
            "another source after one had not brought them"
        )
    console.print(
        f"peers looked up {pool.get('hits', 0) + pool.get('misses', 0)} blocks, {100 * pool.get('hit_ratio', 0):.0f} % "
        f"were here; {served.get('bytes', 0) / _GB:.2f} GB sent, {served.get('pinned_bytes', 0) / _GB:.2f} GB read by "
        f"peers of this host, {served.get('busy', 0)} told to come again"
    )


def _top(prefixes: list[Mapping[str, Any]], console: Console) -> None:
    if not prefixes:
        return
    shown = plain_table("prefixes used most", ("prefix", "blocks", "chunks", "uses"), right=1)
    for prefix in prefixes:
        shown.add_row(*(escape(str(prefix.get(key, "-"))) for key in ("prefix", "blocks", "chunks", "uses")))
    console.print(shown)


def _peers(peers: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    if not peers:
        return
    shown = plain_table("pulled from", ("node", "way", "pulls", "blocks", "GB", "GB/s", "failed"), right=2)
    for name, peer in peers.items():
        shown.add_row(
            escape(name),
            escape(", ".join(peer.get("ways") or {}) or "-"),
            str(peer.get("pulls", 0)),
            str(peer.get("blocks", 0)),
            f"{peer.get('bytes', 0) / _GB:.2f}",
            f"{peer.get('bytes_s', 0) / _GB:.2f}",
            str(sum((peer.get("failures") or {}).values())),
        )
    console.print(shown)
    for name, peer in peers.items():
        if peer.get("last_failure"):
            console.print(f"last failure of {escape(name)}: {escape(str(peer['last_failure']))}")


def _share(part: Any, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if isinstance(part, int | float) else "-"
