"""A job API in memory, on virtual time, and a web-API plugin for it. The API outlives engines; every call can fail."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from controllers.tasks.api.data import OutputReader
from controllers.tasks.api.phase import (
    PhaseInfo,
    TaskInfo,
    phase_info_failure,
    phase_info_queued_with_task_info,
    phase_info_running,
    phase_info_success,
)
from controllers.tasks.api.plugin import PluginEntry, TaskExecutionContext
from controllers.tasks.api.resources import ResourceConstraint, ResourceConstraintsSpec, ResourceNamespace
from controllers.tasks.io.files import MemoryOutputReader
from controllers.tasks.patterns.remote import RemoteGone, WebApiConfig
from controllers.tasks.patterns.webapi import Created, ReadContext, Recovery, Requirement, WebApiPlugin, webapi_entry
from tests.support.tasks.engines import wall
from tests.support.waiting import loop_time

LICENCE = ResourceNamespace("licence")


@dataclass
class ApiJob:
    """A job. `status` None: it follows from the clock."""

    key: str
    ends: float
    status: str | None = None
    progress: int = 0

    def shown(self) -> dict[str, Any]:
        status = self.status or ("succeeded" if loop_time() >= self.ends else "running")
        return {"id": self.key, "status": status, "progress": self.progress}


@dataclass
class JobApi:
    """`failures`: by verb, what the next calls raise: before the call is applied, or after it with `after-VERB`.
    `calls`: by verb, the times of the calls. `answers_with_job`: a creation answers with the whole job."""

    seconds: float = 5.0
    answers_with_job: bool = False
    jobs: dict[str, ApiJob] = field(default_factory=dict)
    made: Counter[str] = field(default_factory=Counter)
    deleted: list[str] = field(default_factory=list)
    failures: dict[str, list[Exception]] = field(default_factory=dict)
    calls: dict[str, list[float]] = field(default_factory=dict)
    broken: Exception | None = None  # every read raises it

    def create(self, key: str, *, idempotent: bool) -> ApiJob:
        self._call("create")
        if not (idempotent and key in self.jobs):
            self.made[key] += 1
            self.jobs[key] = ApiJob(key, loop_time() + self.seconds)
        self._fail("after-create")
        return self.jobs[key]

    def get(self, key: str) -> dict[str, Any]:
        self._call("get")
        if self.broken is not None:
            raise self.broken
        if key not in self.jobs:
            raise RemoteGone(f"no job {key}")
        return self.jobs[key].shown()

    def delete(self, key: str) -> None:
        self._call("delete")
        if self.jobs.pop(key, None) is None:
            raise RemoteGone(f"no job {key}")
        self.deleted.append(key)

    def find(self, key: str) -> ApiJob | None:
        self._call("find")
        return self.jobs.get(key)

    def count(self, verb: str) -> int:
        return len(self.calls.get(verb, ()))

    def _call(self, verb: str) -> None:
        self.calls.setdefault(verb, []).append(loop_time())
        self._fail(verb)

    def _fail(self, verb: str) -> None:
        if left := self.failures.get(verb):
            raise left.pop(0)


class ApiPlugin(WebApiPlugin[dict[str, Any]]):
    """Drives jobs of a `JobApi`. `can`: what the API can do about a lost answer. `licence`: a unit of it per job, with
    this constraint of the project; None: no unit."""

    id = "api"
    clock = staticmethod(wall)

    def __init__(
        self,
        api: JobApi,
        config: WebApiConfig | None = None,
        *,
        can: Recovery = Recovery.FIND,
        licence: ResourceConstraintsSpec | None = None,
    ) -> None:
        self.api, self.can, self.licence = api, can, licence
        self._given = config or WebApiConfig()

    def get_config(self) -> WebApiConfig:
        return self._given

    async def resource_requirements(self, context: TaskExecutionContext) -> Requirement | None:
        return None if self.licence is None else Requirement(LICENCE, self.licence)

    async def create(self, context: TaskExecutionContext, key: str) -> Created[dict[str, Any]]:
        await asyncio.sleep(0.01)
        job = self.api.create(key, idempotent=self.can is Recovery.CREATE_AGAIN)
        return Created(key, job.shown() if self.api.answers_with_job else None)

    async def find(self, context: TaskExecutionContext, key: str) -> Created[dict[str, Any]] | None:
        job = self.api.find(key)
        return Created(key, job.shown()) if job else None

    async def recovery(self, context: TaskExecutionContext) -> Recovery:
        return self.can

    async def get(self, context: ReadContext, meta: Any) -> dict[str, Any]:
        await asyncio.sleep(0.01)
        return self.api.get(meta)

    async def delete(self, context: TaskExecutionContext, meta: Any, reason: str) -> None:
        self.api.delete(meta)

    def status(self, meta: Any, resource: dict[str, Any]) -> PhaseInfo:
        info = TaskInfo(custom_info={"progress": resource["progress"]})
        match resource["status"]:
            case "queued":
                return phase_info_queued_with_task_info(0, "queued there", info)
            case "running":
                return phase_info_running(0, info)
            case "succeeded":
                return phase_info_success(info)
        return phase_info_failure("JobFailed", "the job failed", info)

    async def outputs(self, context: TaskExecutionContext, meta: Any, resource: dict[str, Any]) -> OutputReader:
        return MemoryOutputReader({"job": meta})


class BatchPlugin(ApiPlugin):
    """Reads several jobs in one call. `batches`: the number of jobs in each."""

    def __init__(self, api: JobApi, config: WebApiConfig) -> None:
        super().__init__(api, config)
        self.batches: list[int] = []

    async def get_many(self, jobs: Sequence[tuple[ReadContext, Any]]) -> Sequence[dict[str, Any] | Exception]:
        self.batches.append(len(jobs))
        return [await self.get(context, meta) for context, meta in jobs]


def entry(plugin: ApiPlugin) -> PluginEntry:
    return webapi_entry(lambda: plugin, plugin.id, ("api",))


def capped(project: int | None = None, namespace: int | None = None) -> ResourceConstraintsSpec:
    """Return constraints of these numbers of units."""
    return ResourceConstraintsSpec(
        None if project is None else ResourceConstraint(project),
        None if namespace is None else ResourceConstraint(namespace),
    )
