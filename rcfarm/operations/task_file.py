"""Read the files that operators apply: RCs, tasks, quotas and schedules, in any order.

    task: hello                           # the execution's id
    process: {command: [echo, hi]}        # the kind of task, and its own part
    retries: 2
    quotas: {gpu: 1}
    ---
    quota: gpu
    units: 3
    ---
    schedule: nightly
    cron: "0 3 * * *"
    task:
      process: {command: [backup]}

A document belongs to the kind that its first field names; any other is an RC. Each kind of task that rcfarm has is a
field of its own name; those of other plugins are written `type: NAME` and `config: {…}`. Unknown and repeated fields
are refused; every error names the file, the line and the field.
"""

from __future__ import annotations

import difflib
import time
from typing import Annotated, Any, NamedTuple

import msgspec

from rcfarm.operations import rc_apply
from rcfarm.operations.documents import BadFile, Document, Source, read
from rcfarm.operations.errors import BadInput
from rcfarm.operations.quotas import check_resource
from rcfarm.operations.rc_apply import RCDocument
from rcfarm.operations.schedules import validated
from rcfarm.operations.task_parts import check_part
from rcfarm.operations.tasks import TYPES, checked
from store.schema.keys import is_dns_label
from store.schema.quota import QuotaLimit
from store.schema.records import Count, Labels
from store.schema.schedules import CatchUp, Missed, Overlap, ScheduleSpec
from store.schema.tasks import Priority, Seconds, TaskSpec, Units, Weight


class TaskFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task, as written, without its id and its own part; the fields are those of `TaskSpec`."""

    type: str
    config: dict[str, Any] = {}
    project: str = "default"
    domain: str = "default"
    name: str = ""
    namespace: str = ""
    inputs: dict[str, Any] = {}
    outputs: dict[str, str] = {}
    retries: Count = 0
    quotas: dict[str, Units] = {}
    priority: Priority = 0
    fair_key: str = ""
    weight: Weight = 1.0
    queue_timeout: Seconds = 0.0
    execution_timeout: Seconds = 0.0
    active_deadline: Seconds = 0.0
    cache_version: str = ""
    cache_serialize: bool = False
    cache_overwrite: bool = False
    interruptible: bool = False
    labels: Labels = {}
    annotations: Labels = {}
    environment: Labels = {}
    service_account: str = ""
    resources: dict[str, Any] = {}
    depends_on: tuple[str, ...] = ()
    plugin: str = ""


class RateFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rate limit, as written; the fields are those of `Rate`."""

    count: Units
    per: Annotated[float, msgspec.Meta(gt=0.0, le=1e9)] = 1.0
    burst: Units | None = None


class QuotaFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A quota, as written; the fields are those of `QuotaLimit`."""

    quota: str
    units: Count
    project_units: Count | None = None
    namespace_units: Count | None = None
    keys: dict[str, Count] = {}
    rate: RateFields | None = None
    key_rates: dict[str, RateFields] = {}
    weights: dict[str, Weight] = {}
    description: str = ""


class ScheduleFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A schedule, as written; the fields are those of `ScheduleSpec`."""

    schedule: str
    cron: str | Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=16)]
    task: dict[str, Any]
    time_zone: str = "UTC"
    overlap: Overlap = "forbid"
    missed: Missed = "last"
    max_missed: CatchUp = 10
    start_deadline: Seconds = 0.0
    keep_succeeded: Count | None = 3
    keep_failed: Count | None = 10
    paused: bool | None = None


class TaskDocument(NamedTuple):
    """One task of a file. `at`: "FILE:LINE" of its beginning."""

    at: str
    spec: TaskSpec


class QuotaDocument(NamedTuple):
    """One quota of a file."""

    at: str
    resource: str
    limit: QuotaLimit


class ScheduleDocument(NamedTuple):
    """One schedule of a file. `paused` None: not given, so it stays as it is."""

    at: str
    spec: ScheduleSpec
    paused: bool | None


class Contents(NamedTuple):
    """The documents of one or several files."""

    rcs: list[RCDocument]
    tasks: list[TaskDocument]
    quotas: list[QuotaDocument]
    schedules: list[ScheduleDocument]


def load(name: str, raw: bytes) -> Contents:
    """Decode the documents of a file. Raises `BadFile`, which calls the file `name`."""
    contents = Contents([], [], [], [])
    for document in read(name, raw, "a task, an rc, a quota or a schedule"):
        written = document.value() if document.is_mapping else None
        if not isinstance(written, dict):
            raise document.source.error("a document is a mapping of fields: a task, an rc, a quota or a schedule")
        if "schedule" in written:
            contents.schedules.append(_schedule(document.source, written))
        elif "quota" in written:
            contents.quotas.append(_quota(document.source, written))
        elif "task" in written:
            contents.tasks.append(_task(document.source, written))
        else:
            contents.rcs.append(rc_apply.rc_document(Document(document.source, True, lambda got=written: got)))  # type: ignore[misc]
    return contents


def joined(contents: list[Contents]) -> Contents:
    """Return the documents of several files. Raises `BadFile` if an object is given twice."""
    whole = Contents(
        [each for one in contents for each in one.rcs],
        [each for one in contents for each in one.tasks],
        [each for one in contents for each in one.quotas],
        [each for one in contents for each in one.schedules],
    )
    rc_apply.check_distinct(whole.rcs)
    named = [("task", each.at, each.spec.id) for each in whole.tasks]
    named += [("quota", each.at, each.resource) for each in whole.quotas]
    named += [("schedule", each.at, each.spec.name) for each in whole.schedules]
    first: dict[tuple[str, str], str] = {}
    for kind, at, name in named:
        if (earlier := first.setdefault((kind, name), at)) is not at:
            raise BadFile(f"{at}: {kind} {name} is given twice, first at {earlier}")
    return whole


def _task(source: Source, written: dict[str, Any]) -> TaskDocument:
    task_id, fields = written["task"], {key: value for key, value in written.items() if key != "task"}
    if not isinstance(task_id, str):
        raise source.error("must be the execution's id; its fields stand beside it, not below it", ("task",))
    if not is_dns_label(task_id):
        raise source.error(
            f"{task_id!r} is not a DNS label (lower-case letters, digits and '-', at most 63)", ("task",)
        )
    return TaskDocument(source.at, _spec(source, task_id, fields, ()))


def _spec(source: Source, task_id: str, written: dict[str, Any], prefix: tuple[str, ...]) -> TaskSpec:
    given = [key for key in TYPES if key in written]
    if len(given) > 1:
        raise source.error(f"a task has one kind, not {' and '.join(given)}", (*prefix, given[1]))
    fields = dict(written)
    if given:
        for other in ("type", "config"):
            if other in written:
                raise source.error(f"{given[0]} says it already; remove this field", (*prefix, other))
        fields |= {"type": given[0], "config": fields.pop(given[0])}
    elif "type" not in written:
        unknown = [str(key) for key in written if key not in TaskFields.__struct_fields__]
        where = (*prefix, unknown[0]) if unknown else prefix
        if unknown and (close := difflib.get_close_matches(unknown[0], (*TYPES, *TaskFields.__struct_fields__), n=1)):
            raise source.error(f"unknown field; did you mean {close[0]}?", where)
        kinds = ", ".join(TYPES)
        raise source.error(f"the kind of task is missing: give one of {kinds}, or type and config", where)
    own = (*prefix, given[0] if given else "config")
    if not isinstance(fields.get("config", {}), dict):
        raise source.error("must be a mapping: the fields of the task's kind", own)
    known = source.convert(fields, TaskFields, prefix, (TaskFields,))
    check_part(source, known.type, known.config, known.inputs, own)
    try:
        return checked(TaskSpec(id=task_id, **msgspec.structs.asdict(known)))
    except BadInput as error:
        field, _, message = str(error).partition(": ")
        raise source.error(message, (*prefix, field)) from error


def _quota(source: Source, written: dict[str, Any]) -> QuotaDocument:
    fields = source.convert(written, QuotaFields, (), (QuotaFields, RateFields))
    try:
        check_resource(fields.quota)
    except BadInput as error:
        raise source.error(str(error), ("quota",)) from error
    given = msgspec.to_builtins(fields)
    del given["quota"]
    return QuotaDocument(source.at, fields.quota, msgspec.convert(given, QuotaLimit))


def _schedule(source: Source, written: dict[str, Any]) -> ScheduleDocument:
    fields = source.convert(written, ScheduleFields, (), (ScheduleFields,))
    given = msgspec.structs.asdict(fields)
    name, task, paused = given.pop("schedule"), given.pop("task"), given.pop("paused")
    given["cron"] = (fields.cron,) if isinstance(fields.cron, str) else fields.cron
    each = msgspec.structs.replace(_spec(source, "each-run", task, ("task",)), id="")
    spec = ScheduleSpec(name=name, task=each, paused=bool(paused), **given)
    try:
        return ScheduleDocument(source.at, validated(spec, time.time()), paused)
    except BadInput as error:
        field, _, message = str(error).partition(": ")
        raise source.error(message, (field,)) from error
