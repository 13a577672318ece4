"""Find and show training jobs: `rcfarm job list | get | status`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, TypeVar

import typer
from rich.text import Text

from controllers.jobs.api import BadSpec, JobView
from controllers.jobs.status import BadStatus
from controllers.training.kind import TrainingJobs
from controllers.training.kinds import KINDS
from rcfarm.cli.kit.command import KubeCli
from rcfarm.cli.kit.completion import complete_job
from rcfarm.cli.kit.jobs import AllNamespaces, read_all, show_manifest
from rcfarm.cli.kit.output import ago, count, state
from rcfarm.operations.errors import BadInput
from rcfarm.reports.training import TrainingStatusInfo, replica_infos, training_info
from store.kube.api.errors import Forbidden, NotFound
from store.kube.api.objects import PODS, Object, is_controlled_by, key_of, name_of
from store.kube.api.protocol import KubeApi

_T = TypeVar("_T")

JobName = Annotated[
    str,
    typer.Argument(
        metavar="[KIND/]JOB", help="The job's name, after its kind if two have it.", autocompletion=complete_job
    ),
]


async def list_(cli: KubeCli, all_namespaces: AllNamespaces = False) -> None:
    """List the training jobs of all kinds. Frameworks have their own: `rcfarm framework list`."""
    namespace = "" if all_namespaces else cli.namespace
    kinds = await _served(cli.api)
    listed = await _of_kinds(kinds, lambda kind: read_all(cli.api, kind.resource, namespace))
    found = []
    for kind, jobs in zip(kinds, listed, strict=True):
        if isinstance(jobs, Forbidden):
            cli.out.note(f"{kind.resource.kind}s are not shown: {jobs}")
        else:
            found += [training_info(kind, job) for job in jobs]
    found.sort(key=lambda each: (each.namespace, each.name, each.kind))

    def render() -> None:
        if not found:
            where = "" if all_namespaces else f" in namespace {cli.namespace}"
            cli.out.note(f"no training jobs{where}; create one with `kubectl apply -f FILE`")
            return
        columns = ("NAMESPACE", "JOB", "KIND", "STATE", "REPLICAS>", "ACTIVE>", "DONE>", "FAILURES>", "AGE", "MESSAGE")
        rows = []
        for each in found:
            managed = f"managed by {each.managed_by}" if each.managed_by else ""
            problem = each.problems[0] if each.problems else ""
            row = (
                each.namespace,
                each.name,
                each.kind,
                state(each.state),
                str(each.replicas),
                str(each.active),
                str(each.succeeded),
                str(each.failures),
                ago(each.created.isoformat() if each.created else "").removesuffix(" ago"),
                cli.out.brief(managed or problem or each.message or "-"),
            )
            rows.append(row)
        first = 0 if all_namespaces else 1
        cli.out.table(columns[first:], [row[first:] for row in rows])

    cli.out.show(found, render)


async def _served(api: KubeApi) -> list[TrainingJobs]:
    """Return the kinds that the cluster serves, without running them. Raises `BadInput` if there is none."""
    served = await asyncio.gather(*(api.served(kind.resource) for kind in KINDS))
    kinds = [kind(api) for kind, is_served in zip(KINDS, served, strict=True) if is_served]
    if not kinds:
        raise BadInput(
            f"this cluster has no CRD for {' or '.join(f'{kind.resource.kind}s' for kind in KINDS)}: apply "
            "deploy/kubernetes/training; or choose another cluster with --context"
        )
    return kinds


async def _of_kinds(
    kinds: Sequence[TrainingJobs], read: Callable[[TrainingJobs], Awaitable[_T]]
) -> list[_T | Forbidden]:
    """Read something of every kind. A user may have rights for some kinds only. Raises `Forbidden` if for none."""

    async def tried(kind: TrainingJobs) -> _T | Forbidden:
        try:
            return await read(kind)
        except Forbidden as error:
            return error

    answers = await asyncio.gather(*map(tried, kinds))
    refusals = [answer for answer in answers if isinstance(answer, Forbidden)]
    if len(refusals) == len(kinds):
        raise refusals[0]
    return answers


async def find(cli: KubeCli, job: str) -> tuple[TrainingJobs, Object]:
    """Return the job with its kind. `job`: `NAME` or `KIND/NAME`. Raises `BadInput`."""
    word, slash, name = job.rpartition("/")
    kinds = await _served(cli.api)
    if slash:
        names = {form.lower(): kind for kind in kinds for form in (kind.resource.kind, kind.resource.plural)}
        if word.lower() not in names:
            known = ", ".join(kind.resource.kind.lower() for kind in kinds)
            raise BadInput(f"{job}: {word!r} is no kind of training job in this cluster; it has {known}")
        kinds = [names[word.lower()]]

    async def read(kind: TrainingJobs) -> Object | None:
        try:
            return await cli.api.get(kind.resource, name, cli.namespace)
        except NotFound:
            return None

    answers = await _of_kinds(kinds, read)
    found = [
        (kind, answer) for kind, answer in zip(kinds, answers, strict=True) if not isinstance(answer, Forbidden | None)
    ]
    if not found:
        if refusal := next((answer for answer in answers if isinstance(answer, Forbidden)), None):
            raise refusal
        where = f"{kinds[0].resource.kind} {name}" if slash else f"training job {name}"
        raise BadInput(f"no {where} in namespace {cli.namespace}; `rcfarm job list -A` shows them all")
    if len(found) > 1:
        options = " or ".join(f"{kind.resource.kind.lower()}/{name}" for kind, _ in found)
        raise BadInput(f"several jobs have the name {name}: write {options}")
    return found[0]


def view_of(kind: TrainingJobs, job: Object) -> JobView:
    """Return the job as its operator sees it. Raises `BadInput`, which names it."""
    try:
        return kind.view(job)
    except (BadSpec, BadStatus) as error:
        raise BadInput(f"{title(kind, job)}: {error}; correct it and apply it again") from error


def title(kind: TrainingJobs, job: Object) -> str:
    """Return the job's name in messages."""
    return f"{kind.resource.kind} {key_of(job)}"


async def pods_of(cli: KubeCli, kind: TrainingJobs, job: Object) -> list[Object]:
    """Return the pods that the job controls."""
    pods = await read_all(cli.api, PODS, cli.namespace, label_selector=selector_of(kind, job))
    return [pod for pod in pods if is_controlled_by(pod, job)]


def selector_of(kind: TrainingJobs, job: Object) -> str:
    """Return the label selector of the job's objects."""
    return ",".join(f"{key}={value}" for key, value in kind.jobs.gen_labels(name_of(job)).items())


async def get(cli: KubeCli, job: JobName) -> None:
    """Show a job's spec, as a file for `kubectl apply`."""
    kind, found = await find(cli, job)
    show_manifest(cli, kind.resource, found)


async def status(cli: KubeCli, job: JobName) -> None:
    """Show the status of a job and of each of its replicas."""
    kind, obj = await find(cli, job)
    view = view_of(kind, obj)
    replicas = replica_infos(view, await pods_of(cli, kind, obj))
    found = TrainingStatusInfo(job=training_info(kind, obj), replicas=replicas)

    def render() -> None:
        info = found.job
        counts = f"  {count(info.replicas, 'replica')}, {info.active} active, {info.succeeded} succeeded"
        failures = f", {count(info.failures, 'failure')}" if info.failures else ""
        cli.out.line(Text.assemble(f"{title(kind, obj)}  ", state(info.state), counts, failures))
        began = f"started {ago(info.started.isoformat())}" if info.started else "not started"
        ended = f", ended {ago(info.completed_at.isoformat())}" if info.completed_at else ""
        cli.out.line(began + ended)
        if info.managed_by:
            cli.out.line(f"managed by {info.managed_by}, not by this operator")
        if info.message:
            cli.out.hanging("message: ", info.message)
        if found.replicas:
            cli.out.line()
            columns = ("REPLICA", "STATE", "NODE", "ADDRESS", "CODE>", "RESTARTS>", "FAILURES>", "DISRUPTIONS>")
            rows = [
                (
                    each.replica,
                    state(each.state),
                    each.node or "-",
                    each.address or "-",
                    "-" if each.code is None else str(each.code),
                    str(each.restarts),
                    str(each.failures),
                    str(each.disruptions),
                )
                for each in found.replicas
            ]
            cli.out.table(columns, rows)

    cli.out.show(found, render)
