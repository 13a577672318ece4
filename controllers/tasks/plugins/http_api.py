"""A job API as configuration: remote systems of operators, requests and answers of tasks, and their templates.

An operator names the remote systems that tasks may call: where they are, how calls are authorized, which secrets a task
may insert. A task names one of them, and describes the requests. Its paths are rendered segment by segment, and each
segment is quoted, so that neither a path nor an input leads out of the remote system's base URL.

Beside the placeholders of commands (`controllers.tasks.template`) a request has `{{ .Key }}`, the idempotency key,
`{{ .Job }}`, the job's id, `{{ .Jobs }}` (in a batch: the ids, separated by commas), `{{ .PushUrl }}` and
`{{ .Secrets.NAME }}`. One pass replaces them all, so an input that has the text of a placeholder stays as it is.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import quote

import msgspec
from yarl import URL

from controllers.tasks.api.data import SecretManager
from controllers.tasks.api.errors import BadConfig
from controllers.tasks.patterns.remote import WebApiConfig
from controllers.tasks.template import Parameters, literal_text, render
from store.redaction import Redactor

MAX_ID = 1024  # characters of a job's id
_OWN = re.compile(r"\{\{\s*+[.$](?:Secrets\.([\w.-]{1,128}+)|(Jobs?|Key|PushUrl))\s*+\}\}", re.IGNORECASE)
_INPUT = re.compile(r"\{\{\s*+[.$]Inputs\.([^}\s]{1,256}+)\s*+\}\}", re.IGNORECASE)
_STEP = re.compile(r"\.([A-Za-z_][\w-]*)|\[(-?\d{1,9})\]|\['([^']*)'\]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_RESERVED = {"host", "content-length", "transfer-encoding", "connection", "upgrade"}

PhaseName = Literal["queued", "initializing", "running", "success", "failure", "retryable", "system"]


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request; every text in it is a template. `path`: below the remote system's base URL. `method`: "" for the
    usual one. `body`: sent as JSON; a text that is one input alone becomes its JSON value. None: no body."""

    path: str
    method: Literal["", "GET", "POST", "PUT", "PATCH", "DELETE"] = ""
    query: dict[str, str] = {}
    headers: dict[str, str] = {}
    body: Any = None


class Search(Request, frozen=True, forbid_unknown_fields=True):
    """The request that looks for a job by its key. `job`: the job in the answer, which then is absent or null if there
    is none."""

    job: str = "$"


class Batch(Request, frozen=True, forbid_unknown_fields=True):
    """The request that reads several jobs. `jobs`: the list of them in the answer. `id`: in each of them."""

    jobs: str = "$"
    id: str = "$.id"


class LogLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A link to a log. `uri`: a path into the job, or a text with `{{ .Job }}`."""

    name: str
    uri: str


class HttpTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The task's own part. Paths into answers are JSONPath's `$.name`, `$['name']`, `$[0]` and `$[-1]`.

    - `create`, `get`, `delete`: the requests; without `delete` an abort leaves the job alone.
    - `find`, `idempotency_header`, `idempotent`: what the API can do about a lost answer; see the page of plugins.
    - `id`, `status`, `message`, `code`: in a job. `phases`: the phase of each status.
    - `logs`, `outputs`, `info`: what is shown and returned of a job.
    """

    remote: str
    create: Request
    get: Request
    delete: Request | None = None
    find: Search | None = None
    idempotency_header: str = ""
    idempotent: bool = False
    id: str = "$.id"
    status: str = "$.status"
    phases: dict[str, PhaseName]
    message: str = "$.message"
    code: str = "$.code"
    logs: tuple[LogLink, ...] = ()
    outputs: dict[str, str] = {}
    info: dict[str, str] = {}

    def check(self) -> None:
        """Check what no engine can change. Raises `BadConfig`."""
        paths = {name: getattr(self, name) for name in ("id", "status", "message", "code")}
        for table in ("outputs", "info"):
            paths |= {f"{table}.{name}": path for name, path in getattr(self, table).items()}
        if self.find is not None:
            paths["find.job"] = self.find.job
        for place, path in paths.items():
            try:
                found(path, None)
            except BadConfig as error:
                raise BadConfig(f"config.{place}: {error}") from None
        for name in ("create", "get", "delete", "find"):
            request: Request | None = getattr(self, name)
            for header in request.headers if request is not None else ():
                if header.lower() in _RESERVED:
                    raise BadConfig(f"config.{name}.headers.{header}: this header can't be set")
        if not self.phases:
            raise BadConfig("config.phases: name the phase of at least one status")


class Auth(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How calls are authorized. `secret`: its key. `scheme`: a bearer token, a password of `user`, or the value of the
    header as it is."""

    secret: str
    scheme: Literal["bearer", "basic", "plain"] = "bearer"
    user: str = ""
    header: str = "Authorization"


class Remote(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A remote system that tasks may call.

    - `url`: the base; tasks reach nothing outside of it. `headers`: sent with each call, as they are.
    - `secrets`: keys that tasks may insert. `defaults`: fields of a task's part that it need not repeat.
    - `timeout`: seconds of a call. `max_body`: bytes of an answer. `ca`: a PEM file, "" for the system's authorities.
    - `batch`: reads several jobs in one call.
    """

    url: str
    auth: Auth | None = None
    headers: dict[str, str] = {}
    secrets: tuple[str, ...] = ()
    defaults: dict[str, Any] = {}
    batch: Batch | None = None
    timeout: float = 30.0
    max_body: int = 1024 * 1024
    ca: str = ""

    def check(self, name: str) -> None:
        """Raise `BadConfig` if the base can't be one."""
        try:
            url = URL(self.url)
        except ValueError as error:
            raise BadConfig(f"remote {name}: url: {error}") from None
        if url.scheme not in ("http", "https") or not url.host or url.query_string or url.fragment or url.user:
            raise BadConfig(
                f"remote {name}: url must be http(s)://HOST[:PORT][/PATH], without user, query and fragment"
            )
        if not 0 < self.timeout < float("inf") or self.max_body < 1:
            raise BadConfig(f"remote {name}: timeout and max_body must be above 0")


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of the plugin. `push_url`: where remote systems reach this engine's push route; `push_secret`: the
    key of the secret that push tokens are made of. Both or neither."""

    remotes: dict[str, Remote] = {}
    limits: WebApiConfig = WebApiConfig()
    push_url: str = ""
    push_secret: str = ""

    def check(self) -> None:
        """Raise `BadConfig`."""
        for name, remote in self.remotes.items():
            remote.check(name)
        if bool(self.push_url) != bool(self.push_secret):
            raise BadConfig("push_url and push_secret belong together: set both, or neither")


def found(path: str, value: Any) -> Any:
    """Return what the path leads to in a JSON value; None if it leads nowhere. Raises `BadConfig` for a malformed
    path."""
    rest = path.removeprefix("$")
    if rest == path or _STEP.sub("", rest):
        raise BadConfig(f"{path!r} is no path such as $.job.status or $.jobs[0]['id']")
    for name, index, quoted in _STEP.findall(rest):
        if index:
            at = int(index)
            value = value[at] if isinstance(value, list) and -len(value) <= at < len(value) else None
        else:
            value = value.get(name or quoted) if isinstance(value, Mapping) else None
    return value


def job_id(path: str, job: Any) -> str | None:
    """Return the id of a job, None if it has none."""
    value = found(path, job)
    is_id = isinstance(value, str | int) and not isinstance(value, bool)
    return str(value) if is_id and 0 < len(str(value)) <= MAX_ID else None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request as it is sent."""

    method: str
    url: URL
    headers: dict[str, str]
    body: bytes | None = None


@dataclass(frozen=True, slots=True)
class Renderer:
    """Renders the requests of one execution. `own`: the values of `Key`, `Job`, `Jobs` and `PushUrl`, those that there
    are. Every secret that is inserted is remembered by the redactor."""

    remote: Remote
    parameters: Parameters
    secrets: SecretManager
    redactor: Redactor
    own: dict[str, str] = field(default_factory=dict)

    async def request(self, request: Request, method: str, extra: Mapping[str, str] | None = None) -> Prepared:
        """Return the request, with the remote system's headers and authorization. `extra`: further headers. Raises
        `BadConfig`, `BadTemplate`, `SecretNotFound`."""
        url, path = self.remote.url.rstrip("/"), request.path.strip("/")
        for template in path.split("/") if path else ():
            segment = await self.text(template)
            if segment in ("", ".", "..") or _CONTROL.search(segment):
                raise BadConfig(f"config: a segment of the path {request.path!r} is {segment!r}")
            url += "/" + quote(segment, safe=":@,=+~")
        query = {name: await self.text(template) for name, template in request.query.items()}
        headers = {}
        for name, template in {**request.headers, **(extra or {})}.items():
            if name.lower() in _RESERVED:
                raise BadConfig(f"config: the header {name} can't be set")
            headers[name] = await self.text(template)
        body = None
        if request.body is not None:
            body = msgspec.json.encode(await self._json(request.body))
            headers.setdefault("Content-Type", "application/json")
        ours = dict(self.remote.headers)
        if (auth := self.remote.auth) is not None:
            secret = str(await self.secrets.get(auth.secret))
            self.redactor.remember(secret)
            if auth.scheme == "basic":
                secret = base64.b64encode(f"{auth.user}:{secret}".encode()).decode()
                self.redactor.remember(secret)
            ours[auth.header] = secret if auth.scheme == "plain" else f"{auth.scheme.title()} {secret}"
        headers = {name: value for name, value in headers.items() if name.lower() not in map(str.lower, ours)} | ours
        for name, value in headers.items():
            if _CONTROL.search(name + value):
                raise BadConfig(f"config: the header {name!r} has a control character")
        return Prepared(request.method or method, URL(url, encoded=True).with_query(query or None), headers, body)

    async def text(self, template: str) -> str:
        """Return the text with its placeholders replaced."""
        pieces, end = [], 0
        for match in _OWN.finditer(template):
            pieces += await render([template[end : match.start()]], self.parameters)
            end = match.end()
            secret, name = match[1], match[2]
            if secret and secret not in self.remote.secrets:
                known = ", ".join(self.remote.secrets) or "none"
                raise BadConfig(f"config: the secret {secret} is not one that tasks may send to this remote ({known})")
            if secret:
                pieces.append(str(await self.secrets.get(secret)))
                self.redactor.remember(pieces[-1])
            elif name.lower() in self.own:
                pieces.append(self.own[name.lower()])
            else:
                raise BadConfig(f"config: there is no {{{{ .{name} }}}} in this request")
        return "".join([*pieces, *await render([template[end:]], self.parameters)])

    async def _json(self, value: Any) -> Any:
        """Return the body with its texts rendered."""
        if isinstance(value, dict):
            return {name: await self._json(each) for name, each in value.items()}
        if isinstance(value, list):
            return [await self._json(each) for each in value]
        if not isinstance(value, str):
            return value
        if (whole := _INPUT.fullmatch(value)) and self.parameters.inputs is not None:
            inputs = await self.parameters.inputs.get()
            if whole[1] in inputs:
                return _json_of(inputs[whole[1]], whole[1])
        return await self.text(value)


def _json_of(value: Any, name: str) -> Any:
    """Return an input as a JSON value: times, durations and blobs as their texts."""
    if isinstance(value, dict):
        return {key: _json_of(each, name) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_json_of(each, name) for each in value]
    return value if value is None or isinstance(value, str | int | float | bool) else literal_text(value, name)
