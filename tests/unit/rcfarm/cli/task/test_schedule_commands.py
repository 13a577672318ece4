"""`rcfarm schedule`, and schedules in `rcfarm apply`, on an embedded store."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime

import pytest

from rcfarm.cli.kit.output import seconds
from store.kv import ops
from store.schema.records import decode, encode
from store.schema.schedules import ScheduleSpec, ScheduleState, Skip
from store.schema.tasks import TaskSpec
from tests.support import require
from tests.support.programs.cli import CommandLine

NIGHTLY = """\
schedule: nightly
cron: "30 3 * * *"
time_zone: Asia/Tokyo
task:
  process: {command: [backup]}
  retries: 2
"""


async def _spec(cli: CommandLine, name: str = "nightly") -> ScheduleSpec:
    key = cli.keys.schedule_spec(name)
    entry = require(await cli.store.get(key))
    return decode(ScheduleSpec, key, entry.value)


async def _apply(cli: CommandLine, text: str = NIGHTLY) -> str:
    ran = await cli("schedule", "apply", "-f", "-", stdin=text)
    assert ran.code == 0, ran.err
    return ran.out


async def test_apply_creates_changes_and_leaves_alone(cli: CommandLine) -> None:
    before = time.time()
    assert await _apply(cli) == "schedule nightly created\n"
    spec = await _spec(cli)
    assert (spec.cron, spec.task.type, spec.task.retries) == (("30 3 * * *",), "process", 2)
    assert before <= spec.since <= time.time()
    assert spec.submitted_by
    assert await _apply(cli) == "schedule nightly unchanged\n"
    assert await _apply(cli, NIGHTLY + "overlap: allow\n") == "schedule nightly changed\n"
    changed = await _spec(cli)
    assert (changed.generation, changed.since, changed.created_at) == (2, spec.since, spec.created_at)
    assert (
        await _apply(cli, NIGHTLY.replace('"30 3 * * *"', '["0 1 * * *", "@hourly"]')) == "schedule nightly changed\n"
    )
    assert (await _spec(cli)).since > spec.since  # runs of the new expressions count from now on


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('cron: "0 0 30 2 *"', ":2: cron: '0 0 30 2 *' never fits a date; correct its days and months"),
        ('cron: "0 25 * * *"', ":2: cron: '0 25 * * *' has a bad hour"),
        ("cron: []", ":2: cron: "),
        ("time_zone: Europe/Atlantis", ":3: time_zone: 'Europe/Atlantis' is not known"),
        ("schedule: Nightly", ":1: schedule: 'Nightly' is not a DNS label"),
        (f"schedule: {'n' * 51}", "at most 50 characters"),
        ("overlp: allow", "overlp: unknown field; did you mean overlap?"),
        ("max_missed: 0", "max_missed: "),
    ],
)
async def test_a_wrong_schedule_is_refused_with_its_line(cli: CommandLine, line: str, message: str) -> None:
    name = line.partition(":")[0]
    lines = NIGHTLY.splitlines()
    place = next((number for number, each in enumerate(lines) if each.startswith(f"{name}:")), None)
    if place is None:
        lines.append(line)
    else:
        lines[place] = line
    ran = await cli("schedule", "apply", "-f", "-", stdin="\n".join(lines))
    assert ran.code == 1
    assert message in ran.err
    assert await cli.store.keys(cli.keys.schedules) == []


async def test_a_task_in_a_schedule_is_checked(cli: CommandLine) -> None:
    ran = await cli("schedule", "apply", "-f", "-", stdin=NIGHTLY.replace("command:", "comand:"))
    assert (ran.code, "task.process.comand: unknown field; did you mean command?" in ran.err) == (1, True)
    ran = await cli("schedule", "apply", "-f", "-", stdin=NIGHTLY + "---\nquota: gpu\nunits: 1\n")
    assert (ran.code, "the files hold other things than schedules" in ran.err) == (1, True)


async def test_the_next_runs_are_shown_in_the_zone_of_the_schedule(cli: CommandLine) -> None:
    await _apply(cli)
    shown = await cli("schedule", "get", "nightly")
    assert shown.code == 0
    assert shown.out.count(" 03:30 JST") == 3
    assert all(len(line) <= 80 for line in shown.out.splitlines())
    listed = (await cli("schedule", "list", "-o", "json")).json[0]
    moments = [datetime.fromisoformat(each) for each in listed["next"]]
    assert [(each.hour, each.minute) for each in moments] == [(18, 30)] * 3
    table = (await cli("schedule", "list")).out
    assert "nightly" in table
    assert "next run in " in table


def test_a_long_time_is_shown_in_hours_and_days() -> None:
    assert [seconds(each) for each in (65, 3600, 41400, 86399, 183_600)] == [
        "1m 5s",
        "1h 0m",
        "11h 30m",
        "23h 59m",
        "2d 3h",
    ]


async def test_runs_and_skips_are_shown(cli: CommandLine) -> None:
    await _apply(cli)
    state = ScheduleState(
        decided=6e8, last="nightly-1", last_moment=6e8, active=("nightly-1",), pending=6e8,
        skips=(Skip("Overlap", "nightly-0 had not ended", 6e8, 2),),
    )  # fmt: skip
    await cli.store.put(cli.keys.schedule_state("nightly"), encode(state))
    shown = (await cli("schedule", "get", "nightly")).out
    assert "2 runs up to 1989-01-05T10:40:00.000Z: Overlap: nightly-0 had not ended" in " ".join(shown.split())
    assert "a run begins when the execution that it replaces has ended" in shown


async def test_pause_and_resume(cli: CommandLine) -> None:
    await _apply(cli)
    assert (await cli("schedule", "pause", "nightly")).out == "schedule nightly paused\n"
    assert (await cli("schedule", "pause", "nightly")).out == "schedule nightly unchanged\n"
    shown = (await cli("schedule", "get", "nightly", "-o", "json")).json
    assert (shown["paused"], shown["next"]) == (True, [])
    assert await _apply(cli) == "schedule nightly unchanged\n"  # the file does not speak of a pause
    since = (await _spec(cli)).since
    assert (await cli("schedule", "resume", "nightly")).out == "schedule nightly resumed\n"
    assert (await _spec(cli)).since > since
    assert await _apply(cli, NIGHTLY + "paused: true\n") == "schedule nightly changed\n"


async def test_trigger_submits_the_task(cli: CommandLine) -> None:
    await _apply(cli)
    done = (await cli("schedule", "trigger", "nightly", "-o", "json")).json
    key = cli.keys.task_spec(done["task"])
    entry = require(await cli.store.get(key))
    spec = decode(TaskSpec, key, entry.value)
    assert (spec.schedule, spec.type, spec.name, spec.retries) == ("nightly", "process", "nightly", 2)
    assert "SCHEDULE_TRIGGERED" in (await cli("audit", "export")).out


async def test_trigger_obeys_the_overlap_rule(cli: CommandLine) -> None:
    await _apply(cli)
    first = (await cli("schedule", "trigger", "nightly", "-o", "json")).json["task"]
    refused = await cli("schedule", "trigger", "nightly")
    assert refused.code == 1
    assert f"task {first} has not ended, and overlap is forbid" in refused.err
    assert "rcfarm schedule trigger nightly --force" in refused.err
    await asyncio.sleep(1.0 - time.time() % 1.0)  # two runs in one second have one id
    second = (await cli("schedule", "trigger", "nightly", "--force", "-o", "json")).json["task"]
    key = cli.keys.schedule_state("nightly")
    entry = require(await cli.store.get(key))
    assert decode(ScheduleState, key, entry.value).active == (first, second)
    assert await _apply(cli, NIGHTLY + "overlap: replace\n") == "schedule nightly changed\n"
    await asyncio.sleep(1.0 - time.time() % 1.0)
    replaced = (await cli("schedule", "trigger", "nightly")).out
    assert f"begins when {first}, {second}, which it replaces, has ended" in " ".join(replaced.split())
    for task in (first, second):
        entry = require(await cli.store.get(cli.keys.task_spec(task)))
        assert b"which an operator triggered" in entry.value


async def test_delete(cli: CommandLine) -> None:
    await _apply(cli)
    assert (await cli("schedule", "delete", "nightly", "--yes")).out == "schedule nightly deleted\n"
    for verb in ("get", "pause", "trigger"):
        ran = await cli("schedule", verb, "nightly")
        assert (ran.code, "there is no schedule nightly" in ran.err) == (1, True)


async def test_one_that_cannot_be_read_hides_no_other(cli: CommandLine) -> None:
    await _apply(cli)
    await cli.store.txn([ops.put(cli.keys.schedule_spec("broken"), b"{]")])
    listed = {each["name"]: each for each in (await cli("schedule", "list", "-o", "json")).json}
    assert listed["broken"]["spec"] is None
    assert listed["broken"]["bad"]
    assert listed["nightly"]["next"]
    assert (await cli("schedule", "pause", "broken")).code == 1
    assert await _apply(cli, NIGHTLY.replace("schedule: nightly", "schedule: broken")) == "schedule broken created\n"


async def test_apply_takes_schedules_beside_quotas(cli: CommandLine) -> None:
    """The difference is shown first, and shows the schedule as it stands in a file."""
    both = "quota: gpu\nunits: 3\n---\n" + NIGHTLY
    ran = await cli("apply", "-f", "-", "--yes", stdin=both)
    assert ran.code == 0, ran.err
    assert "schedule nightly created\n" in ran.out
    for line in ("+schedule: nightly", "+time_zone: Asia/Tokyo", "+  process:", "+  retries: 2"):
        assert line in ran.err
    again = await cli("apply", "-f", "-", "--yes", stdin=both)
    assert "schedule nightly unchanged\n" in again.out
