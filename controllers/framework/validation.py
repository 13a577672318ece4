"""What makes a Framework's spec unusable, although each of its fields could be read.

The custom resource's schema refuses most of this on the way in, but it may be an older one or none, and it does not
look into pod templates. A Framework with problems is not touched: its pods stay, nothing new is created, and it can
still be stopped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from controllers.framework.constants import MAX_TASK_NUMBER
from controllers.framework.types import FrameworkSpec, Problem, RetryPolicy, TaskRoleSpec

_NAME = re.compile(r"[a-z0-9]{1,63}")


def problems_of(name: str, spec: FrameworkSpec) -> tuple[Problem, ...]:
    """All problems of the spec of the Framework `name`, in the order of its fields."""
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
    """What we ourselves need of a pod template; the rest of it is the API server's to judge.

    That includes what is missing: without containers the API server refuses the pod, and that ends the attempt.
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
