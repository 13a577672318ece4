"""Restore a deleted RC: `rcfarm rc restore`."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from rcfarm.cli.kit.command import Cli
from rcfarm.cli.kit.completion import complete_deleted
from rcfarm.cli.kit.options import DEFAULT_TIMEOUT, DEFAULT_WAIT_HEALTHY, Detach, Timeout, UsageProblem, WaitHealthy
from rcfarm.cli.kit.output import ago, ahead
from rcfarm.cli.rc.change import ended, follow
from rcfarm.operations.restore import deleted_rcs
from rcfarm.operations.restore import restore as restored


class DeletedInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A deleted RC that can be restored. `until`: when that ends, "" for never. `manifest`: what it comes back with."""

    id: str
    pod_id: str
    replicas_desired: int
    daemon_set: bool
    manifest: str
    deleted_at: str
    until: str


async def restore(
    cli: Cli,
    rc: Annotated[
        str,
        typer.Argument(
            metavar="[RC]", help="The id of the deleted RC.", autocompletion=complete_deleted, show_default=False
        ),
    ] = "",
    show_list: Annotated[bool, typer.Option("--list", help="List the deleted RCs that can be restored.")] = False,
    detach: Detach = False,
    timeout: Timeout = DEFAULT_TIMEOUT,
    wait_healthy: WaitHealthy = DEFAULT_WAIT_HEALTHY,
) -> int:
    """Bring a deleted RC back as it was.

    Its spec, and the manifest of its last rollout that was done, are kept for `farm.deleted_rcs_max_age` (7 days) after
    the deletion.
    """
    if bool(rc) == show_list:
        raise UsageProblem("give the id of a deleted RC, or --list, which shows those that can be restored")
    if rc:
        spec, given_up = await restored(cli.store, cli.keys, cli.rcs, rc)
        if given_up:
            cli.out.note(
                f"rc {rc} comes back with manifest {spec.manifest[:12]}; the rollout of {given_up[:12]} was not done "
                "when it was deleted"
            )
        detach = detach or spec.disabled
        outcome = await follow(cli, spec, "restored", detach=detach, timeout=timeout, wait_healthy=wait_healthy)
        return ended(cli, [outcome])
    found = await deleted_rcs(cli.store, cli.keys)
    shown = [
        DeletedInfo(
            id=record.spec.id,
            pod_id=record.spec.rc_labels.get("pod_id", ""),
            replicas_desired=record.spec.replicas_desired,
            daemon_set=record.spec.is_daemon_set,
            manifest=record.manifest,
            deleted_at=record.deleted_at,
            until=record.until,
        )
        for record in found.records
    ]
    rows = (
        (
            each.id,
            ago(each.deleted_at),
            "all" if each.daemon_set else str(each.replicas_desired),
            each.pod_id,
            (ahead(each.until) or "at any time") if each.until else "never",
        )
        for each in shown
    )
    columns = ("RC", "DELETED", "REPLICAS>", "POD", "FORGOTTEN")
    cli.out.show(shown, lambda: cli.out.table(columns, rows), (each.id for each in shown))
    for problem in found.bad:
        cli.out.note(f"unreadable: {problem}")
    if not shown:
        cli.out.note("no deleted RC is kept")
    return 0
