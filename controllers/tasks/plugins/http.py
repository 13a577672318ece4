"""`http`: a job of any asynchronous job API, described in configuration.

The web-API pattern over HTTP: how jobs are created exactly once, read and deleted is in `controllers.tasks.patterns`;
which requests that takes is in `controllers.tasks.plugins.http_api`. Here they are sent, and their answers judged:

2xx                a JSON answer, or an empty one
404, 410           there is no such job; a creation is refused
401, 403, 407      the operator's credentials: tried again, since a rotated secret applies at the next call
408, 425, 5xx      tried again; 429, and 503 with a `Retry-After`, hold all calls of the kind to the remote system
409                refused; a job that can't be deleted for that has ended
3xx, other 4xx     refused: redirects are never followed

Secrets are removed from every answer and error before anything is made of it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote

import aiohttp
from aiohttp import web

from controllers.tasks.api.data import OutputReader, SecretManager
from controllers.tasks.api.errors import BadConfig
from controllers.tasks.api.phase import (
    ExternalResource,
    Phase,
    PhaseInfo,
    TaskInfo,
    TaskLog,
    phase_info_failure,
    phase_info_initializing,
    phase_info_queued_with_task_info,
    phase_info_retryable_failure,
    phase_info_running,
    phase_info_success,
    phase_info_system_retryable_failure,
)
from controllers.tasks.api.plugin import PluginEntry, SetupContext, TaskExecutionContext, TaskTemplate
from controllers.tasks.io.files import MemoryOutputReader
from controllers.tasks.patterns.remote import (
    RemoteGone,
    RemoteRefused,
    RemoteThrottled,
    RemoteTransient,
    WebApiConfig,
)
from controllers.tasks.patterns.webapi import Created, ReadContext, Recovery, WebApiPlugin, webapi_entry
from controllers.tasks.plugins.http_api import (
    HttpSettings,
    HttpTask,
    Prepared,
    Remote,
    Renderer,
    found,
    job_id,
)
from controllers.tasks.template import Parameters
from store.decoding import Undecodable, converted, from_json, json_decoder
from store.http import NEVER_SENT, ConnectionLost, cause_of, send_writes_once
from store.redaction import Redactor
from store.tls import TlsContexts

PLUGIN_ID = "http"
MAX_TEXT = 500  # characters of an answer that an error shows
_ANY = json_decoder(Any)
_JOB = re.compile(r"\{\{\s*+[.$]Job\s*+\}\}", re.IGNORECASE)
_PHASES = {
    "queued": Phase.QUEUED,
    "initializing": Phase.INITIALIZING,
    "running": Phase.RUNNING,
    "success": Phase.SUCCESS,
    "failure": Phase.PERMANENT_FAILURE,
    "retryable": Phase.RETRYABLE_FAILURE,
    "system": Phase.RETRYABLE_FAILURE,
}


@dataclass(frozen=True, slots=True)
class Seen:
    """A job as the API shows it, without secrets, and how the task reads it."""

    job: Any
    task: HttpTask


class JobEnded(RemoteRefused):
    """A conflict with the state of the job (409). A job that can't be deleted for that has ended."""


class HttpPlugin(WebApiPlugin[Seen]):
    """Runs `http` tasks. `redactor`: shared by all that publish texts of this process."""

    id = PLUGIN_ID

    def __init__(self, settings: HttpSettings, *, redactor: Redactor | None = None) -> None:
        self._settings, self._redactor = settings, redactor or Redactor()
        self._tls = {name: TlsContexts() for name in settings.remotes}
        self._session: aiohttp.ClientSession | None = None
        self._secrets: SecretManager | None = None

    def get_config(self) -> WebApiConfig:
        """Return the limits of the settings."""
        return self._settings.limits

    async def load(self, setup: SetupContext) -> None:
        """Check the settings. Raises `BadConfig`."""
        self._settings.check()
        await super().load(setup)
        self._secrets = setup.secret_manager

    async def close(self) -> None:
        """Stop following jobs, and close the connections."""
        await super().close()
        if self._session is not None:
            await self._session.close()

    async def remote(self, context: TaskExecutionContext) -> str:
        """Return the name of the remote system. Raises `BadConfig`."""
        return self._task(await context.task_reader.read()).remote

    async def recovery(self, context: TaskExecutionContext) -> Recovery:
        """Return what the task's configuration says that the API can do."""
        task = self._task(await context.task_reader.read())
        if task.find is not None:
            return Recovery.FIND
        return Recovery.CREATE_AGAIN if task.idempotent or task.idempotency_header else Recovery.UNKNOWN

    async def create(self, context: TaskExecutionContext, key: str) -> Created[Seen]:
        """Send the creation. The answer is the job."""
        task, renderer = await self._prepared(context, key)
        extra = {task.idempotency_header: "{{ .Key }}"} if task.idempotency_header else None
        try:
            job = await self._send(task.remote, await renderer.request(task.create, "POST", extra))
        except RemoteGone as error:
            raise RemoteRefused(str(error)) from None
        return self._created(task, job)

    async def find(self, context: TaskExecutionContext, key: str) -> Created[Seen] | None:
        """Search for the job."""
        task, renderer = await self._prepared(context, key)
        assert task.find is not None
        try:
            answer = await self._send(task.remote, await renderer.request(task.find, "GET"))
        except RemoteGone:
            return None
        job = found(task.find.job, answer)
        return None if job is None else self._created(task, job)

    async def get_many(self, jobs: Sequence[tuple[ReadContext, Any]]) -> Sequence[Seen | Exception]:
        """Read the jobs in one call if the remote system has one for that; otherwise each by a call of its own."""
        first = jobs[0][0]
        remote = self._task(first.task).remote
        batch = self._remote(remote).batch
        if batch is None or len(jobs) == 1:
            answers: list[Seen | Exception] = []
            for number, (context, meta) in enumerate(jobs):
                if number:
                    await self._limits.read(remote).acquire()
                try:
                    answers.append(await self.get(context, meta))
                except Exception as error:
                    answers.append(error)
            return answers
        tasks, ids = [self._task(context.task) for context, _ in jobs], [meta["job"] for _, meta in jobs]
        renderer = self._renderer(tasks[0], first, first.name, jobs=",".join(ids))
        answer = found(batch.jobs, await self._send(remote, await renderer.request(batch, "GET")))
        if not isinstance(answer, list):
            raise RemoteTransient(f"remote {remote} answered a batch without a list at {batch.jobs}")
        by_id = {job_id(batch.id, job): job for job in answer}
        missing = RemoteGone(f"remote {remote} does not list the job")
        return [Seen(by_id[each], task) if each in by_id else missing for each, task in zip(ids, tasks, strict=True)]

    async def get(self, context: ReadContext, meta: Any) -> Seen:
        """Read the job."""
        task = self._task(context.task)
        renderer = self._renderer(task, context, context.name, job=meta["job"])
        return Seen(await self._send(task.remote, await renderer.request(task.get, "GET")), task)

    async def delete(self, context: TaskExecutionContext, meta: Any, reason: str) -> None:
        """Send the deletion, if the task has one."""
        name = context.task_execution_metadata.get_task_execution_id().get_generated_name()
        task, renderer = await self._prepared(context, name, job=meta["job"])
        if task.delete is not None:
            with suppress(JobEnded):
                await self._send(task.remote, await renderer.request(task.delete, "DELETE"))

    def status(self, meta: Any, resource: Seen) -> PhaseInfo:
        """Return the phase of the job's status, with links and details. Raises `RemoteTransient` for a status that the
        task does not name."""
        identity, job, task = meta["job"], resource.job, resource.task
        status = found(task.status, job)
        phase = task.phases.get(str(status)) if isinstance(status, str | int | bool) else None
        if phase is None:
            known = ", ".join(task.phases)
            raise RemoteTransient(f"the status of job {identity} is {status!r:.100}; `phases` names {known}")
        links = []
        for link in task.logs:
            is_path = link.uri.startswith("$")
            uri = found(link.uri, job) if is_path else _JOB.sub(quote(identity, safe=""), link.uri)
            if uri and isinstance(uri, str):
                links.append(TaskLog(uri, link.name))
        logs = tuple(links)
        details = {name: found(path, job) for name, path in task.info.items()}
        shown = ExternalResource(identity, logs=logs, phase=_PHASES[phase])
        info = TaskInfo(logs=logs, custom_info={"job": identity, **details}, external_resources=(shown,))
        message = str(found(task.message, job) or "")[:MAX_TEXT]
        code = str(found(task.code, job) or "RemoteFailed")[:100]
        match phase:
            case "queued":
                return phase_info_queued_with_task_info(0, message or "queued", info)
            case "initializing":
                return phase_info_initializing(datetime.now(UTC), 0, message or "initializing", info)
            case "running":
                return phase_info_running(0, info)
            case "success":
                return phase_info_success(info)
            case "retryable":
                return phase_info_retryable_failure(code, message or "the job failed", info)
            case "system":
                return phase_info_system_retryable_failure(code, message or "the remote system failed", info)
        return phase_info_failure(code, message or "the job failed", info)

    async def outputs(self, context: TaskExecutionContext, meta: Any, resource: Seen) -> OutputReader:
        """Return the outputs that the task's paths lead to; what leads nowhere is missing."""
        values = {name: found(path, resource.job) for name, path in resource.task.outputs.items()}
        return MemoryOutputReader({name: value for name, value in values.items() if value is not None})

    async def is_push_token(self, name: str, token: str) -> bool:
        """Return whether the token is the one of this generated name."""
        if not self._settings.push_secret or self._secrets is None:
            return False
        return hmac.compare_digest(token.encode(), (await self._push_token(self._secrets, name)).encode())

    # Requests

    async def _prepared(self, context: TaskExecutionContext, key: str, **own: str) -> tuple[HttpTask, Renderer]:
        template = await context.task_reader.read()
        task = self._task(template)
        reading = ReadContext(
            key,
            template,
            context.task_reader,
            context.secret_manager,
            context.input_reader,
            context.output_writer,
        )
        if self._settings.push_url:
            token = await self._push_token(context.secret_manager, key)
            own["pushurl"] = f"{self._settings.push_url.rstrip('/')}/{key}/{token}"
        return task, self._renderer(task, reading, key, **own)

    def _renderer(self, task: HttpTask, context: ReadContext, key: str, **own: str) -> Renderer:
        parameters = Parameters(context.input_reader, context.output_writer, key, context.task_reader)
        own["key"] = key
        return Renderer(self._remote(task.remote), parameters, context.secret_manager, self._redactor, own)

    def _task(self, template: TaskTemplate) -> HttpTask:
        """Return the task's part, over the defaults of its remote system. Raises `BadConfig`."""
        remote = self._remote(template.config.get("remote"))
        try:
            return converted({**remote.defaults, **template.config}, HttpTask)
        except Undecodable as error:
            raise BadConfig(f"config of the http task {template.id}: {error}") from None

    def _remote(self, name: object) -> Remote:
        remote = self._settings.remotes.get(name) if isinstance(name, str) else None
        if remote is None:
            known = ", ".join(sorted(self._settings.remotes)) or "none"
            raise BadConfig(f"config.remote: {name!r:.100} is not a remote system of the engine's settings ({known})")
        return remote

    def _created(self, task: HttpTask, job: Any) -> Created[Seen]:
        identity = job_id(task.id, job)
        if identity is None:
            raise RemoteTransient(f"remote {task.remote} answered without an id at {task.id}")
        has_status = isinstance(found(task.status, job), str | int | bool)
        return Created({"job": identity}, Seen(job, task) if has_status else None)

    async def _push_token(self, secrets: SecretManager, name: str) -> str:
        secret = await secrets.get(self._settings.push_secret)
        token = hmac.new(secret.encode(), name.encode(), hashlib.sha256).hexdigest()
        self._redactor.remember(secret)
        self._redactor.remember(token)
        return token

    async def _send(self, name: str, request: Prepared) -> Any:
        """Return the answer's JSON, None for an empty one. Raises `RemoteError`."""
        remote = self._remote(name)
        if self._session is None:
            self._session = aiohttp.ClientSession(
                middlewares=(send_writes_once,), cookie_jar=aiohttp.DummyCookieJar(), raise_for_status=False
            )
        where = f"{request.method} {request.url.path} of remote {name}"
        try:
            async with self._session.request(
                request.method,
                request.url,
                headers=request.headers,
                data=request.body,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=remote.timeout),
                ssl=self._tls[name].context(remote.ca or None) if request.url.scheme == "https" else True,
            ) as response:
                body = b""
                async for chunk in response.content.iter_chunked(64 * 1024):
                    body += chunk
                    if len(body) > remote.max_body:
                        response.close()
                        break
        except NEVER_SENT as error:
            raise RemoteTransient(self._redactor.text(f"{where}: {cause_of(error)}"), sent=False) from None
        except TimeoutError:
            raise RemoteTransient(f"{where}: no answer within {remote.timeout:g} s") from None
        except (aiohttp.ClientError, ConnectionLost, OSError) as error:
            raise RemoteTransient(self._redactor.text(f"{where}: {cause_of(error)}")) from None
        return self._judged(where, response, body, remote)

    def _judged(self, where: str, response: aiohttp.ClientResponse, body: bytes, remote: Remote) -> Any:
        """Return the JSON of a good answer, without secrets. Raises what another one means."""
        status, is_too_large = response.status, len(body) > remote.max_body
        shown = "" if is_too_large else body[:MAX_TEXT].decode(errors="replace")
        text = self._redactor.text(f"{where}: {status} {response.reason or ''} {shown}").strip()
        if 200 <= status < 300:
            if is_too_large:
                raise RemoteTransient(f"{where}: the answer has more than {remote.max_body} bytes")
            if not body.strip():
                return None
            try:
                return self._redactor.value(from_json(_ANY, body))
            except Undecodable as error:
                raise RemoteTransient(f"{where}: the answer is no JSON: {error}") from None
        retry_after: float | None = None
        header = response.headers.get("Retry-After", "")
        if header.isascii() and header.isdigit():
            retry_after = float(header[:10])
        else:
            with suppress(ValueError, OverflowError):
                retry_after = max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
        if status == 429 or (status == 503 and retry_after is not None):
            raise RemoteThrottled(text, retry_after=retry_after, sent=status == 503)
        if status in (404, 410):
            raise RemoteGone(text)
        if status in (401, 403, 407):
            raise RemoteTransient(text, sent=False)
        if status == 409:
            raise JobEnded(text)
        if status in (408, 425) or status >= 500:
            raise RemoteTransient(text)
        raise RemoteRefused(f"{text}; redirects are not followed" if 300 <= status < 400 else text)


def http_entry(plugin: HttpPlugin) -> PluginEntry:
    """Return the entry of the plugin, as its loader needs it."""
    return webapi_entry(lambda: plugin, PLUGIN_ID, (PLUGIN_ID,))


def push_routes(plugin: HttpPlugin) -> list[web.RouteDef]:
    """Return the route on which remote systems report that a job has changed; mount it where `push_url` leads.

    `POST /NAME/TOKEN` answers 202 if this engine follows the job, which is then read at once, 404 if it does not, and
    403 for a wrong token. The body is not used: what counts is what the job's own answer says.
    """

    async def pushed(request: web.Request) -> web.Response:
        name, token = request.match_info["name"], request.match_info["token"]
        if not await plugin.is_push_token(name, token):
            return web.Response(status=403)
        return web.Response(status=202 if plugin.push(name) else 404)

    return [web.post("/{name}/{token}", pushed)]
