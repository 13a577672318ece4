"""Reading one Framework from a raw object, and writing its status back.

Each Framework is decoded on its own: one that can't be read has `problems`, or raises `BadFramework`, which name the
field, and concerns nobody else.
"""

from __future__ import annotations

from typing import Any

import msgspec

from controllers.framework.compression import compress, decompress
from controllers.framework.constants import EXECUTION_CREATE, EXECUTION_STOP, LARGE_STATUS
from controllers.framework.decoding import explain, without_nulls
from controllers.framework.types import Framework, FrameworkSpec, FrameworkStatus, Problem
from controllers.framework.validation import problems_of
from store.decoding import Undecodable, converted
from store.kube.objects import MalformedObject, Object, is_deleting, name_of, namespace_of, resource_version_of, uid_of

_TEMPLATE = ("pod",)  # pod templates are kept as they were written


class BadFramework(ValueError):
    """A Framework that can't be read. `field`: the path of what is wrong."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message

    @property
    def problem(self) -> Problem:
        return Problem(self.field, self.message)


def decode_framework(obj: Object, *, status: FrameworkStatus | None = None) -> Framework:
    """The Framework of a raw object, validated (`Framework.problems`).

    A spec that can't be read is a problem like others: what is running goes on, and it can still be stopped.
    `status`: what we last meant the status to be; it is taken instead of the stored one, which may be older or may
    have been overwritten by somebody else. Raises `BadFramework` for a status that can't be read.
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
    """Raises `BadFramework`. A field that is null counts as left out, as it does for frameworkcontroller."""
    try:
        return converted(without_nulls(raw or {}, _TEMPLATE), FrameworkSpec)
    except Undecodable as error:
        raise _explained("spec", error) from error


def _what_can_be_read(raw: Any) -> FrameworkSpec:
    """Of a spec that is wrong elsewhere: whether it is to stop."""
    execution_type = raw.get("executionType") if isinstance(raw, dict) else None
    return FrameworkSpec(execution_type=EXECUTION_STOP if execution_type == EXECUTION_STOP else EXECUTION_CREATE)


def decode_status(raw: Any) -> FrameworkStatus | None:
    """The status, its roles decompressed; None for one that was never written. Raises `BadFramework`."""
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
    """The status as it goes on the wire; with `compress_large`, roles of `LARGE_STATUS` bytes or more are gzipped."""
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
    """A JSON patch that writes the status whole, if the object still has the UID and the resource version.

    Not a merge patch: that would take the explicit nulls as deletions, and would leave parts of an earlier attempt's
    outcome in a later one's.
    """
    patch: list[Object] = [{"op": "test", "path": "/metadata/uid", "value": framework.uid}]
    if framework.resource_version:
        patch.append({"op": "test", "path": "/metadata/resourceVersion", "value": framework.resource_version})
    return [*patch, {"op": "add", "path": "/status", "value": wire}]


def _explained(root: str, error: Undecodable) -> BadFramework:
    path, what, _ = explain(error)
    return BadFramework(f"{root}.{path}" if path else root, what)
