"""The options common to all commands of a kind take effect: the store, the cluster, the output format."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from store.kube.api.objects import Object
from store.schema.keys import Keys
from store.schema.records import NodeSpec, encode
from tests.support.kube.faults.odd_server import serving
from tests.support.programs.cli import Ran, command_line, run

WITHOUT_A_STORE = [
    "rc list",
    "rc get web",
    "rc status web",
    "rc explain web",
    "rc history web",
    "rc owner web",
    "rc scale web 2",
    "rc enable web",
    "rc disable web",
    "rc delete web --yes",
    "rc apply --dry-run -f FILE",
    "node list",
    "node get node-1",
    "node label node-1 pool=web",
    "node cordon node-1",
    "node uncordon node-1",
    "node policy node-1",
    "brake status",
    "brake release",
    "audit export",
    "status",
    "doctor",
]


@pytest.mark.parametrize("line", WITHOUT_A_STORE)
def test_a_command_creates_no_store(tmp_path: Path, line: str) -> None:
    """A wrong path in `embedded:DIR` is one line that names the path, and nothing is created there."""
    (tmp_path / "rc.yaml").write_text('id: web\nmanifest: {id: web, launchables: {web: {command: ["true"]}}}\n')
    (tmp_path / "empty").mkdir()
    arguments = line.replace("FILE", str(tmp_path / "rc.yaml")).split()
    for directory in (tmp_path / "none", tmp_path / "empty"):
        ran = run(*arguments, "--store", f"embedded:{directory}")
        assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1)
        assert ran.err.startswith(f"error: there is no store in {directory}; check the path")
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["empty", "rc.yaml"]


def test_an_rc_may_be_the_first_record_of_a_store(tmp_path: Path) -> None:
    """`rcfarm rc apply` and `create` may come before the first farm."""
    (tmp_path / "web.json").write_text('{"id": "web", "launchables": {"web": {"command": ["true"]}}}')
    store = ("--store", f"embedded:{tmp_path}/new/store")
    created = run("rc", "create", "--manifest", str(tmp_path / "web.json"), "--id", "web", "--detach", *store)
    assert created.code == 0
    assert [each["id"] for each in run("rc", "list", "-o", "json", *store).json] == ["web"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("rc apply -f none.yaml", "--file none.yaml: can't be read"),
        ("rc apply -f bad.yaml --yes", "bad.yaml:1: replicas"),
        ("rc apply -f part.yaml --yes", "replicas: missing"),
        ("rc apply -f good.yaml", "not confirmed"),
        ("rc create -m none.json", "--manifest none.json: can't be read"),
        ("rc create -m manifest.json --node-selector !", "node_selector: selector '!'"),
        ("rc create -m manifest.json --replicas -1", "replicas: -1 is negative"),
    ],
)
def test_refused_input_creates_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, message: str
) -> None:
    """The commands that may create a store read and check everything first, and ask."""
    monkeypatch.chdir(tmp_path)
    manifest = '{"id": "web", "launchables": {"web": {"command": ["true"]}}}'
    for name, text in (
        ("manifest.json", manifest),
        ("good.yaml", f"id: web\nreplicas: 1\nmanifest: {manifest}\n"),
        ("bad.yaml", f"replicas: -1\nmanifest: {manifest}\n"),
        ("part.yaml", f"manifest: {manifest}\n"),
    ):
        Path(name).write_text(text)
    before = sorted(tmp_path.rglob("*"))
    ran = run(*line.split(), "--store", "embedded:new/store")
    assert ran.code == 1
    assert message in ran.err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture
async def clusters(tmp_path: Path) -> AsyncIterator[Path]:
    """Return a kubeconfig of two clusters without Frameworks, the first of them current. The file `asked` beside it
    gets a line for each requested path."""

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
    """--context, --kubeconfig and --namespace override the current context, KUBECONFIG and the context's namespace."""
    where, env = (["--kubeconfig", str(clusters)], "/nonexistent") if named_by == "option" else ([], str(clusters))
    ran = await asyncio.to_thread(run, "framework", "list", *where, *options, env={"KUBECONFIG": env})
    assert ran.code == 0, ran.err
    (path,) = clusters.with_name("asked").read_text().splitlines()
    assert path.startswith(f"/{cluster}/apis/")
    assert f"/namespaces/{namespace}/" in path


async def test_the_form(clusters: Path) -> None:
    """--output selects a table or JSON."""

    async def listed(*options: str) -> Ran:
        return await asyncio.to_thread(run, "framework", "list", *options, env={"KUBECONFIG": str(clusters)})

    assert (await listed("--output", "json")).json == []
    assert not (await listed()).out.startswith("[")


async def test_the_root_of_all_keys() -> None:
    """The root defaults to `rcfarm`; the option and the environment override it."""
    async with command_line() as cli:
        await cli.store.put(Keys("rcfarm").node_spec("node-1"), encode(NodeSpec(name="node-1")))
        listed = await asyncio.to_thread(run, "node", "list", "-o", "json", env={"RCFARM_STORE": cli.url})
    assert [node["name"] for node in listed.json] == ["node-1"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("three",), "Invalid value for 'REPLICAS': 'three' is not a whole number"),
        (("--replica", "2"), "'--replica' is neither an option nor the id of an RC"),
    ],
)
def test_a_wrong_number_of_replicas_is_quoted(arguments: tuple[str, ...], problem: str) -> None:
    """Negative numbers look like options, so a misspelled option ends up as an argument."""
    ran = run("rc", "scale", "web", *arguments)
    assert ran.code != 0
    assert problem in ran.err
