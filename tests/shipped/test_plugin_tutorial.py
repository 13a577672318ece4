"""The page *Writing a plugin* shows code that runs, and the YAML of examples and pages can be applied."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import indent

import msgspec
import pytest

from controllers.tasks.plugins.http_api import HttpTask
from rcfarm.operations import task_file
from store.embedded.store import EmbeddedStore
from store.schema.keys import Keys
from tests.support.tasks.engines import World, engine_on, running
from tests.support.tasks.job_servers import EXAMPLES, Site, example, lost_answer

DOCS = Path(__file__).parents[2] / "docs" / "pages"
PAGE = (DOCS / "writing-a-plugin.md").read_text()
SHOWN = re.findall(r'^```\w+ title="(.+?)"\n(.*?)^```', PAGE, re.DOTALL | re.MULTILINE)


def test_snippets_are_parts_of_the_example() -> None:
    """Each is in its file as shown, except for the indentation."""
    assert len(SHOWN) >= 7
    for name, snippet in SHOWN:
        shifted = (indent(snippet, " " * width) for width in range(0, 12, 4))
        assert any(text in (EXAMPLES / name).read_text() for text in shifted), f"{name} does not have:\n{snippet}"


async def test_the_plugin_runs_in_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job whose first answer is lost, one that fails, and an abort: exactly one job each."""
    site = Site()
    await site.start()
    monkeypatch.setenv("SQUARES_URL", site.url)
    store, keys = EmbeddedStore(None), Keys(shards=2)
    world = World(store, keys)
    site.faults = [lost_answer]
    async with running(engine_on(store, keys, example("squares_plugin").ENTRY, virtual=False)):
        await world.submit("one", "square", inputs={"number": 12}, outputs={"square": "integer"})
        assert (await world.until_done("one")).phase == "PhaseSuccess"
        await world.submit("two", "square", inputs={"number": -1})
        state = await world.until_done("two")
        assert state.error is not None
        assert (state.error.code, state.error.message) == ("JobFailed", "-1 is negative")
        await world.submit("three", "square", inputs={"number": "x"})
        state = await world.until_done("three")
        assert state.error is not None
        assert (state.error.code, state.error.message) == ("RemoteRefused", "number must be an integer")
    assert sorted(job.number for job in site.server.jobs.values()) == [-1, 12]
    await site.stop()
    await store.close()


YAML = re.compile(r"^```yaml\n(.*?)^```", re.DOTALL | re.MULTILINE)
FILES = {
    f"{page}, {number}": block
    for page in ("tasks.md", "tasks-plugins.md", "tasks-schedules.md")
    for number, block in enumerate(YAML.findall((DOCS / page).read_text()))
} | {path.name: path.read_text() for path in EXAMPLES.glob("*.yaml")}


@pytest.mark.parametrize("name", FILES)
def test_files_of_docs_and_examples_can_be_applied(name: str) -> None:
    contents = task_file.load(name, FILES[name].encode())
    assert contents.tasks or contents.quotas or contents.schedules
    for document in contents.tasks:
        if document.spec.type == "http":
            assert msgspec.convert(document.spec.config, HttpTask).remote == "squares"
