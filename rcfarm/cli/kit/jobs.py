"""What the commands on jobs of any kind share: reading a cluster's objects, the history of one, and following one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Annotated

import typer
from rich.text import Text

from controllers.loop.control_loop import ObjectHandler
from rcfarm.cli import NOT_FULLY_PLACED
from rcfarm.cli.kit.command import KubeCli
from rcfarm.cli.kit.output import ago, state
from rcfarm.operations.errors import BadInput
from rcfarm.reports.jobs import JobReason, ObservedObjects, lease_info
from store.kube.api.errors import Conflict, Forbidden, NotFound
from store.kube.api.objects import EVENTS, LEASES, PODS, Object, Resource, join_key, name_of, uid_of
from store.kube.api.protocol import KubeApi, Propagation
from store.kube.informer.informer import Informer

PAGE = 500  # objects read at once
_SERVER_FIELDS = ("managedFields", "uid", "resourceVersion", "creationTimestamp", "generation", "selfLink")

AllNamespaces = Annotated[bool, typer.Option("--all-namespaces", "-A", help="Those of all namespaces.")]
LeaseOption = Annotated[
    str,
    typer.Option(
        "--lease",
        envvar="RCFARM_JOBS_LEASE",
        metavar="[NAMESPACE/]NAME|off",
        help="Lease of the operator; searched for in every namespace unless one is named.",
    ),
]


async def read_all(api: KubeApi, resource: Resource, namespace: str, *, label_selector: str = "") -> list[Object]:
    """Return all objects of a resource, read in pages. Raises `KubeError`."""
    items: list[Object] = []
    token = ""
    while True:
        page = await api.list(resource, namespace, label_selector=label_selector, limit=PAGE, continue_token=token)
        items += page.items
        token = page.continue_token
        if not token:
            return items


def show_manifest(cli: KubeCli, resource: Resource, obj: Object) -> None:
    """Show an object without what the API server added, as a file for `kubectl apply`."""
    if cli.out.as_json:
        cli.out.json(obj)
        return
    metadata = {key: value for key, value in obj["metadata"].items() if key not in _SERVER_FIELDS}
    wanted = {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": metadata,
        "spec": obj.get("spec") or {},
    }
    import yaml  # takes 15 ms; commands that show no YAML must not pay

    cli.out.text(yaml.safe_dump(wanted, sort_keys=False))


async def observe(cli: KubeCli, label_selector: str, lease: str) -> ObservedObjects:
    """Read what explains a job. What may not be read is noted, and unknown. `label_selector`: that of its pods."""
    elsewhere, _, name = lease.rpartition("/")
    pods, warnings, leases = await asyncio.gather(
        _readable(cli, PODS, cli.namespace, "what its pods wait for", label_selector=label_selector),
        _readable(cli, EVENTS, cli.namespace, "what Kubernetes warns of", field_selector="type=Warning"),
        _readable(cli, LEASES, elsewhere, "whether an operator leads", field_selector=f"metadata.name={name}")
        if lease != "off"
        else asyncio.sleep(0),
    )
    return ObservedObjects(
        {name_of(pod): pod for pod in pods or ()},
        sorted(warnings or (), key=_when),
        None if leases is None else [lease_info(each) for each in leases],
        datetime.now(UTC),
    )


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


def show_reasons(cli: KubeCli, title: Text, reasons: Sequence[JobReason]) -> None:
    """Show why a job does not progress. `title`: its key and state."""

    def render() -> None:
        cli.out.line(title)
        if not reasons:
            cli.out.line("  no obstacle found")
            return
        rows = [(subject, state(first.state), first.code, first.reason) for subject, first in grouped(reasons)]
        cli.out.table(("SUBJECT", "STATE", "CODE", "WHY"), rows, indent=2)

    cli.out.show(reasons, render)


def grouped(reasons: Sequence[JobReason]) -> Iterator[tuple[str, JobReason]]:
    """Yield each reason with its subject; consecutive tasks of a role with the same state and reason share one."""
    for _, group in groupby(
        reasons, lambda each: (each.subject.rpartition("-")[0], each.state, each.code, each.reason)
    ):
        same = list(group)
        last = same[-1].subject.rpartition("-")[2]
        yield same[0].subject if len(same) == 1 else f"{same[0].subject} … {last} ({len(same)})", same[0]


async def show_history(cli: KubeCli, job: Object, pods: tuple[str, ...]) -> None:
    """Show the Events of a job and its pods, the oldest first. `pods`: what the names of its pods begin with, because
    they may be gone."""
    events = []
    for event in await read_all(cli.api, EVENTS, cli.namespace):
        about: Object = event.get("involvedObject") or {}
        if about.get("kind") == "Pod":
            created = datetime.fromisoformat(job["metadata"]["creationTimestamp"])
            is_ours = str(about.get("name") or "").startswith(pods) and _when(event) >= created
        else:
            is_ours = about.get("uid") == uid_of(job)
        if is_ours:
            events.append(event)
    events.sort(key=_when)

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


def _when(event: Object) -> datetime:
    """Parse the time of an Event: as text, times do not sort, because some have fractions of seconds."""
    return datetime.fromisoformat(_time(event))


def _time(event: Object) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp") or "")


async def follow(
    cli: KubeCli,
    resource: Resource,
    name: str,
    progress: Callable[[Object | None], str | None],
    *,
    title: str,
    word: str,
    explain: str,
    timeout: float,
) -> int:
    """Watch an object until a change is done, and show the progress. Return the exit code: 2 at the time limit.

    `progress` returns what is shown, or None once the change is done; the object is None when it is gone. `title`: the
    object in messages, as in `framework train`. `word`: the change's participle. `explain`: the command that explains.
    """
    informer = Informer(cli.api, resource, namespace=cli.namespace, field_selector=f"metadata.name={name}")
    changed = asyncio.Event()
    informer.add_handler(ObjectHandler(lambda _: changed.set(), lambda _: changed.set()))
    watching = asyncio.create_task(informer.run())
    try:
        with cli.out.progress(f"{name}: ") as say:
            async with asyncio.timeout(timeout):
                await informer.synced()
                while True:
                    changed.clear()
                    text = progress(informer.get(join_key(cli.namespace, name)))
                    if text is None:
                        return 0
                    say(text)
                    await changed.wait()
    except TimeoutError:
        cli.out.error(f"{title} is not {word} after {timeout:g} seconds; to see what it waits for: {explain}")
        return NOT_FULLY_PLACED
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def delete_object(
    cli: KubeCli,
    resource: Resource,
    obj: Object,
    *,
    called: str,
    title: str,
    explain: str,
    detach: bool,
    timeout: float,
) -> int:
    """Delete an object with what it owns, and follow that until it is gone. Return the exit code. `called`: the object
    in the command's own lines; the rest: see `follow`."""
    name, uid = name_of(obj), uid_of(obj)
    try:
        propagation: Propagation = "Background" if detach else "Foreground"  # then it stays until its pods are gone
        await cli.api.delete(resource, name, cli.namespace, uid=uid, propagation=propagation)
    except (NotFound, Conflict):
        cli.out.line(f"{called} is gone already")
        return 0
    if detach:
        cli.out.line(f"{called}: deletion requested")
        return 0

    def progress(found: Object | None) -> str | None:
        return None if found is None or uid_of(found) != uid else "waiting for its pods to end"

    code = await follow(cli, resource, name, progress, title=title, word="gone", explain=explain, timeout=timeout)
    if code == 0:
        cli.out.line(f"{called} is deleted")
    return code


def found_or_deleted(title: str, obj: Object | None) -> Object:
    """Return the object. Raises `BadInput` if it was deleted while it was followed."""
    if obj is None:
        raise BadInput(f"{title} was deleted")
    return obj
