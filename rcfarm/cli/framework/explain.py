"""Explain the state of a Framework: `rcfarm framework explain | history`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Annotated

import typer
from rich.text import Text

from controllers.framework.api.types import FRAMEWORK_NAME
from rcfarm.cli.framework.show import FrameworkName, decoded_from, read
from rcfarm.cli.kit.command import KubeCli
from rcfarm.cli.kit.output import ago, state
from rcfarm.reports.framework import NO_STATE
from rcfarm.reports.framework_explain import FrameworkReason, ObservedObjects, lease_info
from rcfarm.reports.framework_explain import explain as reasons_of
from store.kube.api.errors import Forbidden
from store.kube.api.objects import EVENTS, LEASES, PODS, Object, Resource, key_of, name_of, uid_of

LeaseOption = Annotated[
    str,
    typer.Option(
        "--lease",
        envvar="RCFARM_JOBS_LEASE",
        metavar="[NAMESPACE/]NAME|off",
        help="Lease of the operator; searched for in every namespace unless one is named.",
    ),
]


async def explain(cli: KubeCli, framework: FrameworkName, lease: LeaseOption = "rcfarm-jobs") -> None:
    """Explain what a Framework and its tasks wait for."""
    obj = await read(cli, framework)
    found = decoded_from(obj)
    elsewhere, _, name = lease.rpartition("/")
    pods, warnings, leases = await asyncio.gather(
        _readable(cli, PODS, cli.namespace, "what its pods wait for", label_selector=f"{FRAMEWORK_NAME}={framework}"),
        _readable(cli, EVENTS, cli.namespace, "what Kubernetes warns of", field_selector="type=Warning"),
        _readable(cli, LEASES, elsewhere, "whether an operator leads", field_selector=f"metadata.name={name}")
        if lease != "off"
        else asyncio.sleep(0),
    )
    observed = ObservedObjects(
        {name_of(pod): pod for pod in pods or ()},
        _in_order(warnings or ()),
        None if leases is None else [lease_info(each) for each in leases],
        datetime.now(UTC),
    )
    reasons = reasons_of(found, obj, observed)
    where = found.status.state if found.status else NO_STATE

    def render() -> None:
        cli.out.line(Text.assemble(f"{key_of(obj)}  ", state(str(where))))
        if not reasons:
            cli.out.line("  no obstacle found")
            return
        cli.out.table(("SUBJECT", "STATE", "WHY"), rows_of(reasons), indent=2)

    cli.out.show(reasons, render)


def rows_of(reasons: Sequence[FrameworkReason]) -> Iterator[tuple[str, Text, str]]:
    """Yield the rows; consecutive tasks of a role with the same state and reason share one."""
    for (_, where, why), group in groupby(
        reasons, lambda each: (each.subject.rpartition("-")[0], each.state, each.reason)
    ):
        subjects = [each.subject for each in group]
        many = f"{subjects[0]} … {subjects[-1].rpartition('-')[2]} ({len(subjects)})"
        yield (subjects[0] if len(subjects) == 1 else many, state(where), why)


async def _readable(
    cli: KubeCli, resource: Resource, namespace: str, what: str, *, label_selector: str = "", field_selector: str = ""
) -> list[Object] | None:
    """List objects; return None, after a note, if the API server forbids it."""
    try:
        page = await cli.api.list(resource, namespace, label_selector=label_selector, field_selector=field_selector)
    except Forbidden as error:
        cli.out.note(f"not known: {what}: {error}")
        return None
    return list(page.items)


async def history(cli: KubeCli, framework: FrameworkName) -> None:
    """Show the Events of a Framework and its pods. The API server keeps them for about an hour; the operator's log has
    every retry and deletion."""
    obj = await read(cli, framework)
    listed = await cli.api.list(EVENTS, cli.namespace)
    events = _in_order([event for event in listed.items if _is_about(obj, event)])

    def render() -> None:
        if not events:
            cli.out.note("no Events; the API server keeps them for about an hour")
            return
        rows = [
            (
                ago(_time(event)),
                str(event.get("type") or ""),
                str(event["involvedObject"].get("name")),
                str(event.get("reason") or ""),
                str(event.get("count") or 1),
                str(event.get("message") or ""),
            )
            for event in events
        ]
        cli.out.table(("WHEN", "TYPE", "ABOUT", "REASON", "TIMES>", "MESSAGE"), rows)

    cli.out.show(events, render)


def _is_about(framework: Object, event: Object) -> bool:
    """Return whether the Event is about this Framework or one of its pods.

    A pod is recognised by its name, because it may be gone: the Framework's name and a dash, which no name of a
    Framework contains, come first.
    """
    about: Object = event.get("involvedObject") or {}
    if about.get("kind") == "Pod":
        is_ours = str(about.get("name") or "").startswith(f"{name_of(framework)}-")
        created = datetime.fromisoformat(framework["metadata"]["creationTimestamp"])
        return is_ours and _when(event) >= created
    return bool(about.get("uid") == uid_of(framework))


def _in_order(events: Sequence[Object]) -> list[Object]:
    return sorted(events, key=_when)


def _when(event: Object) -> datetime:
    """Parse the time of an Event: as text, times do not sort, because some have fractions of seconds."""
    return datetime.fromisoformat(_time(event))


def _time(event: Object) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp") or "")
