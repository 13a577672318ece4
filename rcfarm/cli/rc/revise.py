"""Roll the pods of an RC out again: `rcfarm rc restart | rollback`, which are also `rcfarm rollout restart | undo`."""

from __future__ import annotations

from typing import Annotated

import typer

from rcfarm.cli.kit.command import Cli
from rcfarm.cli.kit.options import (
    DEFAULT_TIMEOUT,
    DEFAULT_WAIT_HEALTHY,
    Detach,
    RCId,
    Timeout,
    WaitHealthy,
    Yes,
    confirm,
)
from rcfarm.cli.kit.output import count
from rcfarm.cli.rc.change import ended, follow
from rcfarm.cli.rc.several import OfLabels, RCIds, announce, change_each, chosen


async def undo(
    cli: Cli,
    rc: RCId,
    revision: Annotated[
        int | None, typer.Option("--to", metavar="REVISION", help="To this one instead of the last stable one.")
    ] = None,
    detach: Detach = False,
    timeout: Timeout = DEFAULT_TIMEOUT,
    wait_healthy: WaitHealthy = DEFAULT_WAIT_HEALTHY,
) -> int:
    """Give an RC the manifest of a former revision again."""
    spec = await cli.rcs.undo(rc, revision)
    outcome = await follow(cli, spec, "changed", detach=detach, timeout=timeout, wait_healthy=wait_healthy)
    return ended(cli, [outcome])


async def restart(
    cli: Cli,
    rc: RCIds = None,
    selector: OfLabels = "",
    yes: Yes = False,
    detach: Detach = False,
    timeout: Timeout = DEFAULT_TIMEOUT,
    wait_healthy: WaitHealthy = DEFAULT_WAIT_HEALTHY,
) -> int:
    """Restart the pods of RCs, as carefully as a changed manifest."""
    ids = await chosen(cli, rc, selector)
    if selector:
        announce(cli, "restart the pods of", ids)
        confirm(f"Restart the pods of {count(len(ids), 'RC')}?", yes=yes)
    outcomes = await change_each(
        cli,
        ids,
        cli.rcs.restart,
        lambda spec, say: follow(
            cli, spec, "restarted", detach=detach, timeout=timeout, wait_healthy=wait_healthy, say=say
        ),
    )
    return ended(cli, outcomes, as_list=bool(selector))
