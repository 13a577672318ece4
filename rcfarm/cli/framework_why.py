"""Why a Framework is where it is: `rcfarm framework explain | history`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Annotated

import typer
from rich.text import Text

from controllers.framework.constants import FRAMEWORK_NAME
from controllers.framework.wire import BadFramework, decode_framework
from rcfarm.cli.framework_read import FrameworkName, read
from rcfarm.cli.kube import KubeCli
from rcfarm.cli.output import state
from rcfarm.cli.words import ago
from rcfarm.framework_explain import Explained, Surroundings
from rcfarm.framework_explain import explain as reasons_of
from rcfarm.framework_view import NO_STATE
from rcfarm.operator_lease import LeaseInfo, lease_info
from rcfarm.rc_errors import BadInput
from store.kube.errors import Forbidden
from store.kube.objects import Object, key_of, name_of, uid_of
from store.kube.resources import EVENTS, LEASES, PODS, Resource

LeaseOption = Annotated[
    str,
    typer.Option(
        "--lease",
        envvar="RCFARM_JOBS_LEASE",
        metavar="[NAMESPACE/]NAME|off",
        help="Under which Lease the operator works; sought in every namespace unless one is named.",
    ),
]


async def explain(cli: KubeCli, framework: FrameworkName, lease: LeaseOption = "rcfarm-jobs") -> None:
    """Explain what a Framework and its tasks wait for. Whatever does not happen has a reason here."""
    obj = await read(cli, framework)
    try:
        found = decode_framework(obj)
    except BadFramework as error:
        raise BadInput(f"framework {key_of(obj)}: {error}; correct it and apply it again") from error
    pods, warnings, leases = await asyncio.gather(
        _readable(cli, PODS, cli.namespace, "what its pods wait for", label_selector=f"{FRAMEWORK_NAME}={framework}"),
        _readable(cli, EVENTS, cli.namespace, "what Kubernetes warns of", field_selector="type=Warning"),
        _leases(cli, lease),
    )
    around = Surroundings(
        {name_of(pod): pod for pod in pods or ()}, _in_order(warnings or ()), leases, datetime.now(UTC)
    )
    reasons = reasons_of(found, obj, around)
    where = found.status.state if found.status else NO_STATE
    cli.out.show(reasons, lambda: _explained(cli, f"{key_of(obj)}  ", str(where), reasons))


async def _readable(
    cli: KubeCli, resource: Resource, namespace: str, what: str, *, label_selector: str = "", field_selector: str = ""
) -> list[Object] | None:
    """What we may list; None, and a note, when we may not."""
    try:
        page = await cli.api.list(resource, namespace, label_selector=label_selector, field_selector=field_selector)
    except Forbidden as error:
        cli.out.note(f"not known: {what}: {error}")
        return None
    return list(page.items)


async def _leases(cli: KubeCli, lease: str) -> list[LeaseInfo] | None:
    """Those of that name; None when there is no election, or when nobody may tell."""
    if lease == "off":
        return None
    namespace, _, name = lease.rpartition("/")
    found = await _readable(cli, LEASES, namespace, "whether an operator leads", field_selector=f"metadata.name={name}")
    return None if found is None else [lease_info(each) for each in found]


def _explained(cli: KubeCli, name: str, where: str, reasons: Sequence[Explained]) -> None:
    cli.out.line(Text.assemble(name, state(where)))
    if not reasons:
        cli.out.line("  nothing holds it up")
        return
    cli.out.table(("SUBJECT", "STATE", "WHY"), _rows(reasons), indent=2)


def _rows(reasons: Sequence[Explained]) -> Iterator[tuple[str, Text, str]]:
    """Tasks of a role that follow each other for the same reason share a row."""
    for (_, where, why), group in groupby(reasons, lambda each: (_role(each.subject), each.state, each.reason)):
        subjects = [each.subject for each in group]
        many = f"{subjects[0]} … {subjects[-1].rpartition('-')[2]} ({len(subjects)})"
        yield (subjects[0] if len(subjects) == 1 else many, state(where), why)


def _role(subject: str) -> str:
    return subject.rpartition("-")[0]


async def history(cli: KubeCli, framework: FrameworkName) -> None:
    """Show the Events of a Framework and its pods. The API server keeps them for about an hour; the operator's log has
    every retry and deletion."""
    obj = await read(cli, framework)
    listed = await cli.api.list(EVENTS, cli.namespace)
    events = _in_order([event for event in listed.items if _is_about(obj, event)])
    cli.out.show(events, lambda: _events(cli, events))


def _is_about(framework: Object, event: Object) -> bool:
    """Whether it is about this Framework or one of its pods. No name of another Framework begins as its pods' do."""
    about: Object = event.get("involvedObject") or {}
    if about.get("kind") == "Pod":
        is_ours = str(about.get("name") or "").startswith(f"{name_of(framework)}-")
        created = datetime.fromisoformat(framework["metadata"]["creationTimestamp"])
        return is_ours and _when(event) >= created
    return bool(about.get("uid") == uid_of(framework))


def _events(cli: KubeCli, events: Sequence[Object]) -> None:
    if not events:
        cli.out.note("no Events; the API server forgets them after about an hour")
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


def _in_order(events: Sequence[Object]) -> list[Object]:
    return sorted(events, key=_when)


def _when(event: Object) -> datetime:
    """Texts would not do: some have fractions of seconds."""
    return datetime.fromisoformat(_time(event))


def _time(event: Object) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp") or "")
