"""Show what a Framework's tasks print: `rcfarm framework logs`."""

from __future__ import annotations

from typing import Annotated

import typer

from controllers.framework.api.types import FRAMEWORKS
from rcfarm.cli.framework.show import FrameworkName, decoded_from, is_completed, read
from rcfarm.cli.kit.command import KubeCli
from rcfarm.cli.kit.container_logs import Container, ContainerName, Follow, Previous, Tail, choice, show_logs
from rcfarm.cli.kit.options import Since
from rcfarm.operations.errors import BadInput

Tasks = Annotated[
    list[str] | None,
    typer.Option("--task", "-t", metavar="ROLE-INDEX", help="Only this task (worker-0); may be repeated."),
]


async def logs(
    cli: KubeCli,
    framework: FrameworkName,
    task: Tasks = None,
    container: ContainerName = "",
    follow: Follow = False,
    previous: Previous = False,
    tail: Tail = None,
    since: Since = "",
) -> int:
    """Show what the tasks print. If there are several, each line begins with its task."""
    wanted = choice(cli, follow, previous, tail, since)
    obj = await read(cli, framework)
    found = decoded_from(obj)
    pods = {
        f"{role.name}-{each.index}": each.attempt_status.pod_name
        for role in (found.status.roles if found.status else ())
        for each in role.tasks
    }
    for name in task or ():
        if name not in pods:
            raise BadInput(f"framework {framework} has no task {name}; it has {', '.join(pods) or 'none yet'}")
    if not pods:
        raise BadInput(
            f"framework {framework} has no tasks yet; see `rcfarm framework explain {framework} -n {cli.namespace}`"
        )
    containers = []
    for name in dict.fromkeys(task or pods):
        role = found.spec.role(name.rpartition("-")[0])  # none if it left the spec
        template = (role.task.pod if role else None) or {}
        first = ((template.get("spec") or {}).get("containers") or [{}])[0]
        chosen = container or str(first.get("name") or "")
        containers.append(Container(cli, name, pods[name], chosen, *wanted[1:]))
    return await show_logs(
        cli, containers, FRAMEWORKS, obj, lambda now: is_completed(decoded_from(now)), follow=wanted.follow
    )
