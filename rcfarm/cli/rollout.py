"""`rcfarm rollout`: how a changed manifest reaches the pods of an RC, and how it is stopped or taken back.

What an operator asks for is a record of its own, which the RC's owner obeys; each command then follows until it has.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from rcfarm.cli import NOT_FULLY_PLACED
from rcfarm.cli.kit.command import Cli, command
from rcfarm.cli.kit.options import DEFAULT_TIMEOUT, DEFAULT_WAIT_HEALTHY, Detach, RCId, Timeout, WaitHealthy
from rcfarm.cli.kit.output import Output, ago, seconds, state
from rcfarm.cli.rc import revise
from rcfarm.cli.rc.change import ended, follow
from rcfarm.cli.rc.follow import watched
from rcfarm.cli.rc.show import analyses_of, print_analyses, print_reasons, unreadable
from rcfarm.operations import rc_snapshot
from rcfarm.operations.errors import NoSuchRC
from rcfarm.operations.handovers import Handovers
from rcfarm.operations.rc_snapshot import ROLLOUT_CODES, RCSnapshot
from rcfarm.operations.rcs import Verb
from store.schema.records import Handover, RCSpec, Reason, Rollout, RolloutRequest, RolloutState

app = typer.Typer(rich_markup_mode=None)

OfRevision = Annotated[
    int | None, typer.Option("--revision", metavar="N", min=1, help="Only if it is the rollout of this revision.")
]

SHOWN_CODES = ROLLOUT_CODES | {"bad_rollout"}
_REACHED = {"pause": ("paused",), "abort": ("aborted",)}  # the states that a request is meant to lead to


class RevisionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One revision of an RC. `state`: current, stable (a rollout of it was done), or superseded. `by` and `at`: who
    gave it to the RC, and when; "" where that is not known."""

    number: int
    manifest: str
    state: str
    by: str
    at: str


class RolloutInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The rollout of an RC's present revision. `rollout` None: there was none, as it is the first one. `updated`: pods
    that were given it; `pods`: all of the RC's. `analyses`: each with its last outcome, in words. `handover`: the last
    one between it and another RC."""

    id: str
    revision: int
    state: str
    rollout: Rollout | None
    updated: int
    pods: int
    reasons: list[Reason]
    analyses: list[str] = []
    handover: Handover | None = None

    def render(self, out: Output) -> None:
        """Print it for people."""
        if self.handover is not None:
            out.line(handover_line(self.handover))
        out.line(Text.assemble(f"{self.id}  revision {self.revision}  ", state(self.state)))
        rollout = self.rollout
        if rollout is None:
            if self.state != "unreadable":
                is_pending = self.state == "pending"
                began = "its owner has not begun it yet" if is_pending else "its pods began with this revision"
                out.line(f"  {began}")
            print_reasons(out, self.reasons)
            return
        stable = "the stable one before it" if rollout.state == "done" else "the stable one"
        back = f", {stable} is {rollout.stable_revision}" if rollout.stable else ", there is none to go back to"
        out.line(f"  on {self.updated} of {self.pods} pods{back}; began {ago(rollout.started)}")
        print_reasons(out, self.reasons)
        print_analyses(out, self.analyses)


async def status(cli: Cli, rc: RCId) -> None:
    """Show where the rollout of an RC stands, and what it waits for."""
    info = _info(await cli.rcs.snapshot(rc))
    cli.out.show(info, lambda: info.render(cli.out))


async def history(cli: Cli, rc: RCId) -> None:
    """Show the revisions of an RC that are kept."""
    snap = await cli.rcs.snapshot(rc)
    spec = _spec_of(snap)
    found = [
        RevisionInfo(
            number=each.number,
            manifest=each.manifest,
            state="stable" if each.stable else "superseded",
            by=each.by,
            at=each.at,
        )
        for each in sorted(snap.revisions, key=lambda each: each.number)
        if each.number < spec.revision
    ]
    found.append(
        RevisionInfo(
            number=spec.revision,
            manifest=spec.manifest,
            state=f"current, {_info(snap).state}",
            by=spec.revised_by,
            at=spec.revised_at,
        )
    )
    rows = (
        (str(each.number), each.state, each.manifest[:12], each.by or "-", ago(each.at) if each.at else "-")
        for each in found
    )
    cli.out.show(found, lambda: cli.out.table(("REVISION>", "STATE", "MANIFEST", "BY", "WHEN"), rows))


async def pause(cli: Cli, rc: RCId, revision: OfRevision = None) -> int:
    """Stop a rollout where it is, until it is resumed."""
    return await _ask(cli, rc, "pause", revision)


async def resume(
    cli: Cli,
    rc: RCId,
    revision: OfRevision = None,
    detach: Detach = False,
    timeout: Timeout = DEFAULT_TIMEOUT,
    wait_healthy: WaitHealthy = DEFAULT_WAIT_HEALTHY,
) -> int:
    """Go on with a rollout that is paused, or begin one again that was stopped."""
    return await _ask(cli, rc, "resume", revision, timeout=timeout, wait_healthy=wait_healthy, to_the_end=not detach)


async def promote(
    cli: Cli,
    rc: RCId,
    revision: OfRevision = None,
    detach: Detach = False,
    timeout: Timeout = DEFAULT_TIMEOUT,
    wait_healthy: WaitHealthy = DEFAULT_WAIT_HEALTHY,
) -> int:
    """Go on from the canary to all pods."""
    return await _ask(cli, rc, "promote", revision, timeout=timeout, wait_healthy=wait_healthy, to_the_end=not detach)


async def abort(cli: Cli, rc: RCId, revision: OfRevision = None, timeout: Timeout = DEFAULT_TIMEOUT) -> int:
    """Stop a rollout, and bring the pods back to the revision before. Stop a hand-over between two RCs, and leave the
    pods where they are."""
    snap = await cli.rcs.snapshot(rc)
    is_handed_over = (snap.handover is not None and snap.handover.is_active) or cli.keys.handover(rc) in snap.bad
    if is_handed_over and revision is None:
        ended = await Handovers(cli.store, cli.keys, actor=cli.actor).abort(rc)
        cli.out.show(ended, lambda: cli.out.line(handover_line(ended)))
        return 0
    return await _ask(cli, rc, "abort", revision, timeout=timeout)


async def between(
    cli: Cli,
    old: Annotated[str, typer.Argument(metavar="OLD", help="The RC that gives its pods away.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="The RC that takes them over, with its own manifest.")],
    desired: Annotated[int, typer.Option("--desired", help="Healthy pods that NEW has in the end.")],
    minimum: Annotated[int, typer.Option("--minimum", help="Pods of both RCs that stay healthy all the time.")],
    leave_old: Annotated[
        bool, typer.Option("--leave-old", help="Keep OLD in the end, instead of deleting it.")
    ] = False,
    detach: Detach = False,
    timeout: Timeout = DEFAULT_TIMEOUT,
) -> int:
    """Let the pods of one RC pass to another one of the same pod id, node by node."""
    record = await Handovers(cli.store, cli.keys, actor=cli.actor).begin(
        old, new, desired=desired, minimum=minimum, leave_old=leave_old
    )
    if not detach:
        record = await _follow_handover(cli, record, timeout)
    cli.out.show(record, lambda: cli.out.line(handover_line(record)))
    return 0 if detach or record.state == "done" else NOT_FULLY_PLACED


async def _follow_handover(cli: Cli, record: Handover, timeout: float) -> Handover:
    """Show the progress until the hand-over has ended, or nothing has changed for `timeout` seconds. Return it."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + timeout
    async with watched(cli.store, cli.keys.rc(record.new)) as tree:
        while True:
            tree.event.clear()
            snap = rc_snapshot.snapshot(cli.keys, record.new, await tree.entries(deadline))
            if snap.handover is None or snap.handover.started != record.started:
                return record
            if snap.handover != record:
                record, deadline = snap.handover, clock() + timeout
                cli.out.note(f"rc {record.new}: {record.reason.message if record.reason else record.state}")
            if not record.is_active:
                return record
            if clock() >= deadline:
                owned = "its owner goes on" if snap.owner.held else "no farm owns it; the next owner goes on"
                cli.out.note(f"rc {record.new}: nothing has changed for {seconds(timeout)}; {owned}")
                return record
            await tree.changed(deadline)


def handover_line(record: Handover) -> str:
    """Return where a hand-over stands, in one line."""
    bounds = f"desired {record.desired}, minimum {record.minimum}"
    about = f"hand-over from rc {record.old} to rc {record.new} ({bounds}): {record.state}"
    return f"{about}: {record.reason.message}" if record.reason else about


async def _ask(
    cli: Cli,
    rc: str,
    verb: Verb,
    revision: int | None,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    wait_healthy: float = 0.0,
    to_the_end: bool = False,
) -> int:
    """Write the request, and follow until the owner has obeyed it, or to the rollout's end. Return the exit code."""
    request = await cli.rcs.request(rc, verb, revision)
    deadline = asyncio.get_running_loop().time() + timeout
    async with watched(cli.store, cli.keys.rc(rc)) as tree:
        while True:
            tree.event.clear()
            snap = rc_snapshot.snapshot(cli.keys, rc, await tree.entries(deadline))
            rollout = snap.rollout
            if reason := _never(snap, request):
                cli.out.note(f"rc {rc}: the {verb} was asked for, but {reason}")
                return NOT_FULLY_PLACED
            if rollout is not None and rollout.request == request.id and rollout.state != "reverting":
                break
            if asyncio.get_running_loop().time() >= deadline:
                cli.out.note(f"rc {rc}: the {verb} was asked for, but its owner has not finished it yet")
                return NOT_FULLY_PLACED
            await tree.changed(deadline)
    if to_the_end and snap.spec is not None:
        outcome = await follow(cli, snap.spec, "changed", detach=False, timeout=timeout, wait_healthy=wait_healthy)
        return ended(cli, [outcome])
    info = _info(await cli.rcs.snapshot(rc))
    cli.out.show(info, lambda: info.render(cli.out))
    if rollout.state in _REACHED.get(verb, (rollout.state,)):
        return 0
    cli.out.note(f"rc {rc}: the {verb} was asked for, but the rollout is {info.state}")
    return NOT_FULLY_PLACED


def _never(snap: RCSnapshot, request: RolloutRequest) -> str:
    """Return why the owner will not obey the request as things are, or ""."""
    status, rollout = snap.status, snap.rollout
    if snap.spec is not None and snap.spec.revision != request.revision:
        return f"revision {snap.spec.revision} was applied, and its rollout takes the place of the one that was meant"
    if rollout is not None and rollout.request == request.id:
        return ""
    if snap.request is None or snap.request.id != request.id:
        return "something else has been asked for since"
    if rollout is not None and rollout.state == "done":
        return "the rollout was done before"
    if not snap.owner.held:
        return "no farm owns it; the next owner will obey it"
    if status and status.state in ("disabled", "quarantined"):
        why = "; ".join(reason.message for reason in status.reasons)
        return f"it is {status.state}, so that its owner does nothing: {why}"
    return ""


def _spec_of(snap: RCSnapshot) -> RCSpec:
    if snap.spec is None:
        raise NoSuchRC(f"the spec of rc {snap.rc_id} can't be read; `rcfarm doctor` names it")
    return snap.spec


def _info(snap: RCSnapshot) -> RolloutInfo:
    spec = _spec_of(snap)
    rollout = snap.present_rollout
    without: RolloutState = "pending" if snap.rollout or snap.revisions else "done"
    word: str = rollout.state if rollout is not None else without
    if any(key.endswith("/rollout") for key in snap.bad):
        word = "unreadable"
    reported = snap.status.reasons if snap.status else ()
    on_it = [node for node, health in snap.health.items() if node in snap.pods and health.manifest == spec.manifest]
    return RolloutInfo(
        id=snap.rc_id,
        revision=spec.revision,
        state=word.replace("_", " "),
        rollout=rollout,
        updated=len(on_it),
        pods=len(snap.pods),
        handover=snap.handover,
        reasons=[*(each for each in reported if each.code in SHOWN_CODES), *unreadable(snap)],
        analyses=analyses_of(snap),
    )


command(app, "status")(status)
command(app, "history")(history)
command(app, "pause")(pause)
command(app, "resume")(resume)
command(app, "promote")(promote)
command(app, "abort")(abort)
command(app, "undo")(revise.undo)
command(app, "between")(between)
command(app, "restart")(revise.restart)
