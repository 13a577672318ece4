"""Change training jobs: `rcfarm job suspend | resume | scale | delete`. All follow the change until it is done."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Annotated

import typer

from controllers.jobs.api import BadSpec
from controllers.jobs.status import JobStatus, ReplicaStatus, decode_status
from controllers.training.kind import TrainingJobs
from controllers.training.spec import MAX_REPLICAS
from rcfarm.cli.job.show import JobName, find, title, view_of
from rcfarm.cli.kit.command import KubeCli
from rcfarm.cli.kit.jobs import delete_object, follow, found_or_deleted
from rcfarm.cli.kit.options import DEFAULT_TIMEOUT, Detach, Timeout, Yes, confirm, parse_pairs
from rcfarm.operations.errors import BadInput
from rcfarm.reports.training import state_of, training_info
from store.kube.api.errors import Invalid
from store.kube.api.objects import Object, name_of

Types = Annotated[list[str], typer.Argument(metavar="TYPE=N...", help="The number of replicas of each type.")]


async def suspend(cli: KubeCli, job: JobName, detach: Detach = False, timeout: Timeout = DEFAULT_TIMEOUT) -> int:
    """Stop a job's pods until it is resumed. It starts again then; its counts of failures stay."""

    def is_done(status: JobStatus) -> bool:
        return status.has("Suspended") and not any(each.active for each in status.replica_statuses.values())

    return await _set_suspend(cli, job, True, is_done, "suspended", detach, timeout)


async def resume(cli: KubeCli, job: JobName, detach: Detach = False, timeout: Timeout = DEFAULT_TIMEOUT) -> int:
    """Continue a suspended job, and wait until it runs."""
    return await _set_suspend(cli, job, False, lambda status: status.has("Running"), "running", detach, timeout)


async def _set_suspend(
    cli: KubeCli,
    job: str,
    value: bool,
    is_done: Callable[[JobStatus], bool],
    word: str,
    detach: bool,
    timeout: float,
) -> int:
    kind, obj = await _changeable(cli, job)
    policy = (obj.get("spec") or {}).get("runPolicy") or {}
    if bool(policy.get("suspend")) != value:
        await cli.api.patch(kind.resource, name_of(obj), cli.namespace, {"spec": {"runPolicy": {"suspend": value}}})
    if detach:
        cli.out.line(f"{title(kind, obj)}: {'suspend' if value else 'resume'} requested")
        return 0
    return await _follow(cli, kind, obj, is_done, word, timeout)


async def scale(
    cli: KubeCli, job: JobName, types: Types, detach: Detach = False, timeout: Timeout = DEFAULT_TIMEOUT
) -> int:
    """Change the number of replicas, in one update. The highest indexes are removed first. Pods that run keep the
    numbers they were started with, so only an elastic job makes use of it, or one that restarts as a whole."""
    kind, obj = await _changeable(cli, job)
    field, view = kind.replica_specs_field, view_of(kind, obj)
    specs = obj["spec"][field]
    spelled = {name.lower(): name for name in specs}
    wanted = {}
    for name, text in parse_pairs("TYPE=N", types, form="TYPE=N").items():
        if name.lower() not in spelled:
            raise BadInput(f"{title(kind, obj)} has no replicas of type {name}; it has {', '.join(specs)}")
        if not (text.isascii() and text.isdigit()) or int(text) > MAX_REPLICAS:
            raise BadInput(f"{name}={text}: {text!r} is not a whole number within 0 to {MAX_REPLICAS}")
        wanted[spelled[name.lower()]] = int(text)
    changed = copy.deepcopy(obj)
    for name, number in wanted.items():
        changed["spec"][field][name]["replicas"] = number
    try:
        after = kind.view(changed)
    except BadSpec as error:
        raise BadInput(f"{title(kind, obj)} can't be scaled so: {error}") from error
    patch = {"spec": {field: {name: {"replicas": number} for name, number in wanted.items()}}}
    try:
        await cli.api.patch(kind.resource, name_of(obj), cli.namespace, patch)
    except Invalid as error:
        raise BadInput(f"the API server refused to scale {title(kind, obj)}: {error}") from error
    if after.fixed_size and after.replica_specs != view.replica_specs and view.status.start_time is not None:
        outcome = (
            "all pods are restarted" if after.restart_whole else "pods that run keep the numbers they started with"
        )
        cli.out.note(f"{title(kind, obj)} is not elastic: {outcome}")
    read = {name.lower(): name for name in after.replica_specs}  # as the operator spells it
    numbers = ", ".join(f"{name}={number}" for name, number in wanted.items())
    if detach or after.run_policy.suspend:
        cli.out.line(f"{title(kind, obj)}: scale requested: {numbers}")
        return 0

    def is_done(status: JobStatus) -> bool:
        found = {name: status.replica_statuses.get(read[name.lower()], ReplicaStatus()) for name in wanted}
        ended = {name: sum(index < wanted[name] for index in each.completed) for name, each in found.items()}
        return all(found[name].active + ended[name] == number for name, number in wanted.items())

    return await _follow(cli, kind, obj, is_done, f"scaled to {numbers}", timeout)


async def delete(
    cli: KubeCli, job: JobName, yes: Yes = False, detach: Detach = False, timeout: Timeout = DEFAULT_TIMEOUT
) -> int:
    """Delete a job. Kubernetes deletes its pods and services with it."""
    kind, obj = await find(cli, job)
    confirm(f"Delete {title(kind, obj)} with its pods?", yes=yes)
    name = title(kind, obj)
    return await delete_object(
        cli,
        kind.resource,
        obj,
        called=name,
        title=name,
        explain=_explain(cli, kind, obj),
        detach=detach,
        timeout=timeout,
    )


async def _changeable(cli: KubeCli, job: str) -> tuple[TrainingJobs, Object]:
    """Return a job that still may be changed. Raises `BadInput`."""
    kind, obj = await find(cli, job)
    info = training_info(kind, obj)
    if info.state in ("Succeeded", "Failed"):
        raise BadInput(f"{title(kind, obj)} has ended ({info.state}) and stays as it is; delete it and apply it again")
    if info.managed_by:
        raise BadInput(f"{title(kind, obj)} is managed by {info.managed_by}; change it there")
    return kind, obj


async def _follow(
    cli: KubeCli, kind: TrainingJobs, job: Object, is_done: Callable[[JobStatus], bool], word: str, timeout: float
) -> int:
    """Watch until the change is done or the job has ended. Return the exit code: 2 at the time limit."""
    latest = job

    def progress(obj: Object | None) -> str | None:
        nonlocal latest
        latest = found_or_deleted(title(kind, job), obj)
        status = decode_status(latest.get("status"))
        if status.finished or is_done(status):
            return None
        info = training_info(kind, latest)
        return f"{state_of(status)}, {info.active} of {info.replicas} active"

    code = await follow(
        cli,
        kind.resource,
        name_of(job),
        progress,
        title=title(kind, job),
        word=word,
        explain=_explain(cli, kind, job),
        timeout=timeout,
    )
    if code == 0:
        info = training_info(kind, latest)
        counts = f"{info.active} of {info.replicas} active"
        cli.out.show(info, lambda: cli.out.line(f"{title(kind, job)} is {info.state}, {counts}"))
    return code


def _explain(cli: KubeCli, kind: TrainingJobs, job: Object) -> str:
    return f"rcfarm job explain {kind.resource.kind.lower()}/{name_of(job)} -n {cli.namespace}"
