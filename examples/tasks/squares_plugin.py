"""A plugin for the job server of this folder. Its entry point, in the pyproject.toml of your distribution:

[project.entry-points."rcfarm.task_plugins"]
square = "squares_plugin:ENTRY"
"""

from __future__ import annotations

import os
from typing import Any

import aiohttp

from controllers.tasks.api import (
    PhaseInfo,
    TaskExecutionContext,
    TaskInfo,
    phase_info_failure,
    phase_info_running,
    phase_info_success,
)
from controllers.tasks.io import MemoryOutputReader
from controllers.tasks.patterns import (
    Created,
    ReadContext,
    RemoteGone,
    RemoteRefused,
    RemoteTransient,
    WebApiConfig,
    WebApiPlugin,
    webapi_entry,
)


class SquarePlugin(WebApiPlugin[dict[str, Any]]):
    """Has the server compute the square of the input `number`."""

    id = "square"
    is_idempotent = True

    def __init__(self, url: str) -> None:
        self.url = url

    def get_config(self) -> WebApiConfig:
        """Return the settings: everyone's jobs together, and reads once a minute."""
        return WebApiConfig(resync_seconds=60, write_qps=5)

    async def create(self, context: TaskExecutionContext, key: str) -> Created[dict[str, Any]]:
        """Create the job; a second call with the same key answers with the first one's job."""
        number = (await context.input_reader.get())["number"]
        job = await self._call("POST", "/jobs", json={"number": number}, headers={"Idempotency-Key": key})
        return Created(job["id"])

    async def get(self, context: ReadContext, meta: str) -> dict[str, Any]:
        """Read the job."""
        return await self._call("GET", f"/jobs/{meta}")

    async def delete(self, context: TaskExecutionContext, meta: str, reason: str) -> None:
        """Cancel the job."""
        await self._call("DELETE", f"/jobs/{meta}")

    def status(self, meta: str, resource: dict[str, Any]) -> PhaseInfo:
        """Return the phase of what was read."""
        info = TaskInfo(custom_info={"progress": resource["progress"]})
        match resource["status"]:
            case "running":
                return phase_info_running(0, info)
            case "done":
                return phase_info_success(info)
        return phase_info_failure("JobFailed", resource["message"], info)

    async def outputs(self, context: TaskExecutionContext, meta: str, resource: dict[str, Any]) -> MemoryOutputReader:
        """Return the square."""
        return MemoryOutputReader(resource["result"])

    async def _call(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.request(method, self.url + path, **request) as answer,
            ):
                body: dict[str, Any] = await answer.json()
        except aiohttp.ClientError as error:
            raise RemoteTransient(str(error)) from error
        if answer.status == 404:
            raise RemoteGone(body["message"])
        if answer.status >= 400:
            raise (RemoteTransient if answer.status >= 500 else RemoteRefused)(body["message"])
        return body


ENTRY = webapi_entry(lambda: SquarePlugin(os.environ["SQUARES_URL"]), "square", ("square",))
