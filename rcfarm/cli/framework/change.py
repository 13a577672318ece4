"""Change Frameworks: `rcfarm framework start | scale | stop | delete`. All follow the change until it is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from controllers.framework.api.types import (
    EXECUTION_CREATE,
    EXECUTION_START,
    EXECUTION_STOP,
    FRAMEWORKS,
    MAX_TASK_NUMBER,
    Framework,
    State,
)
from rcfarm.cli.framework.show import FrameworkName, decoded, decoded_from, is_completed, read
from rcfarm.cli.kit.command import KubeCli
from rcfarm.cli.kit.jobs import delete_object, follow, found_or_deleted
from rcfarm.cli.kit.options import DEFAULT_TIMEOUT, Detach, Timeout, Yes, confirm, parse_pairs
from rcfarm.operations.errors import BadInput
from rcfarm.reports.framework import FrameworkInfo, framework_info
from store.kube.api.errors import Invalid
from store.kube.api.objects import Object

Roles = Annotated[list[str], typer.Argument(metavar="ROLE=N...", help="The number of tasks of each role.")]
_POLICY = "frameworkAttemptCompletionPolicy"
MinFailed = Annotated[
    list[str] | None,
    typer.Option("--min-failed", metavar="ROLE=N", help="Also set how many failed tasks of a role fail the attempt."),
]


async def start(
    cli: KubeCli, framework: FrameworkName, detach: Detach = False, timeout: Timeout = DEFAULT_TIMEOUT
) -> int:
    """Start a Framework that was created with executionType Create."""
    found = await decoded(cli, framework)
    if is_completed(found) or found.spec.execution_type == EXECUTION_STOP:
        raise BadInput(f"framework {framework} is stopped or has completed; create it again under a new name")
    if found.spec.execution_type == EXECUTION_CREATE:
        await cli.api.patch(FRAMEWORKS, framework, cli.namespace, {"spec": {"executionType": EXECUTION_START}})
    if detach:
        cli.out.line(f"{framework}: start requested")
        return 0

    def has_attempt(found: Framework) -> bool:
        waiting = (State.CREATION_PENDING, State.CREATION_REQUESTED)
        return found.status is not None and found.status.state not in waiting

    return await _follow(cli, framework, has_attempt, "started", timeout)


async def stop(
    cli: KubeCli,
    framework: FrameworkName,
    yes: Yes = False,
    detach: Detach = False,
    timeout: Timeout = DEFAULT_TIMEOUT,
) -> int:
    """Stop a Framework permanently. Its pods are deleted, and it completes with -210."""
    found = await decoded(cli, framework)
    if is_completed(found):
        info = framework_info(found)
        cli.out.show(info, lambda: cli.out.line(f"{framework} has completed already: {info.phrase} ({info.code})"))
        return 0
    confirm(f"Stop framework {framework} in namespace {cli.namespace} permanently?", yes=yes)
    await cli.api.patch(FRAMEWORKS, framework, cli.namespace, {"spec": {"executionType": EXECUTION_STOP}})
    if detach:
        cli.out.line(f"{framework}: stop requested")
        return 0
    return await _follow(cli, framework, is_completed, "stopped", timeout)


async def delete(
    cli: KubeCli,
    framework: FrameworkName,
    yes: Yes = False,
    detach: Detach = False,
    timeout: Timeout = DEFAULT_TIMEOUT,
) -> int:
    """Delete a Framework with its pods. Of its history, only the Events stay, for about an hour."""
    obj = await read(cli, framework)
    confirm(f"Delete framework {framework} in namespace {cli.namespace} with its pods?", yes=yes)
    return await delete_object(
        cli,
        FRAMEWORKS,
        obj,
        called=framework,
        title=f"framework {framework}",
        explain=f"rcfarm framework explain {framework} -n {cli.namespace}",
        detach=detach,
        timeout=timeout,
    )


async def scale(
    cli: KubeCli,
    framework: FrameworkName,
    roles: Roles,
    min_failed: MinFailed = None,
    detach: Detach = False,
    timeout: Timeout = DEFAULT_TIMEOUT,
) -> int:
    """Change the number of tasks of roles, in one update. Tasks with the highest index are removed first."""
    wanted, policies = _numbers("", roles, 0), _numbers("--min-failed ", min_failed or (), -1)
    obj = await read(cli, framework)
    if is_completed(decoded_from(obj)):
        raise BadInput(f"framework {framework} has completed; its tasks can no longer be changed")
    patch = _rescaling(framework, obj, wanted, policies)
    try:
        await cli.api.patch(FRAMEWORKS, framework, cli.namespace, patch, patch_type="json")
    except Invalid as error:
        raise BadInput(
            f"the API server refused to scale framework {framework}: {error}; if its roles were changed at the same "
            "time, try again"
        ) from error
    if detach:
        requested = ", ".join(f"{role}={tasks}" for role, tasks in wanted.items())
        cli.out.line(f"{framework}: scaling requested: {requested}")
        return 0

    def is_scaled(found: Framework) -> bool:
        """Return whether each role has its tasks and each task a pod. A completed Framework is not scaled any more and
        counts as done."""
        if found.status is None:
            return False
        tasks = {role.name: role.tasks for role in found.status.roles}
        return is_completed(found) or all(
            len(tasks.get(role, ())) == number
            and not any(task.deletion_pending or task.attempt_status.pod_uid is None for task in tasks.get(role, ()))
            for role, number in wanted.items()
        )

    return await _follow(cli, framework, is_scaled, "scaled", timeout)


def _numbers(option: str, items: Sequence[str], least: int) -> dict[str, int]:
    numbers = {}
    for role, text in parse_pairs(option.strip() or "ROLE=N", items, form="ROLE=N").items():
        try:
            numbers[role] = int(text)
        except ValueError:
            raise BadInput(f"{option}{role}={text}: {text!r} is not a whole number") from None
        if not least <= numbers[role] <= MAX_TASK_NUMBER:
            raise BadInput(f"{option}{role}={text}: must be within {least} to {MAX_TASK_NUMBER}")
    return numbers


def _rescaling(name: str, obj: Object, wanted: Mapping[str, int], policies: Mapping[str, int]) -> list[Any]:
    """Return a JSON patch that tests the positions of the roles instead of the resource version, which the operator's
    own writes raise all the time."""
    roles = obj["spec"].get("taskRoles") or []
    positions = {role.get("name"): position for position, role in enumerate(roles)}
    patch: list[Any] = []
    for role in dict.fromkeys((*wanted, *policies)):
        if role not in positions:
            raise BadInput(f"framework {name} has no task role {role}; it has {', '.join(map(str, positions))}")
        patch.append({"op": "test", "path": f"{_path(positions[role])}/name", "value": role})
    for role, number in wanted.items():
        patch.append({"op": "add", "path": f"{_path(positions[role])}/taskNumber", "value": number})
    for role, number in policies.items():
        path, policy = f"{_path(positions[role])}/{_POLICY}", roles[positions[role]].get(_POLICY)
        if policy is not None:
            patch.append({"op": "test", "path": path, "value": policy})
        patch.append({"op": "add", "path": path, "value": {**(policy or {}), "minFailedTaskCount": number}})
    return patch


def _path(position: int) -> str:
    return f"/spec/taskRoles/{position}"


async def _follow(cli: KubeCli, name: str, is_done: Callable[[Framework], bool], word: str, timeout: float) -> int:
    """Watch until the change is done. Return the exit code: 2 at the time limit."""
    info: FrameworkInfo | None = None

    def progress(obj: Object | None) -> str | None:
        nonlocal info
        found = decoded_from(found_or_deleted(f"framework {name}", obj))
        info = framework_info(found)
        counts = f"{info.running} of {info.tasks} running, {info.completed} completed"
        return None if is_done(found) else f"{info.state}, {counts}"

    explain = f"rcfarm framework explain {name} -n {cli.namespace}"
    code = await follow(cli, FRAMEWORKS, name, progress, title=name, word=word, explain=explain, timeout=timeout)
    if code == 0 and info is not None:
        phrase = f"{name} is {word}: {info.state}"
        cli.out.show(info, lambda: cli.out.line(phrase))
    return code
