"""The tutorial *Writing an operator* shows code that runs, and the example reports what it lacks."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from textwrap import indent

from aiohttp import web
from aiohttp.test_utils import TestServer

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "operator"
PAGE = (REPOSITORY / "docs" / "pages" / "writing-an-operator.md").read_text()
SHOWN = re.findall(r'^```\w+ title="(.+?)"\n(.*?)^```', PAGE, re.DOTALL | re.MULTILINE)


def text_of(name: str) -> str:
    """Return the text of the file that a snippet names: of the example, or of its tests."""
    folder = REPOSITORY / "tests" / "simulation" / "jobs" if name.startswith("test_") else EXAMPLE
    return (folder / name).read_text()


def test_snippets_are_parts_of_the_example() -> None:
    """Each is in its file as shown, except for the indentation."""
    assert len(SHOWN) >= 8
    for name, snippet in SHOWN:
        shifted = (indent(snippet, " " * width) for width in range(0, 24, 2))
        assert any(text in text_of(name) for text in shifted), f"{name} does not have:\n{snippet}"


def test_every_block_of_code_names_its_file() -> None:
    """Otherwise a block would escape the check; shell input is no code."""
    languages = re.findall(r"^```(\w+)$", PAGE, re.MULTILINE)
    assert set(languages) <= {"console"}


async def test_a_missing_definition_is_said_at_the_start(tmp_path: Path) -> None:
    """One line with what to do, and exit code 1."""

    async def not_found(request: web.Request) -> web.Response:
        return web.json_response({"kind": "Status", "code": 404, "reason": "NotFound"}, status=404)

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", not_found)
    async with TestServer(application) as server:
        kubeconfig = tmp_path / "kubeconfig"
        kubeconfig.write_text(
            f"clusters: [{{name: c, cluster: {{server: '{server.make_url('')}'}}}}]\n"
            "contexts: [{name: c, context: {cluster: c, user: ''}}]\ncurrent-context: c\nusers: []\n"
        )
        arguments = (str(EXAMPLE / "train_operator.py"), "--kubeconfig", str(kubeconfig))
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, cwd=REPOSITORY, env={"PYTHONPATH": "."}, stderr=asyncio.subprocess.PIPE
        )
        _, said = await process.communicate()
    assert process.returncode == 1
    assert said.decode().splitlines()[-1] == "the API server does not know TrainJobs: kubectl apply -f crd.yaml"
