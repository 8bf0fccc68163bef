"""Tables for terminals. Every field may be missing: the node may be of another version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

#: Least width of a column on a narrow terminal, characters.
_LEAST = {"model": 5, "reason": 5, "why": 5}
#: Columns of a candidate's cost, in milliseconds but for the last two; a column of nothings is left out.
_COSTS = {
    "node": "node",
    "total_ms": "total",
    "hop_ms": "hop",
    "queue_ms": "queue",
    "pull_ms": "pull",
    "prefill_ms": "prefill",
    "decode_ms": "decode",
    "barrier_ms": "barrier",
    "burden_ms": "burden",
    "matched_tokens": "cached",
    "source": "source",
}
_ALWAYS = ("node", "total_ms")
COLOURS = {
    "alive": "green",
    "loading": "cyan",
    "starting": "cyan",
    "restarting": "yellow",
    "silent": "yellow",
    "failed": "red",
    "draining": "yellow",
    "suspect": "yellow",
    "dead": "red",
    "left": "dim",
}


def show_state(answer: Mapping[str, Any], console: Console | None = None) -> None:
    """The table of `/gossip/state`, and the engine's reason when it does not run."""
    console = console or Console()
    title = f"cluster {escape(str(answer.get('cluster')))} as {escape(str(answer.get('self')))} sees it"
    columns = ("node", "state", "model", "run", "wait", "KV", "TTFT", "RTT", "chunks", "age")
    table = plain_table(title, columns, right=3)
    for member in answer.get("members", []):
        load = member.get("load") or {}
        table.add_row(
            _name(member, answer),
            _state(member, answer),
            shortened(", ".join(str(model) for model in member.get("models") or [])),
            _number(load.get("running")),
            _number(load.get("waiting")),
            _percent(load.get("kv_use")),
            _unit(load.get("ttft_p50_ms") or None, "ms"),
            "-" if member.get("name") == answer.get("self") else _unit(member.get("rtt_ms"), "ms", 1),
            _number(member.get("digest_size")),
            _unit(member.get("load_age_s"), "s", 1),
        )
    console.print(table)
    engine = answer.get("engine")
    if isinstance(engine, Mapping) and engine.get("state") != "ready":
        told = engine.get("progress") or engine.get("reason") or "no reason given"
        console.print(f"engine of this node: [bold]{escape(str(engine.get('state')))}[/], {escape(str(told))}")


def show_members(answer: Mapping[str, Any], console: Console | None = None) -> None:
    """The table of `/gossip/members`."""
    table = plain_table(f"cluster {escape(str(answer.get('cluster')))}", ("node", "state", "HTTP"), right=3)
    for member in answer.get("members", []):
        table.add_row(_name(member, answer), _state(member, answer), escape(str(member.get("http") or "-")))
    (console or Console()).print(table)


def show_explanation(answer: Mapping[str, Any], console: Console | None = None) -> None:
    """The choice of `/route/explain` and the terms of every candidate."""
    console = console or Console()
    plan, refusal = answer.get("plan"), answer.get("refusal")
    if isinstance(refusal, Mapping):
        console.print(f"[red]refused[/] with {refusal.get('status')}: {escape(str(refusal.get('message')))}")
    if isinstance(plan, Mapping):
        source = f", KV blocks pulled from [bold]{escape(str(plan['source']))}[/]" if plan.get("source") else ""
        source += _help(plan, answer)
        console.print(
            f"[green]target[/] [bold]{escape(str(plan.get('target')))}[/]{source} "
            f"({escape(str(plan.get('policy')))}: {escape(str(plan.get('reason')))})"
        )
    candidates = [item for item in answer.get("candidates") or [] if isinstance(item, Mapping)]
    if candidates:
        unit = plan.get("unit") if isinstance(plan, Mapping) else None
        # Not as the table's title: that would be broken to the width of the table.
        console.print(f"[italic]{_title(str(unit or 'ms'))}[/]")
        console.print(_costs(candidates))
    promised = answer.get("promised_chunks")
    for name, count in promised.items() if isinstance(promised, Mapping) else ():
        console.print(
            f"[dim]{escape(str(name))} cannot give {_number(count)} chunks of it, or not yet: no pull of those[/]"
        )
    for item in answer.get("unlike") or []:
        console.print(f"[yellow]no pull from {escape(str(item.get('node')))}: {escape(str(item.get('why')))}[/]")
    for item in answer.get("excluded") or []:
        console.print(f"[dim]not {escape(str(item.get('node')))}: {escape(str(item.get('why')))}[/]")


def _help(plan: Mapping[str, Any], answer: Mapping[str, Any]) -> str:
    """Who gives blocks beside the plan's source: as the estimate has it, and who else would where somebody does not."""
    costs = (item for item in answer.get("candidates") or [] if isinstance(item, Mapping))
    helpers = next((item.get("helpers") for item in costs if item.get("node") == plan.get("target")), None) or []
    others = [item.get("node") for item in (plan.get("sources") or [])[1:] if isinstance(item, Mapping)]
    others = [name for name in others if name not in helpers]
    told = f" together with {_names(helpers)}" if helpers else ""
    return told + (f", where need be from {_names(others)}" if others else "")


def _names(names: Iterable[object]) -> str:
    return " and ".join(escape(str(name)) for name in names)


def show_recent(answer: Mapping[str, Any], console: Console | None = None) -> None:
    """The table of `/route/recent`, newest first, and how good the forecasts were."""
    console = console or Console()
    columns = ("target", "reason", "model", "ago", "status", "predicted", "real", "cached")
    table = plain_table("last decisions of this node", columns, right=3)
    for item in answer.get("decisions") or []:
        table.add_row(
            escape(str(item.get("target") or "-")),
            shortened(item.get("reason")),
            shortened(item.get("model")),
            _unit(item.get("ago_s"), "s"),
            _ended(item),
            _unit(item.get("predicted_ms"), "ms"),
            # The first byte of an answer in one piece is its last: no time to first token.
            _unit(item.get("ran_ms"), "ms") if item.get("stream") else "-",
            f"{_number(item.get('cached_tokens'))}/{_number(item.get('predicted_cached_tokens'))}",
        )
    console.print(table)
    forecast = answer.get("forecast")
    if isinstance(forecast, Mapping) and forecast.get("streams"):
        console.print(
            f"{_number(forecast.get('streams'))} streams: median error of the time to the first byte "
            f"{_percent(forecast.get('error_median'))}; cached tokens {_number(forecast.get('cached_tokens'))} of "
            f"{_number(forecast.get('predicted_cached_tokens'))} predicted"
        )


def _ended(item: Mapping[str, Any]) -> str:
    """The status, and a mark on an answer that broke off after its first byte: why, `--json` tells."""
    return _number(item.get("status")) + (" broken" if item.get("broke") else "")


def _title(unit: str) -> str:
    """What the totals are: not every policy works out times."""
    if unit == "ms":
        return "cost of each candidate, ms"
    return f"{escape(unit)} of each candidate: this policy knows no times"


def _costs(candidates: Sequence[Mapping[str, Any]]) -> Table:
    keys = [key for key in _COSTS if key in _ALWAYS or any(item.get(key) for item in candidates)]
    table = plain_table("", [_COSTS[key] for key in keys], right=1)
    for item in candidates:
        table.add_row(*(_cell(item.get(key)) for key in keys))
    return table


def plain_table(title: str, columns: Sequence[str], right: int) -> Table:
    """A table without a frame; its columns from the place ``right`` on hold numbers."""
    table = Table(
        title=title or None,
        title_justify="left",
        header_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for index, column in enumerate(columns):
        justify: Literal["left", "right"] = "right" if index >= right else "left"
        # On a narrow terminal only models and reasons are shortened: a number that is cut would be a wrong number.
        table.add_column(
            column, justify=justify, no_wrap=column not in _LEAST, overflow="ellipsis", min_width=_LEAST.get(column)
        )
    return table


def shortened(value: object) -> Text:
    """A cell of such a column: one line, whatever its width."""
    return Text(str(value or "-"), no_wrap=True, overflow="ellipsis")


def _name(member: Mapping[str, Any], answer: Mapping[str, Any]) -> str:
    name = escape(str(member.get("name")))
    return f"[bold]{name}[/] *" if member.get("name") == answer.get("self") else name


def _state(member: Mapping[str, Any], answer: Mapping[str, Any]) -> str:
    """The member's state; of one that is alive, whether its engine takes requests."""
    word, load, engine = str(member.get("state")), member.get("load"), answer.get("engine")
    if word == "alive" and isinstance(load, Mapping) and not load.get("ready"):
        known = isinstance(engine, Mapping) and member.get("name") == answer.get("self")
        word = str(engine.get("state")) if known and engine else "loading"
    elif word == "alive" and isinstance(load, Mapping) and load.get("draining"):
        word = "draining"
    colour = COLOURS.get(word, "default")
    return f"[{colour}]{escape(word)}[/] {_unit(member.get('state_age_s'), 's')}".removesuffix(" -")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}" if value < 1000 else f"{value:.0f}"
    return "-" if value is None else escape(str(value))


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else "-"


def _percent(value: Any) -> str:
    return f"{100 * value:.0f} %" if isinstance(value, int | float) else "-"


def _unit(value: Any, unit: str, digits: int = 0) -> str:
    return f"{value:.{digits}f} {unit}" if isinstance(value, int | float) else "-"
