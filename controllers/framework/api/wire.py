"""Decodes a Framework from a raw object, validates its spec, and encodes its status.

Each Framework is decoded on its own: an invalid one has `problems`, or raises `BadFramework`, which name the field, and
does not affect the others. The custom resource's schema refuses most of these errors, but it may be an older one or
none, and it does not cover pod templates. A Framework with problems is left alone: its pods stay, nothing new is
created, and it can still be stopped.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec

from controllers.framework.api.types import (
    EXECUTION_CREATE,
    EXECUTION_STOP,
    LARGE_STATUS,
    MAX_TASK_NUMBER,
    Framework,
    FrameworkSpec,
    FrameworkStatus,
    Problem,
    RetryPolicy,
    TaskRoleSpec,
    TaskRoleStatus,
)
from store.decoding import Undecodable, converted, from_json, problem_of, without_nulls
from store.errors import RcfarmError
from store.kube.api.objects import (
    MalformedObject,
    Object,
    is_deleting,
    name_of,
    namespace_of,
    resource_version_of,
    uid_of,
)

_TEMPLATE = ("pod",)  # pod templates are kept as they were written

MAX_ROLES = 16 * 1024 * 1024
"""Limit of decompressed JSON, in bytes. 10,000 tasks with long diagnostics take half of it. Decoding takes four times
as much memory, which any tenant can cause with some 50 KB."""

_decoder = msgspec.json.Decoder(tuple[TaskRoleStatus, ...])

_NAME = re.compile(r"[a-z0-9]{1,63}")


class BadFramework(RcfarmError, ValueError):
    """A Framework that can't be decoded. `field`: the path of the invalid field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message

    @property
    def problem(self) -> Problem:
        return Problem(self.field, self.message)


def decode_framework(obj: Object, *, status: FrameworkStatus | None = None) -> Framework:
    """Decode and validate the Framework of a raw object (`Framework.problems`).

    A spec that can't be decoded is a problem like others: running pods stay, and the Framework can still be stopped.

    `status`: the status that we expect; it replaces the stored one, which may be older or overwritten by another
    client. Raises `BadFramework` for a status that can't be decoded.
    """
    if isinstance(obj, MalformedObject):
        raise BadFramework("the object", obj.reason)
    try:
        spec = decode_spec(obj.get("spec"))
        problems = problems_of(name_of(obj), spec)
    except BadFramework as error:
        spec, problems = _what_can_be_read(obj.get("spec")), (error.problem,)
    return Framework(
        name=name_of(obj),
        namespace=namespace_of(obj),
        uid=uid_of(obj),
        spec=spec,
        status=decode_status(obj.get("status")) if status is None else status,
        resource_version=resource_version_of(obj),
        generation=int(obj["metadata"].get("generation") or 0),
        deleting=is_deleting(obj),
        problems=problems,
    )


def decode_spec(raw: Any) -> FrameworkSpec:
    """Decode a spec. A field that is null counts as left out, as in frameworkcontroller. Raises `BadFramework`."""
    try:
        return converted(without_nulls(raw or {}, _TEMPLATE), FrameworkSpec)
    except Undecodable as error:
        raise _explained("spec", error) from error


def _what_can_be_read(raw: Any) -> FrameworkSpec:
    """Return the one usable field of an undecodable spec: whether to stop."""
    execution_type = raw.get("executionType") if isinstance(raw, dict) else None
    return FrameworkSpec(execution_type=EXECUTION_STOP if execution_type == EXECUTION_STOP else EXECUTION_CREATE)


def decode_status(raw: Any) -> FrameworkStatus | None:
    """Decode a status and decompress its roles; return None for one that was never written. Raises `BadFramework`."""
    if not raw:
        return None
    try:
        status = converted(raw, FrameworkStatus)
    except Undecodable as error:
        raise _explained("status", error) from error
    attempt = status.attempt_status
    compressed = attempt.task_role_statuses_compressed
    if not isinstance(compressed, bytes):
        return status
    roles = attempt.task_role_statuses
    if roles is None:
        try:
            roles = decompress(compressed)
        except ValueError as error:
            raise BadFramework("status.attemptStatus.taskRoleStatusesCompressed", str(error)) from error
    attempt = msgspec.structs.replace(attempt, task_role_statuses=roles, task_role_statuses_compressed=msgspec.UNSET)
    return msgspec.structs.replace(status, attempt_status=attempt)


def encode_status(status: FrameworkStatus, *, compress_large: bool = False) -> Object:
    """Encode the status for the wire; with `compress_large`, roles of `LARGE_STATUS` bytes or more are gzipped."""
    attempt = status.attempt_status
    if compress_large and attempt.task_role_statuses:
        raw = msgspec.json.encode(attempt.task_role_statuses)
        if len(raw) >= LARGE_STATUS:
            attempt = msgspec.structs.replace(
                attempt, task_role_statuses=None, task_role_statuses_compressed=compress(raw)
            )
            status = msgspec.structs.replace(status, attempt_status=attempt)
    wire: Object = msgspec.json.decode(msgspec.json.encode(status))  # lists instead of tuples, and faster than builtins
    return wire


def status_patch(framework: Framework, wire: Object) -> list[Object]:
    """Return a JSON patch that writes the whole status, if the object still has the UID and the resource version.

    A merge patch would treat the explicit nulls as deletions, and would leave parts of an earlier attempt's outcome in
    a later one's.
    """
    patch: list[Object] = [{"op": "test", "path": "/metadata/uid", "value": framework.uid}]
    if framework.resource_version:
        patch.append({"op": "test", "path": "/metadata/resourceVersion", "value": framework.resource_version})
    return [*patch, {"op": "add", "path": "/status", "value": wire}]


def _explained(root: str, error: Undecodable) -> BadFramework:
    problem = problem_of(error)
    return BadFramework(f"{root}.{problem.field}" if problem.field else root, problem.what)


def compress(raw: bytes) -> bytes:
    """Compress without a time stamp: an unchanged status gives the same bytes."""
    return gzip.compress(raw, compresslevel=6, mtime=0)


def decompress(compressed: bytes) -> tuple[TaskRoleStatus, ...]:
    """Decode compressed statuses of task roles. Raises `ValueError` if the data is not that, not gzip, or too large."""
    return from_json(_decoder, inflate(compressed))


def inflate(compressed: bytes) -> bytes:
    """Return the decompressed JSON. Raises `ValueError` if the data is not gzip, or too large."""
    stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)  # 16: a gzip header
    try:
        raw = stream.decompress(compressed, MAX_ROLES)
    except zlib.error as error:
        raise ValueError(f"not valid gzip: {error}") from error
    if stream.unconsumed_tail:
        raise ValueError(f"more than {MAX_ROLES} bytes when decompressed")
    if not stream.eof:
        raise ValueError("the compressed data ends early")
    return raw


def problems_of(name: str, spec: FrameworkSpec) -> tuple[Problem, ...]:
    """Return all problems of the spec of the Framework `name`, in the order of its fields."""
    return tuple(_problems(name, spec))


def _problems(name: str, spec: FrameworkSpec) -> Iterator[Problem]:
    yield from _name("metadata.name", name)
    yield from _retry_policy("spec.retryPolicy", spec.retry_policy)
    first: dict[str, int] = {}
    for position, role in enumerate(spec.task_roles):
        at = f"spec.taskRoles[{position}]"
        yield from _name(f"{at}.name", role.name)
        if first.setdefault(role.name, position) != position:
            yield Problem(f"{at}.name", f"{role.name!r} is also the name of taskRoles[{first[role.name]}]; rename one")
        yield from _role(at, role)


def _role(at: str, role: TaskRoleSpec) -> Iterator[Problem]:
    if not 0 <= role.task_number <= MAX_TASK_NUMBER:
        yield Problem(f"{at}.taskNumber", f"{role.task_number} is not within 0 to {MAX_TASK_NUMBER}")
    policy = role.framework_attempt_completion_policy
    if policy is not None:
        for field, count in (
            ("minFailedTaskCount", policy.min_failed_task_count),
            ("minSucceededTaskCount", policy.min_succeeded_task_count),
        ):
            if count < -1:
                where = f"{at}.frameworkAttemptCompletionPolicy.{field}"
                yield Problem(where, f"{count} is less than -1, which means never")
    yield from _retry_policy(f"{at}.task.retryPolicy", role.task.retry_policy)
    yield from _template(f"{at}.task.pod", role.task.pod)


def _retry_policy(at: str, policy: RetryPolicy) -> Iterator[Problem]:
    if policy.max_retry_count < -2:
        yield Problem(f"{at}.maxRetryCount", f"{policy.max_retry_count} is less than -2, which means always")


def _name(at: str, name: str) -> Iterator[Problem]:
    if not _NAME.fullmatch(name):
        yield Problem(at, f"{name!r} must be 1 to 63 lower-case letters and digits, without dashes")


def _template(at: str, template: Any) -> Iterator[Problem]:
    """Check the parts of a pod template that we change ourselves; the API server validates the rest.

    That includes missing fields: the API server refuses a pod without containers, and that ends the attempt.
    """
    if template is None:
        return
    if not isinstance(template, dict):
        yield Problem(at, f"must be a pod template with spec.containers, not {_kind(template)}")
        return
    yield from _metadata(f"{at}.metadata", template.get("metadata"))
    spec = template.get("spec")
    if spec is None:
        return
    if not isinstance(spec, dict):
        yield Problem(f"{at}.spec", f"must be a mapping with containers, not {_kind(spec)}")
        return
    for field in ("initContainers", "containers"):
        yield from _containers(f"{at}.spec.{field}", spec.get(field))


def _metadata(at: str, metadata: Any) -> Iterator[Problem]:
    if metadata is None:
        return
    if not isinstance(metadata, dict):
        yield Problem(at, f"must be a mapping, not {_kind(metadata)}")
        return
    for field in ("labels", "annotations"):
        values = metadata.get(field)
        if values is not None and not isinstance(values, dict):
            yield Problem(f"{at}.{field}", f"must be a mapping, not {_kind(values)}")
    if not isinstance(metadata.get("ownerReferences") or [], list):
        yield Problem(f"{at}.ownerReferences", f"must be a list, not {_kind(metadata['ownerReferences'])}")


def _containers(at: str, containers: Any) -> Iterator[Problem]:
    if not isinstance(containers or [], list):
        yield Problem(at, f"must be a list, not {_kind(containers)}")
        return
    for position, container in enumerate(containers or ()):
        if not isinstance(container, dict):
            yield Problem(f"{at}[{position}]", f"must be a mapping, not {_kind(container)}")
        elif not isinstance(container.get("env") or [], list):
            yield Problem(f"{at}[{position}].env", f"must be a list, not {_kind(container['env'])}")


def _kind(value: Any) -> str:
    match value:
        case None:
            return "nothing"
        case str():
            return f"the text {value!r}" if len(value) <= 40 else "a text"
        case list():
            return "a list"
        case dict():
            return "a mapping"
        case _:
            return repr(value)
