"""Decodes a Framework from a raw object, validates its spec, encodes its status; and the CustomResourceDefinition.

Each Framework is decoded on its own: an invalid one has `problems`, or raises `BadFramework`, which name the field, and
does not affect the others. The custom resource's schema refuses most of these errors, but it may be an older one or
none, and it does not cover pod templates. A Framework with problems is left alone: its pods stay, nothing new is
created, and it can still be stopped.

Of the definition there are two modes. Compatible mode is frameworkcontroller's, with descriptions for `kubectl
explain`: the status is part of the main resource, which its own programs write by PUT. Native mode uses newer features
of the API: a status subresource (users can't overwrite the status, a status write never touches the spec), columns for
`kubectl get`, short names. A running frameworkcontroller rewrites the definition at its start and can't write to a
status subresource, so the two modes exclude each other.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from controllers.framework.api.types import (
    EXECUTION_CREATE,
    EXECUTION_STOP,
    FRAMEWORKS,
    LARGE_STATUS,
    MAX_TASK_NUMBER,
    Framework,
    FrameworkSpec,
    FrameworkStatus,
    Problem,
    RetryPolicy,
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

NAME_PATTERN = "^[a-z0-9]{1,63}$"  # no dashes: the names of pods split at them


class BadFramework(RcfarmError, ValueError):
    """A Framework that can't be decoded. `field`: the path of the invalid field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


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
        problems = tuple(problems_of(name_of(obj), spec))
    except BadFramework as error:
        raw = obj.get("spec")  # only whether to stop is read of it
        stops = isinstance(raw, dict) and raw.get("executionType") == EXECUTION_STOP
        spec = FrameworkSpec(execution_type=EXECUTION_STOP if stops else EXECUTION_CREATE)
        problems = (Problem(error.field, error.message),)
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


def problems_of(name: str, spec: FrameworkSpec) -> Iterator[Problem]:
    """Yield all problems of the spec of the Framework `name`, in the order of its fields."""
    yield from _name("metadata.name", name)
    yield from _retry_policy("spec.retryPolicy", spec.retry_policy)
    first: dict[str, int] = {}
    for position, role in enumerate(spec.task_roles):
        at = f"spec.taskRoles[{position}]"
        yield from _name(f"{at}.name", role.name)
        if first.setdefault(role.name, position) != position:
            yield Problem(f"{at}.name", f"{role.name!r} is also the name of taskRoles[{first[role.name]}]; rename one")
        if not 0 <= role.task_number <= MAX_TASK_NUMBER:
            yield Problem(f"{at}.taskNumber", f"{role.task_number} is not within 0 to {MAX_TASK_NUMBER}")
        if (policy := role.framework_attempt_completion_policy) is not None:
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
    if not re.fullmatch(NAME_PATTERN, name):
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
    metadata, spec = template.get("metadata"), template.get("spec")
    if metadata is not None and not isinstance(metadata, dict):
        yield Problem(f"{at}.metadata", f"must be a mapping, not {_kind(metadata)}")
    elif metadata is not None:
        for field in ("labels", "annotations"):
            values = metadata.get(field)
            if values is not None and not isinstance(values, dict):
                yield Problem(f"{at}.metadata.{field}", f"must be a mapping, not {_kind(values)}")
        owners = metadata.get("ownerReferences")
        if not isinstance(owners or [], list):
            yield Problem(f"{at}.metadata.ownerReferences", f"must be a list, not {_kind(owners)}")
    if spec is not None and not isinstance(spec, dict):
        yield Problem(f"{at}.spec", f"must be a mapping with containers, not {_kind(spec)}")
    elif spec is not None:
        for field in ("initContainers", "containers"):
            containers = spec.get(field) or []
            if not isinstance(containers, list):
                yield Problem(f"{at}.spec.{field}", f"must be a list, not {_kind(containers)}")
                continue
            for position, container in enumerate(containers):
                where = f"{at}.spec.{field}[{position}]"
                if not isinstance(container, dict):
                    yield Problem(where, f"must be a mapping, not {_kind(container)}")
                elif not isinstance(container.get("env") or [], list):
                    yield Problem(f"{where}.env", f"must be a list, not {_kind(container['env'])}")


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


CRD_NAME = f"{FRAMEWORKS.plural}.{FRAMEWORKS.group}"

Mode = Literal["compatible", "native"]

_COMPLETION_POLICY: Object = {
    "type": "object",
    "description": "When tasks of this role complete the attempt of the whole Framework.",
    "properties": {
        "minFailedTaskCount": {
            "type": "integer",
            "minimum": -1,
            "description": "The attempt fails when this many tasks of the role have failed. Below 1: never.",
        },
        "minSucceededTaskCount": {
            "type": "integer",
            "minimum": -1,
            "description": "The attempt succeeds when this many tasks of the role have succeeded. Below 1: never.",
        },
    },
}
_ANY_OBJECT: Object = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def crd(mode: Mode = "compatible") -> Object:
    """Return the definition to create. Source: frameworkcontroller's CRD, `frameworkcontroller.microsoft.com/v1`."""
    spec: Object = {
        "type": "object",
        "description": "What is to run: roles of equal tasks, and when the whole is retried.",
        "properties": {
            "description": {"type": "string", "nullable": True, "description": "For people; nothing reads it."},
            "executionType": {
                "type": "string",
                "enum": ["Create", "Start", "Stop"],
                "description": "Create: wait for Start. Start: run. Stop: end everything, and never start again.",
            },
            "retryPolicy": _retry_schema("the whole Framework"),
            "taskRoles": {
                "type": "array",
                "description": "Groups of equal tasks. Roles may be added, removed and rescaled while they run.",
                "items": _role_schema(mode),
            },
        },
    }
    version: Object = {
        "name": FRAMEWORKS.version,
        "served": True,
        "storage": True,
        "schema": {
            "openAPIV3Schema": {
                "type": "object",
                "description": "A gang of tasks that runs, is retried and completes as a whole.",
                "properties": {
                    "metadata": {"type": "object", "properties": {"name": {"type": "string", "pattern": NAME_PATTERN}}},
                    "spec": spec,
                    "status": {**_ANY_OBJECT, "nullable": True, "description": "Written by the operator alone."},
                },
            }
        },
    }
    names: Object = {
        "plural": FRAMEWORKS.plural,
        "singular": "framework",
        "kind": FRAMEWORKS.kind,
        "listKind": f"{FRAMEWORKS.kind}List",
    }
    if mode == "native":
        spec["required"] = ["executionType", "taskRoles"]
        version |= {"subresources": {"status": {}}, "additionalPrinterColumns": _COLUMNS}
        names |= {"shortNames": ["fw"], "categories": ["all"]}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": CRD_NAME},
        "spec": {"group": FRAMEWORKS.group, "names": names, "scope": "Namespaced", "versions": [version]},
    }


def _retry_schema(what: str) -> Object:
    return {
        "type": "object",
        "description": f"Whether an attempt of {what} that has ended is followed by another one.",
        "properties": {
            "fancyRetryPolicy": {
                "type": "boolean",
                "description": "Retry transient failures beyond maxRetryCount, with a delay after conflicts, and "
                "permanent failures never.",
            },
            "maxRetryCount": {
                "type": "integer",
                "minimum": -2,
                "description": "How many failures are retried. -1: all failures; -2: successes, too.",
            },
        },
    }


def _role_schema(mode: Mode) -> Object:
    grace: Object = {
        "type": "integer",
        "nullable": True,
        "description": "Seconds after which a pod that is being deleted is deleted by force. Null: never, so that no "
        "two pods of a task ever run at the same time.",
    }
    task: Object = {
        "type": "object",
        "description": "What each task of the role runs.",
        "properties": {
            "retryPolicy": _retry_schema("a task"),
            "podGracefulDeletionTimeoutSec": grace,
            "pod": {
                **_ANY_OBJECT,
                "description": "A pod template (metadata and spec), as in a Deployment. Placeholders such as "
                "{{FC_TASK_INDEX}} are filled in.",
            },
        },
    }
    role: Object = {
        "type": "object",
        "properties": {
            "name": {
                "type": "string",
                "pattern": NAME_PATTERN,
                "description": "Unique within the Framework. Pods are named FRAMEWORK-ROLE-INDEX.",
            },
            "taskNumber": {
                "type": "integer",
                "minimum": 0,
                "maximum": MAX_TASK_NUMBER,
                "description": "How many tasks; each is one pod at a time.",
            },
            "frameworkAttemptCompletionPolicy": _COMPLETION_POLICY,
            "task": task,
        },
    }
    if mode == "native":
        grace["minimum"] = 0
        task["required"] = ["pod"]
        role["required"] = ["name", "taskNumber", "task"]
    return role


def _column(name: str, path: str, kind: str = "string", **more: Any) -> Object:
    return {"name": name, "type": kind, "jsonPath": path, **more}


_COLUMNS = [
    _column("Execution", ".spec.executionType"),
    _column("State", ".status.state"),
    _column("Attempt", ".status.attemptStatus.id", "integer"),
    _column("Code", ".status.attemptStatus.completionStatus.code", "integer"),
    _column("Phrase", ".status.attemptStatus.completionStatus.phrase"),
    _column("Retries", ".status.retryPolicyStatus.totalRetriedCount", "integer", priority=1),
    _column("Age", ".metadata.creationTimestamp", "date"),
]
