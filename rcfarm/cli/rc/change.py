"""Change RCs: `rcfarm rc apply | create | scale | enable | disable | delete`.

Each change is one transaction; then, unless detached, the command follows the RC by watching it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from rcfarm.cli.kit.command import Cli
from rcfarm.cli.kit.json_views import Outcome, RCInfo, rc_info
from rcfarm.cli.kit.options import (
    DEFAULT_TIMEOUT,
    DEFAULT_WAIT_HEALTHY,
    Detach,
    Files,
    RCId,
    Timeout,
    UsageProblem,
    WaitHealthy,
    Yes,
    confirm,
    parse_pairs,
    read_file,
    read_files,
    replica_count,
)
from rcfarm.cli.kit.output import Output, count, seconds
from rcfarm.cli.rc.follow import Followed, Follower, Say
from rcfarm.cli.rc.several import OfLabels, RCIds, announce, change_each, chosen, exit_code
from rcfarm.operations import rc_apply, rc_snapshot
from rcfarm.operations.errors import BadInput, NoSuchRC
from rcfarm.operations.fleet import listed
from rcfarm.operations.rc_apply import Planned
from rcfarm.operations.rc_spec import parse_manifest
from scheduler.label import obstacle
from store.kv.protocol import StoreError
from store.schema.records import ALL_NODES, RCSpec
from store.schema.selectors import Selector

SHOWN_UNCHANGED = 16  # RCs that are named although nothing about them changes
DIFF_STYLES = {"+": "green", "-": "red"}
_DONE = {"create": "created", "change": "changed", "replace": "replaced", "none": "unchanged"}


async def apply(
    cli: Cli,
    files: Files,
    yes: Yes = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the difference and stop.")] = False,
    plan: Annotated[
        str, typer.Option("--plan", metavar="DIGEST", help="Only if the outcome is still that of `rcfarm plan`.")
    ] = "",
    detach: Detach = False,
    timeout: Timeout = DEFAULT_TIMEOUT,
    wait_healthy: WaitHealthy = DEFAULT_WAIT_HEALTHY,
) -> int:
    """Create or change RCs from files. Shows the difference first."""
    documents = [document for name, raw in read_files(files) for document in rc_apply.load(name, raw)]
    rc_apply.check_distinct(documents)
    plans = [await rc_apply.plan(cli.rcs, document) for document in documents]
    if plan:
        from rcfarm.cli.plan import check_outcome  # the planner is not needed otherwise

        await check_outcome(cli, plans, plan)
    show_differences(cli.out, plans)
    if dry_run:
        return 0
    for each in plans:
        if each.action != "none":
            await _note_shortage(cli, each.new)
    if changes := [each for each in plans if each.action != "none"]:
        confirm(f"Apply {count(len(changes), 'change')}?", yes=yes)
        await cli.prepare()
    outcomes = await carried_out(cli, plans, detach=detach, timeout=timeout, wait_healthy=wait_healthy)
    cli.out.show(outcomes, lambda: report(cli.out, outcomes))
    return exit_code(outcomes)


async def carried_out(
    cli: Cli, plans: list[Planned], *, detach: bool, timeout: float, wait_healthy: float
) -> list[Outcome]:
    """Carry out the plans, and then follow each RC unless detached."""
    specs: list[RCSpec] = []
    for plan in plans:
        try:
            specs.append(await rc_apply.carry_out(cli.rcs, plan) if plan.action != "none" else plan.new)
        except Exception:
            done = [f"rc {spec.id}" for spec, plan in zip(specs, plans, strict=False) if plan.action != "none"]
            if done:
                cli.out.note(f"applied before the error: {', '.join(done)}")
            raise
    return [
        await follow(cli, spec, _DONE[plan.action], detach=detach, timeout=timeout, wait_healthy=wait_healthy)
        for plan, spec in zip(plans, specs, strict=True)
    ]


def show_differences(out: Output, plans: list[Planned]) -> None:
    """Show what each plan would change."""
    unchanged = sum(plan.action == "none" for plan in plans)
    if unchanged > SHOWN_UNCHANGED:
        out.note(f"{count(unchanged, 'RC')}: nothing to change")
    for plan in plans:
        rc_id = plan.document.rc_id
        if plan.action == "none" and unchanged > SHOWN_UNCHANGED:
            continue
        if plan.action == "none":
            out.note(f"rc {rc_id}: nothing to change")
            continue
        if plan.damaged:
            out.note(f"rc {rc_id}: its record can't be read ({plan.damaged.error.reason}); all of it will be replaced:")
        else:
            out.note(f"rc {rc_id} will be {_DONE[plan.action]}:")
        show_lines(out, rc_apply.difference(plan))


def show_lines(out: Output, difference: Iterable[str]) -> None:
    """Show the lines of a difference."""
    for line in difference:
        out.note(Text(f"  {line}", style=DIFF_STYLES.get(line[:1], "")))


async def create(
    cli: Cli,
    manifest: Annotated[
        Path, typer.Option("--manifest", "-m", metavar="FILE", help="The pod's manifest, YAML or JSON.")
    ],
    rc: Annotated[
        str, typer.Option("--id", metavar="RC", help="The RC's id; derived from the pod's id when absent.")
    ] = "",
    replicas: Annotated[
        int,
        typer.Option("--replicas", metavar="N|all", parser=replica_count, help="How many pods; all: one on each node."),
    ] = 0,
    node_selector: Annotated[
        str,
        typer.Option(
            "--node-selector",
            "-n",
            metavar="SELECTOR",
            help="Label selector of the nodes, as in pool=web; all when absent.",
        ),
    ] = "",
    allocation_strategy: Annotated[
        str,
        typer.Option(
            "--allocation-strategy", "-s", metavar="static|dynamic", help="dynamic: pods may be moved to other nodes."
        ),
    ] = "static",
    max_unavailable: Annotated[
        int,
        typer.Option(
            "--max-unavailable", metavar="N", help="Maximum number of pods that may be unavailable during an update."
        ),
    ] = 1,
    pod_label: Annotated[
        list[str] | None,
        typer.Option("--pod-label", "-p", metavar="KEY=VALUE", help="A label of each pod; may be repeated."),
    ] = None,
    rc_label: Annotated[
        list[str] | None,
        typer.Option("--rc-label", "-r", metavar="KEY=VALUE", help="A label of the RC; may be repeated."),
    ] = None,
    disabled: Annotated[bool, typer.Option("--disabled", help="Create it disabled.")] = False,
    detach: Detach = False,
    timeout: Timeout = DEFAULT_TIMEOUT,
    wait_healthy: WaitHealthy = DEFAULT_WAIT_HEALTHY,
) -> int:
    """Create an RC from a manifest."""
    raw = read_file("--manifest", manifest)
    try:
        parse_manifest(raw)
    except BadInput as error:
        if not rc_apply.is_rc_file(raw):
            raise BadInput(f"--manifest {manifest}: {error}") from error
        raise UsageProblem(
            f"--manifest {manifest}: this is an RC's file, not a manifest; `rcfarm rc apply -f {manifest}` applies it"
        ) from error
    pod_labels, rc_labels = parse_pairs("--pod-label", pod_label or ()), parse_pairs("--rc-label", rc_label or ())

    async def created() -> RCSpec:
        return await cli.rcs.create(
            raw,
            rc_id=rc,
            replicas=replicas,
            node_selector=node_selector,
            pod_labels=pod_labels,
            rc_labels=rc_labels,
            allocation_strategy=allocation_strategy,
            max_unavailable=max_unavailable,
            disabled=disabled,
        )

    if cli.is_new:
        await created()  # in memory: what is refused leaves no store behind
    await cli.prepare()
    spec = await created()
    detach = detach or disabled
    return ended(cli, [await follow(cli, spec, "created", detach=detach, timeout=timeout, wait_healthy=wait_healthy)])


async def scale(
    cli: Cli,
    *,
    rc: RCIds = None,
    replicas: Annotated[
        int,
        typer.Argument(
            metavar="REPLICAS", parser=replica_count, help="How many pods each should have; all: one on each node."
        ),
    ],
    selector: OfLabels = "",
    yes: Yes = False,
    detach: Detach = False,
    timeout: Timeout = DEFAULT_TIMEOUT,
    wait_healthy: WaitHealthy = DEFAULT_WAIT_HEALTHY,
) -> int:
    """Change how many pods RCs have."""
    ids = await chosen(cli, rc, selector)
    if selector:
        wanted = "all" if replicas == ALL_NODES else str(replicas)
        specs = {spec.id: spec for spec in (await cli.rcs.list()).specs}
        now = {rc_id: "all" if specs[rc_id].is_daemon_set else specs[rc_id].replicas_desired for rc_id in ids}
        announce(cli, "scale", [f"{rc_id}: from {number} to {wanted}" for rc_id, number in now.items()])
        confirm(f"Scale {count(len(ids), 'RC')} to {wanted}?", yes=yes)

    async def scaled(rc_id: str) -> RCSpec:
        await _note_shortage(cli, msgspec.structs.replace(await cli.rcs.get(rc_id), replicas_desired=replicas))
        return await cli.rcs.set_replicas(rc_id, replicas)

    outcomes = await change_each(
        cli,
        ids,
        scaled,
        lambda spec, say: follow(
            cli, spec, "scaled", detach=detach, timeout=timeout, wait_healthy=wait_healthy, rolls=False, say=say
        ),
    )
    return ended(cli, outcomes, as_list=bool(selector))


async def _note_shortage(cli: Cli, spec: RCSpec) -> None:
    """Say, before anything is written, that there are fewer nodes than replicas, or none for a canary. The change may
    still be wanted: the owner goes on as soon as it can."""
    selects = spec.policy.canary_selector
    if spec.replicas_desired <= 0 or (spec.is_daemon_set and not selects) or spec.disabled:
        return
    selector, found = Selector.parse(spec.node_selector), await cli.nodes.list()
    canary, labels = Selector.parse(selects), [node.spec.labels for node in found.nodes.values()]
    if selects and not any(selector.matches(each) and canary.matches(each) for each in labels):
        where = f"matches the canary_selector {selects!r}" + (" and the node_selector" if spec.node_selector else "")
        cli.out.note(f"rc {spec.id}: no node {where}: a rollout would wait before its canary")
    if spec.is_daemon_set:
        return
    fit = {name for name, node in found.nodes.items() if not obstacle(node.state(), selector)}
    if len(fit) >= spec.replicas_desired:
        return
    with suppress(NoSuchRC):
        fit |= (await cli.rcs.snapshot(spec.id)).pods.keys()
    missing = spec.replicas_desired - len(fit)
    if missing > 0:
        why = f"no more than {len(fit)} nodes can have one" if fit else "no node may take pods"
        cli.out.note(f"rc {spec.id}: {missing} of {spec.replicas_desired} replicas will have no node: {why}")


async def enable(cli: Cli, rc: RCId) -> int:
    """Let the farm act on an RC again."""
    return await _switch(cli, cli.rcs.enable, rc, "enabled")


async def disable(cli: Cli, rc: RCId) -> int:
    """Freeze an RC: nothing is added, removed or repaired."""
    return await _switch(cli, cli.rcs.disable, rc, "disabled")


async def _switch(cli: Cli, switch: Callable[[str], Awaitable[RCSpec]], rc: str, action: str) -> int:
    spec = await switch(rc)
    return ended(cli, [Outcome(id=rc, action=action, rc=await _info(cli, spec.id))])


async def delete(
    cli: Cli,
    rc: RCIds = None,
    selector: OfLabels = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", "--force", "-f", help="Do not ask, even if it has pods.")] = False,
    detach: Detach = False,
    timeout: Timeout = DEFAULT_TIMEOUT,
) -> int:
    """Delete RCs: stop their pods, then remove their records. `rcfarm rc restore` brings them back for a time."""
    ids = await chosen(cli, rc, selector)
    if len(ids) == 1 and not selector:
        snap = await cli.rcs.snapshot(ids[0])
        if not (snap.spec and snap.spec.deleting) and (snap.desired or snap.pods):
            pods = f"{count(len(snap.pods), 'pod')} ({snap.desired} desired)"
            confirm(f"rc {snap.rc_id} has {pods}. Stop them and delete it?", yes=yes)
    else:
        snaps = {snap.rc_id: snap for snap in await cli.rcs.snapshots()}
        there = [snaps[rc_id] for rc_id in ids if rc_id in snaps]
        hit = [f"{snap.rc_id}: {count(len(snap.pods), 'pod')}, {snap.desired} desired" for snap in there]
        announce(cli, "delete", hit)
        if there:
            confirm(f"Stop their pods and delete {count(len(there), 'RC')}?", yes=yes)

    async def marked(rc_id: str) -> rc_snapshot.RCSnapshot:
        snap = await cli.rcs.snapshot(rc_id)
        await cli.rcs.delete(rc_id, force=True)
        return snap

    async def gone(marked: rc_snapshot.RCSnapshot, say: Say | None) -> Outcome:
        rc_id, pod_id = marked.rc_id, rc_snapshot.pod_id_of(marked)
        if detach:
            return Outcome(id=rc_id, action="deleted", rc=await _info(cli, rc_id))
        complete, reasons = await _watch(cli, rc_id, timeout, lambda follower: follower.until_gone(pod_id), say)
        if complete:
            reasons = await _out_of_reach(cli, marked.pods)
        info = await _info(cli, rc_id)
        return Outcome(id=rc_id, action="deleted", rc=info, complete=complete, reasons=reasons)

    return ended(cli, await change_each(cli, ids, marked, gone), as_list=bool(selector))


async def _out_of_reach(cli: Cli, nodes: Iterable[str]) -> list[str]:
    """Return, in words, on which of the nodes an agent can't know whether all processes of a pod have ended."""
    try:
        known = (await cli.nodes.list()).nodes
    except StoreError as error:
        return [f"whether processes that left their session still run is not known: {error}"]
    agents = {name: known[name].last for name in nodes if name in known}
    blind = [name for name, agent in agents.items() if agent and not (agent.limits and agent.limits.tree)]
    why = "without control groups, processes that left their session may still run; see `rcfarm doctor`"
    return [f"{listed(blind)}: {why}"] if blind else []


async def follow(
    cli: Cli,
    spec: RCSpec,
    action: str,
    *,
    detach: bool,
    timeout: float,
    wait_healthy: float,
    rolls: bool = True,
    say: Say | None = None,
) -> Outcome:
    """Follow until placed and healthy, unless detached. `rolls`: and until the rollout of its manifest is done. `say`:
    where the progress is reported; None: on a line of its own."""
    complete, reasons = None, list[str]()
    if not detach:
        complete, reasons = await _watch(
            cli,
            spec.id,
            timeout,
            lambda follower: follower.until_placed(
                spec.generation, wait_healthy, rolls=rolls, revision=spec.revision if rolls else 0
            ),
            say,
        )
    return Outcome(id=spec.id, action=action, rc=await _info(cli, spec.id), complete=complete, reasons=reasons)


async def _watch(
    cli: Cli, rc_id: str, timeout: float, until: Callable[[Follower], Awaitable[Followed]], reported: Say | None = None
) -> Followed:
    began = time.monotonic()
    with nullcontext(reported) if reported else cli.out.progress(f"rc {rc_id}: ") as say:
        try:
            followed = await until(Follower(cli.store, cli.keys, rc_id, timeout=timeout, say=say, note=cli.out.note))
        except asyncio.CancelledError:
            cli.out.note(f"no longer waiting; the change to rc {rc_id} stays, `rcfarm rc status {rc_id}` shows it")
            raise
        if followed.complete:
            say(f"done in {seconds(time.monotonic() - began)}")
    return followed


async def _info(cli: Cli, rc_id: str) -> RCInfo | None:
    """Return the RC's current state; None if nothing is left of it."""
    try:
        return rc_info(await cli.rcs.snapshot(rc_id))
    except NoSuchRC:
        return None


def ended(cli: Cli, outcomes: list[Outcome], *, as_list: bool = False) -> int:
    """Show the outcomes: a single one as such, unless `as_list`. Return the exit code."""
    is_one = len(outcomes) == 1 and not as_list
    cli.out.show(outcomes[0] if is_one else outcomes, lambda: report(cli.out, outcomes))
    return exit_code(outcomes)


def report(out: Output, outcomes: list[Outcome]) -> None:
    """Print the outcomes for people."""
    for outcome in outcomes:
        if outcome.error:
            continue  # it was reported when it happened
        sentence, rc = f"rc {outcome.id} {outcome.action}", outcome.rc
        if outcome.complete is not None and outcome.action == "deleted":
            what = "no process is left" if not outcome.reasons else "its records are gone"
            back = f": {what}; `rcfarm rc restore {outcome.id}` brings it back"
            sentence += back if outcome.complete else ", but something is left:"
        elif outcome.complete is not None and rc is not None:
            all_ended = ", and all of them have completed" if rc.state == "completed" else ""
            sentence += f"{'' if outcome.complete else ', but not complete'}: {rc.counts}{all_ended}"
        elif outcome.complete is False:
            sentence += ", but not complete:"
        out.line(sentence)
        for reason in outcome.reasons:
            out.hanging("  ", reason)
