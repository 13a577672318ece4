"""The examples in `examples/` and the manifest reference run as shown."""

from __future__ import annotations

import re
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from rcfarm.operations.rc_apply import RCDocument, load
from store.embedded.store import EmbeddedStore
from store.schema.manifest import digest, parse
from tests.support import require
from tests.support.agent.agents import AgentHarness, harness

REPOSITORY = Path(__file__).parents[3]
EXAMPLES = REPOSITORY / "examples"


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[AgentHarness]:
    store = EmbeddedStore()
    async with harness(store, tmp_path / "node-1") as node:
        node.start()
        yield node
    await store.close()


@pytest.mark.parametrize("name", ["hello.yaml", "worker.yaml"])
async def test_an_example_becomes_healthy(node: AgentHarness, name: str) -> None:
    """The RC files in `examples/` are accepted, and their pods run and pass their checks."""
    (document,) = load(name, (EXAMPLES / name).read_bytes())
    await run(node, document)
    await node.until_health("passing")
    await node.unintend(document.pod_id)
    await node.until_gone(document.pod_id)
    assert node.processes() == []


async def test_the_packed_example_answers_from_its_artifact(node: AgentHarness, tmp_path: Path) -> None:
    """`examples/hello/package` makes an artifact and an RC that runs it, with its configuration."""
    archive = tmp_path / "hello.tar.gz"
    printed = subprocess.run([EXAMPLES / "hello" / "package", archive], stdout=subprocess.PIPE, check=True).stdout
    (document,) = load("package", printed)
    await run(node, document)
    await node.until_health("passing")
    reality = require(await node.reality(document.pod_id))
    url = f"http://{reality.address}:{reality.ports['http']}/"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        assert await response.text() == "hello from hello-packed on node-1\n"


def test_the_manifest_in_the_reference_is_valid() -> None:
    """The example of the manifest reference is accepted as it stands."""
    page = (REPOSITORY / "docs" / "pages" / "manifest.md").read_text()
    example = require(re.search(r"```yaml\n(.*?)```", page, re.DOTALL))
    assert parse(example.group(1).encode()).id == "shop"


async def run(node: AgentHarness, document: RCDocument) -> None:
    """Have the agent run the pod of an RC, as a farm would."""
    sha256 = digest(document.raw_manifest)
    await node.store.put(node.keys.manifest(sha256), document.raw_manifest)
    await node.intend_digest(document.pod_id, sha256)
