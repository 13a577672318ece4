"""Show what a training job's replicas print: `rcfarm job logs`."""

from __future__ import annotations

from typing import Annotated

import typer

from controllers.jobs.api import gen_general_name
from controllers.jobs.replicas import slots_of
from controllers.jobs.status import decode_status
from rcfarm.cli.job.show import JobName, find, pods_of, title, view_of
from rcfarm.cli.kit.command import KubeCli
from rcfarm.cli.kit.container_logs import Container, ContainerName, Follow, Previous, Tail, choice, show_logs
from rcfarm.cli.kit.options import Since
from rcfarm.operations.errors import BadInput
from rcfarm.reports.training import replica_name
from store.kube.api.objects import name_of

Replicas = Annotated[
    list[str] | None,
    typer.Option("--replica", "-r", metavar="TYPE-INDEX", help="Only this replica (worker-0); may be repeated."),
]


async def logs(
    cli: KubeCli,
    job: JobName,
    replica: Replicas = None,
    container: ContainerName = "",
    follow: Follow = False,
    previous: Previous = False,
    tail: Tail = None,
    since: Since = "",
) -> int:
    """Show what the replicas print. If there are several, each line begins with its replica."""
    wanted = choice(cli, follow, previous, tail, since)
    kind, obj = await find(cli, job)
    view = view_of(kind, obj)
    slots = {replica_name(slot): slot for slot in slots_of(view, await pods_of(cli, kind, obj))}
    if unknown := [name for name in replica or () if name.lower() not in slots]:
        raise BadInput(f"{title(kind, obj)} has no replica {unknown[0]}; it has {', '.join(slots) or 'none'}")
    if not slots:
        raise BadInput(f"{title(kind, obj)} has no replicas")
    containers = []
    for name in dict.fromkeys(replica or slots):
        slot = slots[name.lower()]
        pod = name_of(slot.pod) if slot.pod is not None else gen_general_name(view.name, slot.type, slot.index)
        containers.append(Container(cli, replica_name(slot), pod, container or view.default_container, *wanted[1:]))
    return await show_logs(
        cli,
        containers,
        kind.resource,
        obj,
        lambda found: decode_status(found.get("status")).finished,
        follow=wanted.follow,
    )
