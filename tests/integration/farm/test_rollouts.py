"""Rollouts on a real Consul: farms, agents with real processes, and the commands that operators use."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rcfarm.operations.rcs import ReplicationControllers
from store.schema.records import Rollout, decode
from tests.support.agent.agents import started_under
from tests.support.consul.server import ConsulServer, free_ports
from tests.support.programs.cli import Ran
from tests.support.programs.daemon import get
from tests.support.programs.installation import Daemon, Installation, installation

NODES = [f"node-{number}" for number in range(1, 5)]
FAST: dict[str, Any] = {"claim_grace": 3, "handover_interval": 0.02}


@pytest.fixture
async def site(consul_server: ConsulServer, tmp_path: Path) -> AsyncIterator[Installation]:
    """A farm and four agents."""
    async with installation(consul_server, tmp_path / "site") as site:
        site.farm("farm-a", **FAST)
        await site.start_agents(*NODES)
        yield site


async def apply(
    site: Installation, version: str, *command: str, replicas: int = 4, pod: Any = None, **update: Any
) -> Ran:
    """Apply `web` with a program, by default one that runs on; `version` makes its manifest another one. `pod`: further
    fields of the manifest."""
    launchable = {"command": list(command) or ["sleep", "1000"], "env": {"VERSION": version}, "stop_timeout": 1}
    manifest = {"id": "web", "launchables": {"main": launchable}, **(pod or {})}
    path = site.directory / "web.json"
    fields = {"replicas": replicas, "update": {"min_healthy_time": 0.5, **update}, "manifest": manifest}
    path.write_text(json.dumps({"id": "web", **fields}))
    return await site.cli("rc", "apply", "-f", str(path), "--yes", "--wait-healthy", "0.2")


async def rollout(site: Installation) -> Rollout | None:
    entry = await site.store.get(site.keys.rollout("web"), consistent=True)
    return decode(Rollout, entry.key, entry.value) if entry else None


async def until_state(site: Installation, *states: str) -> Rollout:
    async def reached() -> Rollout | None:
        found = await rollout(site)
        return found if found and found.state in states else None

    found: Rollout = await site.until(reached, f"the rollout is {' or '.join(states)}")
    return found


def pids(site: Installation) -> dict[str, list[int]]:
    return {node: sorted(started_under(site.state_dir(node))) for node in NODES}


async def test_from_a_first_version_over_a_bad_one_to_the_next(site: Installation) -> None:
    """`apply` follows to the end: a bad version stops at its canary and is taken back, which `apply`, `status`,
    `explain` and `doctor` say with its cause; the others' processes are never touched. Then forward, and back again."""
    assert (await apply(site, "1")).code == 0
    before = pids(site)
    failed = await apply(site, "2", "sh", "-c", "sleep 0.3; exit 7")
    assert failed.code == 2
    cause = "node-1: main exited with code 7"
    assert cause in failed.out
    assert "the pods run revision 1 again" in failed.out
    after = pids(site)
    assert {node for node in NODES if before[node] != after[node]} == {"node-1"}
    for command in (["rc", "status", "web"], ["rc", "explain", "web"], ["rollout", "status", "web"], ["doctor"]):
        assert cause in (await site.cli(*command)).out, command
    assert "reverted" in (await site.cli("rc", "list")).out
    scaled = await site.cli("rc", "scale", "web", "3", "--wait-healthy", "0.2")
    assert scaled.code == 0, "a change that is none of the manifest is complete"
    assert (await site.cli("rc", "scale", "web", "4", "--wait-healthy", "0.2")).code == 0
    again = await apply(site, "2", "sh", "-c", "sleep 0.3; exit 7")
    assert (again.code, "the pods run revision 1 again" in again.out) == (2, True)
    assert (await apply(site, "3")).code == 0
    assert (await rollout(site)) is not None
    history = (await site.cli("rollout", "history", "web", "-o", "json")).json
    assert [(each["number"], each["state"]) for each in history] == [
        (1, "stable"),
        (2, "superseded"),
        (3, "current, done"),
    ]
    undone = await site.cli("rollout", "undo", "web", "--wait-healthy", "0.2")
    assert undone.code == 0, undone.out
    before = pids(site)
    assert (await site.cli("rollout", "restart", "web", "--wait-healthy", "0.2")).code == 0
    assert all(before[node] != pids(site)[node] for node in NODES)
    events = (await site.cli("rc", "history", "web", "-o", "json")).json
    states = [each["event_details"]["state"] for each in events if each["event_type"].endswith("_ROLLOUT")]
    assert states[:3] == ["canary", "reverting", "reverted"]


LIVES_A_SECOND = {
    "without-a-check": (("sh", "-c", "sleep 1; exit 7"), {}),
    "with-a-check": (
        ("sh", "-c", "timeout 1 python3 -m http.server $RCFARM_PORT_HTTP --bind $RCFARM_ADDRESS; exit 7"),
        {"ports": {"http": 0}, "health": {"http": {}, "interval": 0.3, "timeout": 1}},
    ),
}


@pytest.mark.parametrize("kind", LIVES_A_SECOND)
async def test_a_version_that_lives_a_second(consul_server: ConsulServer, tmp_path: Path, kind: str) -> None:
    """With and without a health check: the rollout stops at the canary and is taken back, the other pods are not
    touched, `apply` ends with 2, and every view has the same code and the same cause."""
    command, fields = LIVES_A_SECOND[kind]
    [port] = free_ports(1)
    async with installation(consul_server, tmp_path / "site") as site:
        site.farm("farm-a", listen=f"127.0.0.1:{port}", **FAST)
        await site.start_agents(*NODES)
        assert (await apply(site, "1")).code == 0
        before = pids(site)
        failed = await apply(site, "2", *command, pod=fields, min_healthy_time=3)
        assert failed.code == 2, failed.out
        cause = "node-1: main exited with code 7"
        assert cause in failed.out
        after = pids(site)
        assert {node for node in NODES if before[node] != after[node]} == {"node-1"}
        explained = (await site.cli("explain", "web", "-o", "json")).json
        [reason] = [each for each in explained["reasons"] if each["code"] == "rollout_reverted"]
        assert cause in reason["detail"]
        assert (reason["blocking"], bool(reason["since"]), bool(reason["act"])) == (True, True, True)
        for view in (["explain", "web"], ["rc", "status", "web"], ["status"], ["rollout", "status", "web"], ["doctor"]):
            shown = (await site.cli(*view)).out
            assert cause in shown, view
            assert "rollout_reverted" in shown, view
        series = 'rcfarm_rc_reasons{code="rollout_reverted"} 1.0'
        await site.until(lambda: series in get(port, "/metrics")[1], series)


async def test_what_operators_ask_for(site: Installation) -> None:
    """A canary that waits for promotion, is paused, resumed, promoted; one that is aborted; what is not possible is
    refused with the state that it is in."""
    assert (await apply(site, "1")).code == 0
    refused = await site.cli("rollout", "pause", "web")
    assert (refused.code, refused.err) == (
        1,
        "error: rc web: nothing to pause: it has no rollout; `rcfarm rollout status web` shows it\n",
    )
    waits = await apply(site, "2", auto_promote=False)
    assert waits.code == 2
    assert "`rcfarm rollout promote web` goes on" in waits.out
    assert (await site.cli("rollout", "pause", "web")).code == 0
    assert "paused" in (await site.cli("rc", "status", "web")).out
    assert (await site.cli("rollout", "resume", "web", "--detach")).code == 0
    await until_state(site, "awaiting_promotion")
    promoted = await site.cli("rollout", "promote", "web", "--wait-healthy", "0.2")
    assert promoted.code == 0, promoted.out
    await until_state(site, "done")
    await apply(site, "3", auto_promote=False)
    aborted = await site.cli("rollout", "abort", "web")
    assert (aborted.code, "aborted" in aborted.out) == (0, True)
    assert (await site.cli("rollout", "promote", "web")).code == 1


async def test_farms_that_are_killed_restart_nothing_twice(consul_server: ConsulServer, tmp_path: Path) -> None:
    """The owner dies by SIGKILL in the middle; the rollout goes on where it was, and each pod is replaced once."""
    async with installation(consul_server, tmp_path / "site") as site:
        farms = [site.farm(name, **FAST) for name in ("farm-a", "farm-b")]
        await site.start_agents(*NODES)
        assert (await apply(site, "1")).code == 0
        applying = asyncio.create_task(apply(site, "2", min_healthy_time=1.5))
        for state in ("canary", "rolling"):
            await until_state(site, state, "done")
            await kill_owner(site, farms)
        ended = await applying
        assert ended.code == 0, ended.out
        starts = [len(daemon.events("Process started")) for daemon in site.daemons if daemon.name in NODES]
        assert starts == [2, 2, 2, 2]


async def kill_owner(site: Installation, farms: list[Daemon]) -> None:
    owner = await site.cli("rc", "owner", "web", "-o", "json")
    [farm] = [daemon for daemon in farms if daemon.name == owner.json["farm"]]
    farm.kill()
    farm.start()


class Answers:
    """A server that is asked by analyses. `status`: of HTTP; `value`: Prometheus's number, None for an empty result."""

    def __init__(self) -> None:
        self.status, self.asked = 200, 0
        self.value: str | None = "0"

    async def answer(self, request: web.Request) -> web.Response:
        self.asked += 1
        if request.path != "/api/v1/query":
            return web.Response(status=self.status)
        result = [] if self.value is None else [{"metric": {}, "value": [0, self.value]}]
        return web.json_response({"status": "success", "data": {"resultType": "vector", "result": result}})


@pytest.fixture
async def answers() -> AsyncIterator[tuple[Answers, str]]:
    made, app = Answers(), web.Application()
    app.router.add_get("/{path:.*}", made.answer)
    server = TestServer(app)
    await server.start_server()
    yield made, f"http://127.0.0.1:{server.port}"
    await server.close()


async def test_a_rollout_with_a_failing_analysis_reverts(site: Installation, answers: tuple[Answers, str]) -> None:
    """The pods pass, but the server says no: `apply` ends with 2 and the measured value, and one pod was touched. With
    a server that says yes the next one is done."""
    says, url = answers
    analysis = [{"name": "answers", "http": {"url": f"{url}/healthz"}, "interval": 1}]
    assert (await apply(site, "1", analysis=analysis)).code == 0
    assert says.asked == 0, "what begins an RC is not analysed"
    before, says.status = pids(site), 503
    failed = await apply(site, "2", analysis=analysis)
    cause = "analysis answers: status 503, not 2xx; the pods run revision 1 again"
    assert (failed.code, cause in failed.out) == (2, True)
    assert {node for node in NODES if before[node] != pids(site)[node]} == {"node-1"}
    for command in (["rollout", "status", "web"], ["explain", "web"]):
        shown = (await site.cli(*command)).out
        assert "analysis answers: failure (503); wanted 2xx" in shown, command
        assert cause in shown
    says.status = 200
    assert (await apply(site, "3", analysis=analysis)).code == 0
    shown = (await site.cli("rollout", "status", "web")).out
    assert "analysis answers: success (200); wanted 2xx" in shown
    asked = says.asked
    assert (await site.cli("rc", "scale", "web", "3", "--wait-healthy", "0.2")).code == 0
    assert says.asked == asked, "nothing is asked once the rollout is done"


async def test_a_rollout_without_data_is_paused_and_resumed(site: Installation, answers: tuple[Answers, str]) -> None:
    """Every view names the analysis. An operator who resumes has it asked again; once data come, it goes on."""
    says, url = answers
    query = {"url": url, "query": "errors", "condition": "< 0.01"}
    analysis = [{"name": "errors", "prometheus": query, "interval": 1}]
    assert (await apply(site, "1", analysis=analysis)).code == 0
    says.value = None
    waits = await apply(site, "2", analysis=analysis)
    assert (waits.code, "analysis errors has no data (no series)" in waits.out) == (2, True)
    assert "paused" in (await site.cli("rc", "list")).out
    for command in (["rc", "status", "web"], ["explain", "web"], ["rollout", "status", "web"]):
        assert "analysis_no_data: analysis errors has no data" in (await site.cli(*command)).out, command
    resumed = await site.cli("rollout", "resume", "web")
    assert (resumed.code, "analysis errors has no data (no series)" in resumed.out) == (2, True), "and still has none"
    says.value = "NaN"
    assert "analysis errors: no data" in (await site.cli("rollout", "status", "web")).out
    says.value = "0.001"
    await until_state(site, "done")
    events = (await site.cli("rc", "history", "web", "-o", "json")).json
    states = [each["event_details"]["state"] for each in events if each["event_type"].endswith("_ROLLOUT")]
    assert states.count("paused") == 2


async def test_another_owner_goes_on_with_the_analyses(
    consul_server: ConsulServer, tmp_path: Path, answers: tuple[Answers, str]
) -> None:
    """The owner dies by SIGKILL while the rollout waits for an answer; the next one asks, and takes it back."""
    says, url = answers
    async with installation(consul_server, tmp_path / "site") as site:
        farms = [site.farm(name, **FAST) for name in ("farm-a", "farm-b")]
        await site.start_agents(*NODES)
        analysis = [{"name": "answers", "http": {"url": url}, "interval": 1, "failure_limit": 1}]
        assert (await apply(site, "1", analysis=analysis)).code == 0
        applying = asyncio.create_task(apply(site, "2", analysis=analysis, soak=120))
        await until_state(site, "soaking")
        says.status = 500

        async def has_failed_once() -> bool:
            found = await rollout(site)
            return found is not None and any(result.failures == 1 for result in found.analysis)

        await site.until(has_failed_once, "a failure is recorded")
        await kill_owner(site, farms)
        ended = await applying
        assert (ended.code, "status 500, not 2xx (2 failures, failure_limit is 1)" in ended.out) == (2, True), ended.out


async def test_what_would_happen_is_asked_without_a_trace(site: Installation) -> None:
    """Of settings, alone and with the loss of a node; the RC stays as it is, and the farm does what was shown."""
    assert (await apply(site, "1", replicas=2, canary=0)).code == 0
    rcs = ReplicationControllers(site.store, site.keys)
    before, old = pids(site), await rcs.snapshot("web")
    more = await site.cli("what-if", "--rc", "web", "--set", "replicas=3")
    assert (more.code, "1 pod added; 3 of 3 placed" in more.out) == (2, True)
    short = await site.cli("what-if", "--set", "replicas=4", "--lose", NODES[3])
    assert (short.code, "1 of 4 replicas has no node" in short.out) == (3, True)
    wrong = await site.cli("what-if", "--set", "replicas=-3")
    assert (wrong.code, wrong.out) == (1, "")
    now = await rcs.snapshot("web")
    assert (pids(site), now.spec, now.pods) == (before, old.spec, old.pods)
    assert (await site.cli("rc", "scale", "web", "3")).code == 0
    assert len((await rcs.snapshot("web")).pods) == 3
