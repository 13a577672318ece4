"""Lock an RC against changes: `rcfarm rc lock | unlock`."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from rcfarm.cli.kit.command import Cli
from rcfarm.cli.kit.options import RCId, UsageProblem, Yes, confirm
from rcfarm.cli.kit.output import count
from rcfarm.operations import locks
from store.schema import audit

MAX_REASON = 500  # characters


class LockInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an RC's lock. `holder`: who holds, or held it, and why."""

    id: str
    locked: bool
    holder: str


async def lock(
    cli: Cli,
    rc: RCId,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; shown to those it refuses.")],
) -> None:
    """Refuse changes of an RC until it is unlocked.

    No pod of it is moved to another node either. Its pods are still kept running, and started again after a crash.
    """
    reason = " ".join(reason.split())
    if not reason or len(reason) > MAX_REASON:
        raise UsageProblem(f"--reason: {count(len(reason), 'character')}; say why, in 1 to {MAX_REASON} characters")
    await locks.lock(cli.store, cli.keys, cli.rcs, rc, actor=cli.actor, reason=reason)
    info = LockInfo(id=rc, locked=True, holder=f"{cli.actor.name} ({reason})")
    cli.out.show(info, lambda: cli.out.line(f"rc {rc} locked; `rcfarm rc unlock {rc}` removes the lock"))


async def unlock(cli: Cli, rc: RCId, yes: Yes = False) -> None:
    """Remove the lock of an RC. Asks first if it is another person's."""
    entry = await locks.standing(cli.store, cli.keys, cli.rcs, rc)
    holder = audit.locked_by(entry)
    if not locks.is_of(entry, cli.actor):
        confirm(f"rc {rc} is locked by {holder}. Unlock it?", yes=yes)
    await locks.unlock(cli.store, cli.keys, rc, entry, actor=cli.actor)
    info = LockInfo(id=rc, locked=False, holder=holder)
    cli.out.show(info, lambda: cli.out.line(f"rc {rc} unlocked; it was locked by {holder}"))
