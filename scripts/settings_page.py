"""Writes docs/configuration.md from `node.settings.Settings`, the one definition: `python scripts/settings_page.py`.

A test compares what would be written with what is there.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from node.cli.options import LISTS, PREFIX, kinds
from node.settings import RANGES, Settings

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
#: What belongs together; keys of no group come under the last title.
GROUPS = {
    "Engine": (
        "model", "served_model_name", "engine_args", "engine_command", "engine_url", "engine_api_key",
        "engine_start_timeout_s", "engine_nice", "stop_grace_s",
    ),
    "Addresses": ("name", "host", "port", "advertise", "gossip_port", "kv_port"),
    "Cluster": ("join", "mdns", "cluster", "cluster_key", "gossip_preset", "cluster_size"),
    "Routing and KV blocks": ("policy", "kv", "kv_pool_gib", "max_running", "max_queue", "max_body_mib"),
    "Clients and administrators": ("api_key", "cors_origin", "admin_token"),
    "Files and logs": ("state_dir", "run_dir", "log_format", "log_level"),
}  # fmt: skip
REST = "More"
HEAD = f"""# Configuration

Written by `scripts/settings_page.py` from `node/settings.py`, where each key is defined once. Do not edit it by hand.

Each key is a flag of `grapevine start`, a variable of the environment, and a key of a TOML file (`--config FILE`, or
`{PREFIX}_CONFIG`); underscores may stand for dashes in the file. A flag wins over the environment, that over
the file, that over the default. A value that cannot work is refused at the start, with what to do.

```toml
model = "Qwen/Qwen3-8B"
host = "0.0.0.0"
join = ["host-a:18100", "host-b:18100"]
engine-args = "--tensor-parallel-size 2 --max-model-len 32768"
max-running = 128
```

A list takes several values after one flag (`--join a:18100 b:18100`) or several flags; in the environment they are
separated by commas or blanks. What comes after `--` goes to vLLM untouched, and replaces `engine-args`. **Secrets**
belong into the environment or into a file that only the node's user can read: a command line is visible to everybody on
the host. They are never shown again.
"""
TAIL = f"""
## Other variables
| variable | what |
|---|---|
| `{PREFIX}_CONFIG` | the TOML file |
| `{PREFIX}_CACHE_DIR` | where the default model is kept; `~/.cache/grapevine` otherwise |
| `{PREFIX}_NODE` | the node that `grapevine state` and the other commands ask |

A variable that begins with `{PREFIX}_` and is none of these is named at the start, with the one that was probably
meant.
"""


def page() -> str:
    """The whole document."""
    fields = {item.name: item for item in dataclasses.fields(Settings)}
    grouped = {name for names in GROUPS.values() for name in names}
    groups = {**GROUPS, REST: tuple(name for name in fields if name not in grouped)}
    parts = [HEAD]
    for title, names in groups.items():
        rows = [row(fields[name]) for name in names if name in fields]
        if rows:
            parts.append("\n".join(["", f"## {title}", "| key | default | what |", "|---|---|---|", *rows, ""]))
    return "".join([*parts, TAIL])


def row(item: dataclasses.Field[Any]) -> str:
    """One key: its flag, its default, and what it means with range or choices."""
    dashed = item.name.replace("_", "-")
    flag = f"`--{dashed}`, `--no-{dashed}`" if kinds()[item.name] is bool else f"`--{dashed}`"
    about = item.metadata
    what = [about["text"]]
    if about["choices"]:
        what.append("One of " + ", ".join(f"`{choice}`" for choice in about["choices"]) + ".")
    if item.name in RANGES:
        least, most = RANGES[item.name]
        what.append(f"From {least:,} to {most:,}.")
    if item.name in LISTS:
        what.append("A list.")
    if about["secret"]:
        what.append("**Secret.**")
    return f"| {flag}<br>`{PREFIX}_{item.name.upper()}` | {default(item)} | {' '.join(what)} |"


def default(item: dataclasses.Field[Any]) -> str:
    """What holds when nothing is said."""
    if item.metadata["derived"]:
        return str(item.metadata["derived"])
    if isinstance(item.default, bool):
        return "on" if item.default else "off"
    return f"`{item.default:g}`" if isinstance(item.default, float) else f"`{item.default}`" if item.default else ""


if __name__ == "__main__":
    PAGE.write_text(page())
