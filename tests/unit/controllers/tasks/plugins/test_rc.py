"""`rc` tasks against a store in memory; the test writes what a farm would report."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from controllers.tasks.api.errors import BadConfig, TaskError
from controllers.tasks.api.phase import Phase
from controllers.tasks.plugins.fence import ExecutionLost
from controllers.tasks.plugins.rc import DeployConfig, DeployPlugin, DeployState, verdict
from rcfarm.operations.rc_deploy import RCDeployer
from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.schema.keys import Keys
from store.schema.records import RCSpec, RCStatus, Reason, encode
from tests.support import require
from tests.support.farm.fleet import Fleet
from tests.support.tasks.attempts import Execution
from tests.support.waiting import loop_time, until

pytestmark = pytest.mark.looptime

KEYS = Keys()
ENTRY = {
    "id": "web",
    "replicas": 2,
    "manifest": {"id": "web", "launchables": {"main": {"command": ["serve", "{{ .Inputs.version }}"]}}},
}


class Stage:
    """The plugin over a store, and the farm's side of it."""

    def __init__(self) -> None:
        self.store = EmbeddedStore()
        self.fleet = Fleet(self.store, KEYS)
        self.plugin = DeployPlugin(self.store, KEYS, RCDeployer(self.store, KEYS), clock=loop_time)

    def execution(self, name: str = "deploy", entry: dict[str, Any] | None = None, **config: Any) -> Execution:
        config = {"rc": ENTRY if entry is None else entry, **config}
        return Execution(self.plugin, self.store, KEYS, name, config, inputs={"version": "1.4"})

    async def report(self, state: str, *codes: str, generation: int = 0, **fields: Any) -> None:
        spec = await self.fleet.rcs.get("web")
        status = RCStatus(
            state=state,  # type: ignore[arg-type]
            generation=generation or spec.generation,
            desired=2,
            placed=2,
            healthy=1,
            farm="farm-1",
            token=1,
            reasons=tuple(Reason(code, f"it is {code}") for code in codes),
            **fields,
        )
        await self.store.put(KEYS.status("web"), encode(status))


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage()
    task = asyncio.create_task(stage.plugin.run())
    await asyncio.sleep(0)
    yield stage
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await stage.store.close()


async def test_a_deploy_ends_when_the_farm_reports_its_generation_converged(stage: Stage) -> None:
    """The entry is written once, with an event that names the task; a report of an older generation says nothing; each
    change of the RC wakes the execution."""
    await stage.fleet.create("web", 1)
    await stage.report("converged")
    job = stage.execution()

    assert (await job.round()).info.phase is Phase.RUNNING
    spec = await stage.fleet.rcs.get("web")
    assert (spec.replicas_desired, spec.generation) == (2, 2)
    assert b"1.4" in await stage.fleet.rcs.manifest(spec.manifest)
    [event] = await stage.fleet.audit("web", "REPLICATION_CONTROLLER_CHANGED")
    assert event.actor == "task deploy"

    assert (await job.round()).info.phase is Phase.RUNNING
    job.signals = 0
    await stage.report("progressing", "starting")
    await until(lambda: job.signals == 1)
    progressing = (await job.round()).info
    assert progressing.phase is Phase.RUNNING
    assert (require(progressing.info).custom_info or {})["reasons"] == ["it is starting"]
    await stage.report("converged")
    await until(lambda: job.signals == 2)

    assert (await job.round()).info.phase is Phase.SUCCESS
    assert (await stage.fleet.rcs.get("web")).generation == 2


async def test_a_deploy_creates_an_rc_that_does_not_exist(stage: Stage) -> None:
    """A round that is lost after the write writes nothing again."""
    job = stage.execution()
    await job.round(crash=True)
    assert (await job.round()).info.phase is Phase.RUNNING
    assert (await stage.fleet.rcs.get("web")).generation == 1
    await stage.report("converged")
    assert (await job.round()).info.phase is Phase.SUCCESS


async def test_a_change_by_another_client_fails_the_step_and_is_kept(stage: Stage) -> None:
    """Fields that the entry leaves out may change."""
    entry = {field: value for field, value in ENTRY.items() if field != "replicas"}
    await stage.fleet.create("web", 1)
    job, other = stage.execution(entry=entry), stage.execution("other")
    await job.round()
    await other.round()
    await stage.fleet.rcs.set_replicas("web", 5)

    assert (await job.round()).info.phase is Phase.RUNNING
    changed = (await other.round()).info
    assert changed.phase is Phase.PERMANENT_FAILURE
    assert require(changed.err).code == "RCChanged"
    assert (await stage.fleet.rcs.get("web")).replicas_desired == 5


async def test_trouble_that_lasts_fails_the_step_with_the_farms_reasons(stage: Stage) -> None:
    """Trouble that ends earlier starts the patience again."""
    job = stage.execution(patience=30)
    await job.round()
    await stage.report("progressing", "crashing")
    assert (await job.round()).poll_after == 30
    await asyncio.sleep(20)
    await stage.report("progressing", "starting")
    assert (await job.round()).info.phase is Phase.RUNNING
    await stage.report("progressing", "crashing")
    waiting = await job.round()
    assert waiting.poll_after == 30
    await asyncio.sleep(waiting.poll_after)

    failed = (await job.round()).info

    assert failed.phase is Phase.RETRYABLE_FAILURE
    assert failed.err is not None
    assert (failed.err.code, failed.err.message) == (
        "RCUnhealthy",
        "rc web has had trouble for 30 s: it is crashing",
    )


SPEC = RCSpec(id="web", manifest="m", replicas_desired=2, generation=3)


@pytest.mark.parametrize(
    ("spec", "state", "phase", "code"),
    [
        (None, "converged", Phase.PERMANENT_FAILURE, "RCDeleted"),
        (msgspec.structs.replace(SPEC, deleting=True), "deleting", Phase.PERMANENT_FAILURE, "RCDeleted"),
        (SPEC, "quarantined", Phase.RETRYABLE_FAILURE, "RCQuarantined"),
        (SPEC, "held", Phase.RUNNING, ""),
        (SPEC, "short", Phase.RUNNING, ""),
        (SPEC, "converged", Phase.SUCCESS, ""),
        (SPEC, "disabled", Phase.RUNNING, ""),
        (msgspec.structs.replace(SPEC, disabled=True), "disabled", Phase.SUCCESS, ""),
    ],
)
def test_verdicts(spec: RCSpec | None, state: Any, phase: Phase, code: str) -> None:
    status = RCStatus(state=state, generation=3, desired=2, placed=2, healthy=2, farm="f", token=1)
    config = DeployConfig(rc={})
    found = verdict(spec, status, lambda spec: True, DeployState(applied=True), config, 0.0)
    assert found.info.phase is phase
    assert (found.info.err.code if found.info.err else "") == code


@pytest.mark.parametrize("on_abort", ["leave", "disable"])
async def test_abort_leaves_the_rc_or_disables_it(stage: Stage, on_abort: str) -> None:
    job = stage.execution(on_abort=on_abort)
    await job.abort()
    await job.save(step="running")
    await job.round()
    await job.abort()
    await job.finalize()
    assert (await stage.fleet.rcs.get("web")).disabled is (on_abort == "disable")
    await stage.store.txn([ops.delete_tree(KEYS.rc("web"))])
    await job.abort()


async def test_an_engine_that_lost_the_execution_changes_no_rc(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another engine has gone on, before the write or just while it is on its way."""
    job, apply = stage.execution(), stage.plugin._deployer.apply

    async def late(*args: Any, **fields: Any) -> None:
        await job.save(step="cleaning")
        await apply(*args, **fields)

    monkeypatch.setattr(stage.plugin._deployer, "apply", late)
    with pytest.raises(TaskError):
        await job.round()
    with pytest.raises(ExecutionLost):
        await job.round()
    assert await stage.store.keys(KEYS.rcs) == []


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ({}, "manifest is missing"),
        (ENTRY | {"replica": 1}, "replica: unknown field"),
        (ENTRY | {"node_selector": "a in"}, "node_selector"),
        ({"id": "web", "manifest": ENTRY["manifest"]}, "replicas: missing"),
    ],
)
async def test_an_entry_that_does_not_fit_names_the_field(stage: Stage, entry: dict[str, Any], error: str) -> None:
    job = stage.execution(entry=entry)
    with pytest.raises(BadConfig, match=error):
        await job.round()
    assert await stage.store.keys(KEYS.rcs) == []
