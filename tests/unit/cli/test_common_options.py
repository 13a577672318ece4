"""The options that all commands of a kind have count: which store, which cluster, in which form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from store.keys import Keys
from store.kube.objects import Object
from store.records import NodeSpec, encode
from tests.support.cli import Ran, command_line, run
from tests.support.odd_server import serving


@pytest.fixture
async def clusters(tmp_path: Path) -> AsyncIterator[Path]:
    """A kubeconfig of two clusters without Frameworks, of which the first is the current one; its `asked` beside it
    has a line for each path that was asked for."""

    async def answer(request: web.Request) -> web.Response:
        with (tmp_path / "asked").open("a") as asked:
            asked.write(f"{request.path}\n")
        return web.json_response({"kind": "FrameworkList", "apiVersion": "v1", "metadata": {}, "items": []})

    names = ("first", "second")
    async with serving(answer) as url:
        config: Object = {
            "current-context": "first",
            "clusters": [{"name": name, "cluster": {"server": f"{url}/{name}"}} for name in names],
            "users": [{"name": "nobody", "user": {}}],
            "contexts": [
                {"name": name, "context": {"cluster": name, "user": "nobody", "namespace": f"of-{name}"}}
                for name in names
            ],
        }
        (tmp_path / "config").write_text(json.dumps(config))
        yield tmp_path / "config"


@pytest.mark.parametrize(
    ("options", "cluster", "namespace"),
    [
        ([], "first", "of-first"),
        (["--context", "second"], "second", "of-second"),
        (["--context", "second", "--namespace", "own"], "second", "own"),
    ],
)
@pytest.mark.parametrize("named_by", ["option", "environment"])
async def test_the_cluster_and_the_namespace(
    clusters: Path, options: list[str], cluster: str, namespace: str, named_by: str
) -> None:
    """Those of the context that is named, else of the current one, of the kubeconfig that is named, else of
    KUBECONFIG's; a namespace that is named counts before the context's."""
    where, env = (["--kubeconfig", str(clusters)], "/nonexistent") if named_by == "option" else ([], str(clusters))
    ran = await asyncio.to_thread(run, "framework", "list", *where, *options, env={"KUBECONFIG": env})
    assert ran.code == 0, ran.err
    (path,) = clusters.with_name("asked").read_text().splitlines()
    assert path.startswith(f"/{cluster}/apis/")
    assert f"/namespaces/{namespace}/" in path


async def test_the_form(clusters: Path) -> None:
    """A table, or JSON for programs."""

    async def listed(*options: str) -> Ran:
        return await asyncio.to_thread(run, "framework", "list", *options, env={"KUBECONFIG": str(clusters)})

    assert (await listed("--output", "json")).json == []
    assert not (await listed()).out.startswith("[")


async def test_the_root_of_all_keys() -> None:
    """It is `rcfarm`, if neither the option nor the environment says otherwise."""
    async with command_line() as cli:
        await cli.store.put(Keys("rcfarm").node_spec("node-1"), encode(NodeSpec(name="node-1")))
        listed = await asyncio.to_thread(run, "node", "list", "-o", "json", env={"RCFARM_STORE": cli.url})
    assert [node["name"] for node in listed.json] == ["node-1"]
