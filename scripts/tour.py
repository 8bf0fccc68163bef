"""What `scripts/quickstart` shows once the environment is there: three nodes, then each promise with real output.

Exit status: 0 when every step of the tour happened (with --once) or the user pressed Ctrl-C after it; 1 when a step
did not happen; 2 when the cluster did not come up.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from localcluster import GRAPEVINE, ClusterFailed, LocalCluster, free_ports
from rich.console import Console
from rich.live import Live
from rich.table import Table

from node.model_store import ensure_default_model

MODEL = "SmolLM2-135M-Instruct"
NAMES = ("red", "green", "blue")
FIRST_PORT = 8101
DOCUMENT_LINES = 105
"""About 3,000 tokens of the default model: long enough that computing it again hurts, short enough for its context."""
SPREAD_LIMIT_S = 10.0
ANSWER_LIMIT_S = 180.0
ENGINE_ARGS = ("--max-model-len", "4096", "--enforce-eager")

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


class StepFailed(Exception):
    """A step of the tour did not happen; the message says what was seen instead."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one streamed request. Times in seconds since it was sent."""

    text: str
    first_token_s: float
    total_s: float
    target: str
    reason: str
    pulled_blocks: int


class Tour:
    """The steps, in order; each prints what it did and raises StepFailed if it did not."""

    def __init__(self, cluster: LocalCluster, session: aiohttp.ClientSession) -> None:
        self._cluster = cluster
        self._session = session
        self._holder = ""

    async def run(self) -> list[str]:
        """Run every step; returns what failed, in words."""
        failures = []
        for number, (title, step) in enumerate(
            [
                ("A streamed chat through each node", self.chats),
                ("A long prompt through two entries: the second goes to the holder of its prefix", self.shared_prefix),
                ("The same prompt on nodes without it: recomputed, and with its KV blocks pulled", self.migration),
                ("The gossip state, asked of one node", self.state),
            ],
            start=1,
        ):
            console.print(f"\n[bold]{number}. {title}[/bold]")
            try:
                await step()
            except (StepFailed, aiohttp.ClientError, TimeoutError, OSError) as error:
                failures.append(f"step {number}: {error or type(error).__name__}")
                console.print(f"[bold red]   did not happen:[/bold red] {failures[-1]}")
        return failures

    async def chats(self) -> None:
        """One short chat per entry, printed as it streams."""
        for name in NAMES:
            console.print(f"   [cyan]{name}[/cyan] > ", end="")
            body = {
                "messages": [{"role": "user", "content": f"Write one short sentence about the colour {name}."}],
                "max_tokens": 32,
            }
            answer = await self._ask(
                name, "/v1/chat/completions", body, on_text=lambda text: console.print(text, end="", markup=False)
            )
            console.print(f"\n     [dim]answered by {answer.target}: {answer.reason}[/dim]")

    async def shared_prefix(self) -> None:
        """The first question may go anywhere; the second, through another entry, must go where the first went."""
        first = await self._ask("red", "/v1/completions", question("Which ship came first?"))
        self._holder = first.target
        await self._wait_spread("green")
        # Pulling has a step of its own, for which two nodes must still lack the prompt.
        second = await self._ask(
            "green", "/v1/completions", question("Which ship came last?"), headers={"x-grapevine-no-pull": "1"}
        )
        table = Table("entry", "answered by", "why", "first token")
        table.add_row("red", first.target, first.reason, f"{first.first_token_s * 1000:.0f} ms")
        table.add_row("green", second.target, second.reason, f"{second.first_token_s * 1000:.0f} ms")
        console.print(table)
        if second.target != first.target:
            raise StepFailed(f"the prefix is on {first.target}, but the request went to {second.target}")

    async def migration(self) -> None:
        """Two nodes that lack the prompt: one recomputes it, the other pulls its blocks from the holder."""
        if not self._holder:
            raise StepFailed("no node is known to hold the prompt")
        cold_node, warm_node = (name for name in NAMES if name != self._holder)
        body = question("How many ships were there?")
        cold = await self._ask(
            self._holder, "/v1/completions", body,
            headers={"x-grapevine-force-target": cold_node, "x-grapevine-no-pull": "1"},
        )  # fmt: skip
        before = await self._cached_tokens(warm_node)
        warm = await self._ask(
            self._holder, "/v1/completions", body,
            headers={"x-grapevine-force-target": warm_node, "x-grapevine-force-source": self._holder},
        )  # fmt: skip
        cached = await self._cached_tokens(warm_node) - before
        local = await self._ask(
            self._holder, "/v1/completions", body, headers={"x-grapevine-force-target": self._holder}
        )  # fmt: skip
        table = Table("node", "how", "KV blocks pulled", "first token", "answer")
        for answer, how in (
            (cold, "recomputed"),
            (warm, f"pulled from {self._holder}"),
            (local, "already there"),
        ):
            table.add_row(
                answer.target, how, str(answer.pulled_blocks), f"{answer.first_token_s * 1000:.0f} ms",
                answer.text.strip().replace("\n", " ")[:40],
            )  # fmt: skip
        console.print(table)
        console.print(
            f"   pulled / recomputed = {warm.first_token_s / cold.first_token_s:.2f}; {warm_node} did not compute "
            f"{cached:.0f} tokens"
        )
        console.print(
            "   [dim]A pulled prompt gives the answer of one that is already there. A recomputed one may differ in a "
            "word: bfloat16 rounds differently when a prefill is cut differently.[/dim]"
        )
        if cold.pulled_blocks or not warm.pulled_blocks:
            raise StepFailed(f"pulled {cold.pulled_blocks} and {warm.pulled_blocks} blocks, expected 0 and some")
        if not cached:
            raise StepFailed(f"{warm_node} pulled {warm.pulled_blocks} blocks, and computed the prompt all the same")

    async def state(self) -> None:
        """The table that `grapevine state` prints."""
        process = await asyncio.create_subprocess_exec(
            GRAPEVINE, "state", "--node", self._cluster["blue"].url,
            stdout=asyncio.subprocess.PIPE, env={"COLUMNS": str(console.width), "TERM": "dumb"},
        )  # fmt: skip
        output, _ = await asyncio.wait_for(process.communicate(), ANSWER_LIMIT_S)
        text = output.decode()
        console.print(text, markup=False)
        if process.returncode or not all(name in text for name in NAMES):
            raise StepFailed("the state does not list all three nodes")

    async def _cached_tokens(self, name: str) -> float:
        """Prompt tokens that a node's engine took from a cache so far."""
        async with self._session.get(self._cluster[name].url + "/metrics") as reply:
            for line in (await reply.text()).splitlines():
                if line.startswith("grapevine_actual_cached_tokens_total "):
                    return float(line.split()[1])
        raise StepFailed(f"{name} does not show how many tokens came from a cache")

    async def _wait_spread(self, entry: str) -> None:
        """Until `entry` has heard by gossip that the holder has the document."""
        deadline = time.monotonic() + SPREAD_LIMIT_S
        while time.monotonic() < deadline:
            async with self._session.post(
                self._cluster[entry].url + "/route/explain",
                json={"model": MODEL, **question("Which ship came last?")},
            ) as reply:
                plan = await reply.json()
            if plan["matched_chunks"].get(self._holder):
                return
            await asyncio.sleep(0.2)

    async def _ask(
        self,
        entry: str,
        path: str,
        body: dict[str, object],
        *,
        headers: dict[str, str] | None = None,
        on_text: Callable[[str], None] = lambda text: None,
    ) -> Answer:
        """Send one streamed request and read it to its end."""
        body = {"model": MODEL, "stream": True, "temperature": 0, **body}
        sent = time.monotonic()
        first: float | None = None
        parts: list[str] = []
        async with self._session.post(self._cluster[entry].url + path, json=body, headers=headers) as reply:
            if reply.status != 200:
                raise StepFailed(f"{entry} answered {reply.status}: {(await reply.text())[:300]}")
            async for text in stream_text(reply):
                first = first or time.monotonic() - sent
                parts.append(text)
                on_text(text)
            head = reply.headers
        if first is None:
            raise StepFailed(f"{entry}: the stream ended without a token")
        return Answer(
            "".join(parts), first, time.monotonic() - sent, head.get("x-grapevine-target", "?"),
            head.get("x-grapevine-reason", "?"), int(head.get("x-grapevine-pulled-blocks", "0")),
        )  # fmt: skip


def question(text: str) -> dict[str, object]:
    """A completion request about the document."""
    return {"prompt": f"{document()}\nQuestion: {text}\nAnswer:", "max_tokens": 16}


def document() -> str:
    """A harbour's log book: long, the same every time, and unlike anything else that the tour sends."""
    ships = ("Marigold", "Northwind", "Halcyon", "Petrel", "Old Anne", "Kestrel", "Saffron", "Tern")
    cargo = ("salt", "timber", "oranges", "slate", "wool", "copper", "letters", "lamp oil", "tea")
    return "Log book of the harbour.\n" + "\n".join(
        f"Entry {number}: the {ships[number * 5 % len(ships)]} tied up at berth {number * 7 % 31 + 1} "
        f"with {number * 13 % 90 + 4} tons of {cargo[number * 4 % len(cargo)]}."
        for number in range(1, DOCUMENT_LINES + 1)
    )


async def stream_text(reply: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """The pieces of text in an OpenAI event stream."""
    async for raw in reply.content:
        line = raw.decode().strip()
        if not line.startswith("data:") or line == "data: [DONE]":
            continue
        event = json.loads(line[5:])
        if "error" in event:
            raise StepFailed(f"the stream ended with an error: {event['error']}")
        for choice in event.get("choices", []):
            text = choice.get("text") or choice.get("delta", {}).get("content")
            if text:
                yield text


class StartUp:
    """Shows what each node is doing: a live table on a terminal, one line per change elsewhere."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._doing: dict[str, str] = dict.fromkeys(NAMES, "starting")
        self._live = Live(self._table(), console=console, refresh_per_second=4) if console.is_terminal else None

    def __enter__(self) -> "StartUp":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, name: str, doing: str) -> None:
        """A node reports what it is doing."""
        changed = self._doing[name] != doing
        self._doing[name] = doing
        if self._live is not None:
            self._live.update(self._table())
        elif changed:
            console.print(f"   {time.monotonic() - self._began:4.0f} s  {name:<6} {doing}", markup=False)

    def _table(self) -> Table:
        table = Table(title=f"Starting three engines ({time.monotonic() - self._began:.0f} s)", title_justify="left")
        table.add_column("node")
        table.add_column("doing", min_width=50)
        for name, doing in self._doing.items():
            table.add_row(name, doing)
        return table


def fetch_model() -> None:
    """Make sure the default model is in the cache, with its stages shown."""
    last = ""

    def show(stage: str, done: float | None = None) -> None:
        nonlocal last
        if stage != last:
            console.print(f"   {stage}", markup=False)
            last = stage

    path = ensure_default_model(show)
    console.print(f"   {MODEL} is in {path}", markup=False)


def make_cluster(workdir: Path) -> LocalCluster:
    """The three nodes of the tour."""
    return LocalCluster(
        workdir,
        NAMES,
        ports=free_ports(len(NAMES), FIRST_PORT),
        args=("--no-mdns", "--cluster", "quickstart", "--kv-pool-gib", "1"),
        engine_args=ENGINE_ARGS,
    )


def print_farewell(cluster: LocalCluster) -> None:
    """Where the cluster is and one line to try."""
    console.print("\n[bold]The cluster stays up until you press Ctrl-C.[/bold]")
    for node in cluster.nodes.values():
        console.print(
            f"   {node.name:<6} {node.url}   state: {node.url}/gossip/state   page: {node.url}/", markup=False
        )
    command = Path(GRAPEVINE)
    with contextlib.suppress(ValueError):
        command = command.relative_to(Path.cwd())
    url = next(iter(cluster.nodes.values())).url
    console.print(f"\n   {command} state --node {url}", markup=False, soft_wrap=True)
    console.print(f'   {command} explain "a prompt" --node {url}', markup=False, soft_wrap=True)
    payload = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 40})
    console.print(
        f"   curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{payload}'\n",
        markup=False, soft_wrap=True,
    )  # fmt: skip


async def show(once: bool, toured: asyncio.Event, stop: asyncio.Event) -> int:
    """Start, tour, stay, stop."""
    console.print("[bold]The model[/bold]")
    await asyncio.to_thread(fetch_model)
    with tempfile.TemporaryDirectory(prefix="grapevine-") as directory:
        cluster = make_cluster(Path(directory))
        try:
            return await _run_cluster(cluster, once, toured, stop)
        except ClusterFailed as error:
            console.print(f"[bold red]{error}[/bold red]")
            return 2
        finally:
            console.print("Stopping the nodes.")
            await cluster.stop_all()


async def _run_cluster(cluster: LocalCluster, once: bool, toured: asyncio.Event, stop: asyncio.Event) -> int:
    timeout = aiohttp.ClientTimeout(total=ANSWER_LIMIT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        await cluster.start_all()
        with StartUp() as startup:
            await cluster.wait_ready(session, startup.update)
        failures = await Tour(cluster, session).run()
        for failure in failures:
            console.print(f"[bold red]{failure}[/bold red]")
        toured.set()
        if not once:
            print_farewell(cluster)
            await stop.wait()
        return 1 if failures else 0


async def main_async(once: bool) -> int:
    """Run `show` until it ends or a signal asks to stop.

    After the tour a signal only ends the waiting; before, it cuts the start or the tour short (exit 130). Either way
    `show` stops every node that it started.
    """
    stop = asyncio.Event()
    toured = asyncio.Event()
    task = asyncio.create_task(show(once, toured, stop))

    def on_signal() -> None:
        if not toured.is_set():
            task.cancel()
        stop.set()

    loop = asyncio.get_running_loop()
    for sig in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(sig, on_signal)
    with contextlib.suppress(asyncio.CancelledError):
        return await task
    return 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `scripts/quickstart`."""
    parser = argparse.ArgumentParser(prog="scripts/quickstart", description=__doc__)
    parser.add_argument("--once", action="store_true", help="stop after the tour; exit 1 if a step did not happen")
    return asyncio.run(main_async(parser.parse_args(arguments).once))


if __name__ == "__main__":
    sys.exit(main())
