"""Show what was done to an RC: `rcfarm rc history`, with `--diff` also what each change changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import typer
from rich.text import Text

from rcfarm.cli.kit.command import Cli
from rcfarm.cli.kit.options import RCId, Since, parse_time
from rcfarm.cli.kit.output import ago, labels
from rcfarm.cli.rc.change import DIFF_STYLES
from rcfarm.operations.documents import changed_lines
from rcfarm.operations.errors import NoSuchRC
from rcfarm.operations.fleet import listed
from rcfarm.operations.rcs import ReplicationControllers
from store.decoding import Undecodable, load_yaml
from store.schema.records import ALL_NODES, AuditEvent

_NOT_SHOWN = ("rc", "token", "generation", "node_count")
_AS = {"nodes": "now on"}
_IN_DIFF = frozenset({"manifest", "revision"})  # changed fields of the spec that the difference of manifests shows


class EventDiff(msgspec.Struct, frozen=True, kw_only=True):
    """An event of the audit log, and the lines of the difference that it made; none where it changed no spec."""

    event: AuditEvent
    diff: list[str]


async def history(
    cli: Cli,
    rc: RCId,
    last: Annotated[int, typer.Option("--last", metavar="N", min=0, help="Only the last N events; 0: all.")] = 100,
    since: Since = "",
    all_lives: Annotated[
        bool, typer.Option("--all", help="Also events from before the RC was created, if it existed earlier.")
    ] = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="Only changes of the desired state, each with its difference.")
    ] = False,
) -> None:
    """Show what was done to an RC, and by whom. Also works for deleted RCs."""
    asked = 0 if diff else last  # of the changes, not of the events, as many as are asked for
    events = await cli.rcs.history(rc, last=asked, since=parse_time("--since", since), all_lives=all_lives)
    if not events:
        within = f" since {since}" if since else ""
        raise NoSuchRC(f"the audit log has no event of rc {rc}{within}")
    if diff:
        await _show_differences(cli, events, last)
        return
    if len(events) == last:
        cli.out.note(f"the last {last} events; --last 0 shows all")
    rows = [
        (ago(event.timestamp), event.timestamp[:19] + "Z", _kind(event), _who(event), _details(event))
        for event in events
    ]
    cli.out.show(events, lambda: cli.out.table(("WHEN", "TIME", "EVENT", "BY", "DETAILS"), rows))


async def _show_differences(cli: Cli, events: list[AuditEvent], last: int) -> None:
    changes, manifests = list[EventDiff](), dict[str, str]()
    for event in reversed(events):
        if difference := await _difference(cli.rcs, event, manifests):
            changes.insert(0, EventDiff(event=event, diff=difference))
        if last and len(changes) == last:
            cli.out.note(f"the last {last} changes; --last 0 shows all")
            break

    def render() -> None:
        for number, each in enumerate(changes):
            if number:
                cli.out.line()
            event = each.event
            cli.out.line(f"{event.timestamp[:19]}Z  {_kind(event)}  by {_who(event)}  ({ago(event.timestamp)})")
            for line in each.diff:
                cli.out.line(Text(f"  {line}", style=DIFF_STYLES.get(line[:1], "")))

    cli.out.show(changes, render)
    if not changes:
        cli.out.note("none of these events changed the desired state")


async def _difference(rcs: ReplicationControllers, event: AuditEvent, manifests: dict[str, str]) -> list[str]:
    """Return the lines of what an event changed in the spec and in the manifest. `manifests`: those read already, as
    YAML under the field of an RC's file; a word where one is not kept any more."""
    details = event.event_details
    changes, digests = details.get("changes"), details.get("manifest")
    before, after = dict[str, Any](), dict[str, Any]()
    for field, change in changes.items() if isinstance(changes, dict) else ():
        if field not in _IN_DIFF and isinstance(change, list) and len(change) == 2:
            before[field], after[field] = change
    if isinstance(digests, list) and digests[:1] == [None] and "replicas_desired" in details:  # of a new RC
        after["replicas_desired"] = details["replicas_desired"]
    lines = changed_lines(_yaml(before), _yaml(after))
    if isinstance(digests, list) and len(digests) == 2 and digests[0] != digests[1]:
        for name in [str(digest) for digest in digests if digest and str(digest) not in manifests]:
            try:
                manifests[name] = _yaml({"manifest": load_yaml(await rcs.manifest(name))})
            except NoSuchRC:
                manifests[name] = f"manifest: {name[:12]}, which is not kept any more\n"
            except Undecodable:
                manifests[name] = f"manifest: {name[:12]}, which can't be read\n"
        old, new = (manifests[str(digest)] if digest else "" for digest in digests)
        lines += changed_lines(old, new) or [f"… manifest {str(digests[0])[:12]} → {str(digests[1])[:12]}"]
    return lines


def _yaml(fields: Mapping[str, Any]) -> str:
    import yaml  # takes 15 ms; commands that show no YAML must not pay

    named = {
        field: "all" if (field, value) == ("replicas_desired", ALL_NODES) else value for field, value in fields.items()
    }
    return yaml.safe_dump(named, sort_keys=False, allow_unicode=True, width=100) if named else ""


def _kind(event: AuditEvent) -> str:
    return _words(event.event_type.removeprefix("REPLICATION_CONTROLLER_").lower())


def _who(event: AuditEvent) -> str:
    known = [f"uid {event.uid}"] if isinstance(event.uid, int) else []
    known += [f"token {event.accessor[:8]}"] if isinstance(event.accessor, str) else []
    return f"{event.actor or '-'} ({', '.join(known)})" if known else event.actor or "-"  # claimed, then checked


def _details(event: AuditEvent) -> str:
    """Describe an event, which any program may have written: details of another form are shown as they are."""
    details, parts = dict(event.event_details), []
    if isinstance(details.get("changes"), dict):
        for field, change in details.pop("changes").items():
            is_pair = isinstance(change, list) and len(change) == 2
            shown = " → ".join(_value(each, field) for each in change) if is_pair else _value(change, field)
            parts.append(f"{_words(field)} {shown}")
    if isinstance(digests := details.get("manifest"), list):  # if the manifest was changed, the changes show it
        details["manifest"] = digests[-1] if digests[:1] == [None] else None
    parts += [
        f"{_AS.get(key) or _words(key)} {_value(value, key)}"
        for key, value in details.items()
        if key not in _NOT_SHOWN and value not in ([], {}, "", None)
    ]
    return "; ".join(parts)


def _words(field: str) -> str:
    return field.replace("_", " ")


def _value(value: Any, field: str) -> str:
    if field == "replicas_desired" and value == ALL_NODES:
        return "all"
    if isinstance(value, dict):
        return labels(value)
    if isinstance(value, list):
        return listed(map(str, value), shown=5)
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text[:12] if len(text) == 64 and text.isalnum() else text or "none"
