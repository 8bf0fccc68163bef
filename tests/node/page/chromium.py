"""A real headless Chromium, driven by its DevTools protocol over a WebSocket. Nothing but aiohttp and the browser."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.waiting import PATIENCE_S

BINARY = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
MISSING = "no Chromium here: apt install chromium"
START_S = 60.0
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--no-proxy-server",
    "--disable-extensions", "--disable-sync", "--disable-component-update", "--disable-background-networking",
    "--disable-default-apps", "--hide-scrollbars", "--mute-audio", "--remote-debugging-port=0",
)  # fmt: skip


class Tab:
    """One page. What it said and asked for is kept: `errors`, `requests`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read())
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._trace: list[dict[str, Any]] = []
        self._traced = asyncio.Event()

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = len(self._answers) + 1
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(PATIENCE_S):
            return await answer

    async def open(self, url: str, *, width: int = 1360, height: int = 900, dark: bool = False) -> None:
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")
        await self.size(width, height)
        await self.colours(dark)
        await self.call("Page.navigate", url=url)

    async def size(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def colours(self, dark: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def js(self, expression: str) -> Any:
        """The value of an expression, or of the promise that it is."""
        told = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in told:
            raise AssertionError(json.dumps(told["exceptionDetails"])[:2000])
        return told["result"].get("value")

    async def until(self, condition: str, *, seconds: float = PATIENCE_S) -> float:
        """Wait, in the page, until an expression is true; returns the seconds that it took."""
        text = json.dumps(condition)
        watch = f"""new Promise((done, failed) => {{
            const began = performance.now();
            const look = () => {{
                if ({condition}) return done((performance.now() - began) / 1000);
                if (performance.now() - began > {seconds * 1000}) return failed(new Error("never true: " + {text}));
                setTimeout(look, 20);
            }};
            look();
        }})"""
        return float(await self.js(watch))

    async def press(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **text
            )

    async def picture(self, path: Path, *, whole: bool = False) -> None:
        told = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(told["data"]))

    @asynccontextmanager
    async def longest_task(self) -> AsyncIterator[list[float]]:
        """Fills the list with the longest tasks of the page's main thread meanwhile, in milliseconds of CPU time.

        CPU time, because on a busy machine a task of 20 ms may be on its way for 200.
        """
        found: list[float] = []
        self._trace, self._traced = [], asyncio.Event()
        await self.call("Tracing.start", traceConfig={"includedCategories": ["toplevel"]})
        try:
            yield found
        finally:
            await self.call("Tracing.end")
            async with asyncio.timeout(PATIENCE_S):
                await self._traced.wait()
            mains = {
                (event["pid"], event["tid"])
                for event in self._trace
                if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain"
            }
            tasks = [event for event in self._trace if "RunTask" in event["name"] and "tdur" in event]
            found += sorted((e["tdur"] / 1000 for e in tasks if (e["pid"], e["tid"]) in mains), reverse=True)[:20]

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._socket.close()

    async def _read(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                answer = self._answers[told["id"]]
                if "error" in told:
                    answer.set_exception(AssertionError(told["error"]["message"]))
                else:
                    answer.set_result(told["result"])
            else:
                self._note(told["method"], told["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Tracing.dataCollected":
                self._trace += params["value"]
            case "Tracing.tracingComplete":
                self._traced.set()
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"])[:1000])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(json.dumps(params["args"])[:1000])
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


class Chromium:
    """A running browser."""

    def __init__(self, session: aiohttp.ClientSession, port: int) -> None:
        self._session = session
        self._port = port

    @asynccontextmanager
    async def tab(self) -> AsyncIterator[Tab]:
        base = f"http://127.0.0.1:{self._port}/json"
        async with self._session.put(f"{base}/new?about:blank") as answer:
            target = await answer.json()
        socket = await self._session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=64 << 20)
        tab = Tab(socket)
        try:
            yield tab
        finally:
            await tab.close()
            async with self._session.get(f"{base}/close/{target['id']}"):
                pass


@asynccontextmanager
async def chromium() -> AsyncIterator[Chromium]:
    """A browser with a profile of its own, ended with everything that it started."""
    assert BINARY is not None, MISSING
    profile = Path(tempfile.mkdtemp(prefix="gvchrome"))
    process = await asyncio.create_subprocess_exec(
        BINARY, *_FLAGS, f"--user-data-dir={profile}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with aiohttp.ClientSession() as session:
            yield Chromium(session, await _port(profile / "DevToolsActivePort", process))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        shutil.rmtree(profile, ignore_errors=True)


async def _port(file: Path, process: asyncio.subprocess.Process) -> int:
    """The port that the browser chose; it writes a file, and nothing else tells."""
    async with asyncio.timeout(START_S):
        while process.returncode is None:
            with contextlib.suppress(OSError, ValueError, IndexError):
                return int(file.read_text().splitlines()[0])  # noqa: ASYNC240 - a few bytes
            await asyncio.sleep(0.05)
    raise AssertionError(f"Chromium ended with status {process.returncode}")
