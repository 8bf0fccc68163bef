"""One real cluster for all end-to-end tests: three nodes, three vLLM engines, the real SmolLM2-135M.

The engines run in float32: where a test compares text, two ways to the same answer must not differ by rounding
(in bfloat16 a prefill and a decode of the same token round differently). `scripts/quickstart` covers bfloat16.
It ends with the last of these tests: the others need its memory and its two cores.
"""

import tempfile
from collections.abc import AsyncIterator, Generator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from localcluster import ENGINE_START_LIMIT_S, LocalCluster

from tests.e2e.client import ADMIN_TOKEN, NAMES, Client

ENGINE_ARGS = ("--dtype", "float32", "--max-model-len", "4096", "--enforce-eager")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.fspath).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(ENGINE_START_LIMIT_S + 300))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With a failure, what the nodes said last."""
    report = yield
    client = getattr(item, "funcargs", {}).get("client") or getattr(item, "funcargs", {}).get("pair")
    if report.failed and isinstance(client, Client):
        report.sections += [(f"log of {node.name}", node.tail(12)) for node in client.cluster.nodes.values()]
    return report


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=180)) as opened:
        yield opened


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def cluster(
    session: aiohttp.ClientSession, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LocalCluster]:
    # A run directory of its own: a cluster of the same names may run on this host. Sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="gv-") as run_dir:
        started = LocalCluster(
            tmp_path_factory.mktemp("cluster"),
            NAMES,
            args=("--no-mdns", "--cluster", "e2e", "--kv-pool-gib", "1.5", "--run-dir", run_dir),
            engine_args=ENGINE_ARGS,
            # The development endpoints of vLLM let a test empty the engine's own prefix cache: the pool answers then.
            env={"VLLM_SERVER_DEV_MODE": "1", "GRAPEVINE_ADMIN_TOKEN": ADMIN_TOKEN},
        )
        try:
            await started.start_all()
            await started.wait_ready(session)
            yield started
        finally:
            await started.stop_all()


@pytest.fixture(scope="package")
def client(cluster: LocalCluster, session: aiohttp.ClientSession) -> Client:
    return Client(cluster, session)
