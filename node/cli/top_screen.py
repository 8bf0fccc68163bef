"""`grapevine top` as text: a line of totals, the nodes, what moves between them, the last requests."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from node.cli.cluster_view import ClusterView
from node.cli.render import COLOURS, plain_table, shortened

#: Lines of the screen beside the nodes: totals, titles, heads and blanks.
_FRAME = 12
_REQUESTS = 8
_PAIRS = 6
_BAR = 8
#: A terminal narrower than this shows fewer columns: a number that is cut would be a wrong number.
_WIDE = 110
#: What a narrow terminal does without.
_SPARED = ("tokens/s", "prefixes")


def screen(view: ClusterView, height: int, width: int, lost: str = "") -> RenderableType:
    """Everything, in at most ``height`` lines of ``width``. ``lost``: why the node does not answer."""
    wide = width >= _WIDE
    parts: list[RenderableType] = [_totals(view, lost)]
    flows = _flows(view)
    rest = max(3, height - _FRAME - (2 + min(_PAIRS, len(view.forwards | view.pulls)) if flows else 0))
    requests = min(_REQUESTS, len(view.requests), max(0, rest // 2 - 2))
    parts.append(_nodes(view, max(1, rest - (requests + 3 if requests else 0)), wide=wide))
    parts += [flows] if flows else []
    parts += [_requests(view, requests, wide=wide)] if requests else []
    return Group(*parts)


def _totals(view: ClusterView, lost: str) -> Text:
    up = [node for node in view.nodes if node.get("state") not in ("dead", "left")]
    prompt, cached = view.rate("prompt_tokens"), view.rate("cached_tokens")
    requests = sum(view.rate(place) for place in ("local", "forwarded", "refused"))
    words = [
        f"[bold]{escape(view.cluster)}[/] as [bold]{escape(view.self_name)}[/] sees it",
        f"{len(up)} of {len(view.nodes)} nodes",
        f"{view.total('running'):.0f} running, {view.total('waiting'):.0f} waiting",
        f"here {requests:.1f} requests/s",
    ]
    if prompt:
        words.append(f"{100 * cached / prompt:.0f} % of {prompt:.0f} prompt tokens/s cached")
    if view.rate("pulled_blocks") and view.block_tokens:
        words.append(f"{view.rate('pulled_blocks') * view.block_tokens:.0f} tokens/s pulled")
    text = Text.from_markup(", ".join(words))
    if lost:
        text.append(f"\n{lost}", "bold red")
    elif view.engine.get("state") not in (None, "ready"):
        told = view.engine.get("progress") or view.engine.get("reason") or ""
        text.append(f"\nthe engine of {view.self_name} is {view.engine['state']}: {told}", "yellow")
    return text


def _nodes(view: ClusterView, most: int, *, wide: bool) -> Table:
    columns = ("node", "state", "model", "run", "wait", "KV", "TTFT", "tokens/s", "RTT", "prefixes", "age")
    result = plain_table("", [column for column in columns if wide or column not in _SPARED], right=3)
    ranked = sorted(view.nodes, key=lambda n: (-(n.get("running") or 0) - (n.get("waiting") or 0), str(n.get("name"))))
    for node in ranked[:most]:
        word = str(node.get("state"))
        name = escape(str(node.get("name")))
        cells: tuple[RenderableType, ...] = (
            f"[bold]{name}[/] *" if node.get("name") == view.self_name else name,
            f"[{COLOURS.get(word, 'default')}]{escape(word)}[/]",
            shortened(", ".join(map(str, node["models"]))),
            _count(node.get("running")),
            _count(node.get("waiting")),
            _bar(node.get("kv_use")) if wide else _percent(node.get("kv_use")),
            _ms(node.get("ttft_p50_ms")),
            _count(node.get("decode_tps") or None),
            _ms(node.get("rtt_ms")),
            _count(node.get("chunks")),
            "-" if node.get("age_s") is None else f"{node['age_s']:.1f} s",
        )
        shown = (cell for column, cell in zip(columns, cells, strict=True) if wide or column not in _SPARED)
        result.add_row(*shown)
    if len(ranked) > most:
        result.caption = f"and {len(ranked) - most} less busy ones"
        result.caption_justify = "left"
    return result


def _flows(view: ClusterView) -> Table | None:
    pairs = view.forwards.keys() | view.pulls.keys()
    if not pairs:
        return None
    result = plain_table(
        "from and to this node since its start", ("from", "to", "requests", "KV blocks", "now"), right=2
    )
    weight = {pair: view.moved.get(("forwards", pair), 0) + view.moved.get(("pulls", pair), 0) for pair in pairs}
    ranked = sorted(pairs, key=lambda p: (-weight[p], -view.forwards.get(p, 0) - view.pulls.get(p, 0), p))
    for pair in ranked[:_PAIRS]:
        requests, blocks = view.moved.get(("forwards", pair), 0), view.moved.get(("pulls", pair), 0)
        now = ", ".join([f"+{requests} requests"] * bool(requests) + [f"+{blocks} blocks"] * bool(blocks))
        sums = (_count(view.forwards.get(pair)), _count(view.pulls.get(pair)))
        result.add_row(escape(pair[0]), escape(pair[1]), *sums, f"[cyan]{now}[/]" if now else "")
    return result


def _requests(view: ClusterView, most: int, *, wide: bool) -> Table:
    result = plain_table(
        "the last requests here", ("ran on", "why", "prompt", "cached", "pulled", "first byte", "status"), right=2
    )
    for row in list(view.requests)[:most]:
        status = f"{row.get('status')}{' broke off' if row.get('broke') else ''}"
        source = f" from {row.get('source')}" if wide else ""
        pulled = f"{row.get('pulled_blocks')}{source}" if row.get("source") else "-"
        result.add_row(
            escape(str(row.get("target") or "-")),
            shortened(row.get("reason")),
            _count(row.get("prompt_tokens")),
            _count(row.get("cached_tokens")),
            escape(pulled),
            _ms(row.get("first_byte_ms")),
            escape(status),
        )
    return result


def _count(value: Any) -> str:
    return f"{value:.0f}" if isinstance(value, int | float) else "-"


def _ms(value: Any) -> str:
    if not isinstance(value, int | float) or not value:
        return "-"
    return f"{value:.1f} ms" if value < 10 else f"{value:.0f} ms" if value < 10_000 else f"{value / 1000:.1f} s"


def _percent(value: Any) -> str:
    return f"{100 * value:.0f} %" if isinstance(value, int | float) else "-"


def _bar(value: Any) -> str:
    if not isinstance(value, int | float):
        return "-"
    full = round(_BAR * min(1.0, max(0.0, value)))
    return f"[magenta]{'█' * full}[/][dim]{'░' * (_BAR - full)}[/] {100 * value:3.0f} %"
