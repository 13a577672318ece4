"""`rcfarm task`, `rcfarm quota` and `rcfarm apply` on an embedded store, with the test in the place of the engine."""

from __future__ import annotations

import asyncio
import io
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rcfarm.cli.kit.output import Output, timestamp
from rcfarm.cli.kit.tasks import summary, task_info
from rcfarm.doctor.tasks import examine_tasks
from rcfarm.operations.tasks import Tasks
from store.kv import ops
from store.kv.protocol import SessionSpec
from store.schema.quota import QuotaGrant, QuotaLimit, QuotaTicket
from store.schema.records import decode, encode
from store.schema.tasks import EngineMember, EnginePause, TaskError, TaskEvent, TaskOwner, TaskSpec, TaskState, Wait
from tests.support import require
from tests.support.programs.cli import CommandLine

TWO_LINES = "task: hello\nprocess: {command: [echo, hi]}\n"
SCHEDULE = "schedule: often\ncron: '0 3 * * *'\ntask: {process: {command: [a]}}\n"
INFO = {
    "custom_info": {"output": "last words"},
    "external_resources": [{"external_id": "node-1/hello-0"}],
    "logs": [],
}


async def _write(cli: CommandLine, task: str, **fields: Any) -> None:
    await cli.store.txn([ops.put(cli.keys.task_state(task), encode(TaskState(**fields)))])


async def _own(cli: CommandLine, task: str, *pauses: EnginePause) -> None:
    session = (await cli.store.create_session(SessionSpec("engine-1", ttl=86400, check_ttl=None))).id
    member = encode(EngineMember(engine="engine-1", pauses=pauses))
    owner = encode(TaskOwner("engine-1", "2026-01-01T00:00:00Z"))
    await cli.store.txn(
        [ops.lock(cli.keys.task_owner(task), owner, session), ops.lock(cli.keys.engine("engine-1"), member, session)]
    )


def _ended(outcome: str, **fields: Any) -> dict[str, Any]:
    now = time.time()
    return {"step": "done", "outcome": outcome, "queued_at": now - 3, "ended_at": now, "info": INFO, **fields}


async def test_two_lines_are_a_task(cli: CommandLine) -> None:
    """The kind of task is a field of its own name, and the record says who submitted it."""
    ran = await cli("task", "submit", "-f", "-", stdin=TWO_LINES)
    again = await cli("task", "submit", "-f", "-", stdin=TWO_LINES)
    new = await cli("task", "submit", "--new", "-f", "-", "-o", "json", stdin=TWO_LINES)

    assert (ran.code, ran.out) == (0, "task hello submitted\n")
    assert again.code == 1
    assert "task hello exists already" in again.err
    assert new.json["id"].startswith("hello-")
    spec = require((await Tasks(cli.store, cli.keys).get("hello")).spec)
    assert (spec.type, spec.config) == ("process", {"command": ["echo", "hi"]})
    assert spec.submitted_by
    audited = (await cli("audit", "export")).out
    assert "TASK_SUBMITTED" in audited


async def test_an_only_argument_that_names_a_file_is_the_file(cli: CommandLine, tmp_path: Path) -> None:
    """Otherwise a node would be asked for a program of that name."""
    file = tmp_path / "hello.yaml"
    file.write_text(TWO_LINES)

    ran = await cli("task", "submit", str(file))
    missing = await cli("task", "submit", str(tmp_path / "other.yaml"))

    assert (ran.code, ran.out) == (0, "task hello submitted\n")
    assert (missing.code, "other.yaml: can't be read: No such file" in missing.err) == (1, True)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("task: hello\nproces: {command: [a]}\n", ":2: proces: unknown field; did you mean process?"),
        ("task: hello\nprocess: {comand: [a]}\n", ":2: process.comand: unknown field; did you mean command?"),
        ("task: hello\nprocess: {command: [a]}\nretrys: 2\n", ":3: retrys: unknown field; did you mean retries?"),
        ("task:\n  id: hello\n  process: {command: [a]}\n", ":1: task: must be the execution's id; its fields stand"),
        ("task: Hello\nprocess: {command: [a]}\n", ":1: task: 'Hello' is not a DNS label"),
        (
            "task: hello\nprocess: {command: [a]}\nquotas: {gpu: 0}\n",
            ":3: quotas.gpu: expected a whole number of at least 1",
        ),
        ("task: hello\nprocess: {command: [a]}\nrc: {}\n", "a task has one kind, not process and rc"),
        ("task: hello\nprocess: {command: [a]}\ndepends_on: [hello]\n", ":3: depends_on: task hello can't wait for"),
        ("quota: gpu\nunits: 3\n", "the files hold other things than tasks"),
        (SCHEDULE, "the files hold other things than tasks; `rcfarm apply -f FILE` applies all of them"),
    ],
)
async def test_a_bad_file_names_the_line_and_the_field(cli: CommandLine, raw: str, message: str) -> None:
    """Nothing is written."""
    ran = await cli("task", "run", "-f", "-", stdin=raw)

    assert ran.code == 1
    assert message in ran.err
    assert await cli.store.keys(cli.keys.tasks) == []


async def test_explain_shows_that_the_plugin_is_paused(cli: CommandLine) -> None:
    """Since when, why, and when it is tried next; by the type before the plugin was called, and only what is needed."""
    now = time.time()
    pause = EnginePause(
        kind="plugin",
        name="process",
        calls="handle",
        types=("process",),
        since=now - 120,
        probe_at=now + 30,
        probes=6,
        error="RuntimeError: boom",
    )
    await cli("task", "submit", "-f", "-", stdin=TWO_LINES)
    await _own(cli, "hello", pause)
    began = await cli("task", "explain", "hello", "-o", "json")
    await _write(cli, "hello", step="running", phase="PhaseRunning", plugin="process")
    running = await cli("task", "explain", "hello")
    await _write(cli, "hello", step="cleaning", phase="PhaseRunning", plugin="process")
    cleaning = await cli("task", "explain", "hello")
    await _write(cli, "hello", step="running", phase="PhaseRunning", plugin="other")
    other = await cli("task", "explain", "hello")

    [reason] = began.json["task"]["reasons"]
    assert reason["code"] == "PluginPaused"
    assert (reason["since"], reason["until"]) == (timestamp(now - 120), timestamp(now + 30))
    assert "PluginPaused: on engine engine-1, plugin process takes no calls since" in running.out
    assert "6 tries since failed, too; the last error is: RuntimeError: boom" in " ".join(running.out.split())
    assert "changes in 29s" in running.out or "changes in 30s" in running.out
    assert "PluginPaused" not in cleaning.out
    assert "PluginPaused" not in other.out


@pytest.mark.parametrize(
    ("outcome", "code", "words"),
    [("success", 0, "task hello succeeded after 3"), ("failure", 1, "Exit: exit code 7"), ("aborted", 1, "aborted")],
)
async def test_run_follows_to_the_end(cli: CommandLine, outcome: str, code: int, words: str) -> None:
    """One line per change on standard error, the verdict and the last lines of output on standard output."""
    running = asyncio.create_task(cli("task", "run", "-f", "-", stdin=TWO_LINES))
    while not await cli.store.keys(cli.keys.tasks):
        await asyncio.sleep(0.01)
    await _own(cli, "hello")
    await _write(cli, "hello", phase="PhaseRunning", step="running", info=INFO)
    await asyncio.sleep(0.2)
    error = TaskError("Exit", "exit code 7", "USER") if outcome == "failure" else None
    await _write(cli, "hello", **_ended(outcome, error=error))
    ran = await running

    assert ran.code == code
    assert words in ran.out
    assert "| last words" in ran.out
    assert "task hello: running on node-1/hello-0\n" in ran.err


async def test_run_ends_after_its_time_limit(cli: CommandLine) -> None:
    """Exit code 2, and the reason; the task stays."""
    ran = await cli("task", "run", "--timeout", "0.3", "-f", "-", stdin=TWO_LINES)

    assert ran.code == 2
    assert "task hello has not ended: it is waiting" in ran.out
    assert (await cli("task", "status", "hello")).out.count("EngineMissing: no live engine") == 1


async def test_abort_and_retry(cli: CommandLine) -> None:
    """An abort is a request in the spec; only an ended execution runs again, and then without that request."""
    await cli("task", "submit", "-f", "-", stdin=TWO_LINES)
    early = await cli("task", "retry", "hello", "--detach")
    aborted = await cli("task", "abort", "hello", "--detach", "--reason", "wrong node")
    await _write(cli, "hello", **_ended("aborted"))
    late = await cli("task", "abort", "hello")
    again = await cli("task", "retry", "hello", "--detach")

    assert "only an ended one can run again" in early.err
    assert aborted.out == "task hello asked to stop\n"
    assert "task hello has aborted already" in late.err
    assert again.out == "task hello started again\n"
    entry = require(await cli.store.get(cli.keys.task_spec("hello")))
    spec = decode(TaskSpec, entry.key, entry.value)
    assert (spec.abort, spec.rerun, spec.generation) == (None, 1, 3)


async def test_an_unreadable_record_is_shown(cli: CommandLine) -> None:
    """It hides no other task."""
    await cli("task", "submit", "-f", "-", stdin=TWO_LINES)
    await cli.store.txn([ops.put(cli.keys.task_spec("bad"), b"{")])

    ran = await cli("task", "list", "-o", "json")

    assert {each["id"]: each["state"] for each in ran.json} == {"hello": "waiting", "bad": "unreadable"}
    assert (await cli("task", "list", "--state", "running")).err == "no task matches\n"


async def test_no_text_of_a_plugin_passes_for_a_line_of_the_command(cli: CommandLine) -> None:
    """Its line breaks stay, indented."""
    await cli("task", "submit", "-f", "-", stdin=TWO_LINES)
    wait = Wait("Plugin", "created\nhello  succeeded", since=time.time())
    await _write(cli, "hello", phase="PhaseQueued", reasons=(wait,))

    lines = (await cli("task", "status", "hello")).out.splitlines()

    [line] = [line for line in lines if "succeeded" in line]
    assert line.startswith(" ")


async def test_explain_shows_position_and_holders(cli: CommandLine) -> None:
    """Who holds the units that the task waits for, and how many tasks are before it."""
    await cli("quota", "set", "gpu", "1")
    await cli("task", "submit", "-f", "-", stdin=TWO_LINES + "quotas: {gpu: 1}\n")
    await _own(cli, "hello")
    wait = Wait("LimitReached", "1 of 1 units of gpu are held", since=time.time())
    await _write(cli, "hello", phase="PhaseWaitingForResources", reasons=(wait,))
    fields: dict[str, Any] = {"order": "01", "since": time.time()}
    grant = QuotaGrant(token="first", execution="first", **fields)
    ticket = QuotaTicket(token="hello", execution="hello", **fields)
    await cli.store.txn(
        [
            ops.put(cli.keys.quota_grant("gpu", "first"), encode(grant)),
            ops.put(cli.keys.quota_ticket("gpu", "hello"), encode(ticket)),
        ]
    )

    task, quota = await cli("task", "explain", "hello"), await cli("quota", "explain", "gpu", "-o", "json")
    found = (await cli("task", "explain", "hello", "-o", "json")).json

    [reason], [use] = found["task"]["reasons"], found["quotas"]
    assert reason["code"] == "LimitReached"
    assert reason["message"].endswith("of gpu are held; held by first; position 1 of 1")
    assert (use["code"], use["position"], [each["execution"] for each in use["holders"]]) == (
        "LimitReached", 1, ["first"],
    )  # fmt: skip
    assert "LimitReached: 1 of 1 units of gpu are held" in task.out
    assert "position 1 of 1 in the queue" in task.out
    assert "first" in task.out
    assert quota.json["used"] == 1
    assert [(each["execution"], each["defect"]) for each in quota.json["holders"]] == [("first", "it does not exist")]
    assert [(each["execution"], each["position"]) for each in quota.json["waiters"]] == [("hello", 1)]


async def test_holders_whose_records_are_gone_are_named(cli: CommandLine) -> None:
    """A holder of units that no engine can work on, by `quota explain` and by the doctor."""
    await cli("quota", "set", "gpu", "3")
    await cli("task", "submit", "-f", "-", stdin=TWO_LINES)
    for name in ("deleted", "broken"):
        await _write(cli, name, phase="PhaseRunning")
    await cli.store.put(cli.keys.task_spec("broken"), b"[")
    for name in ("hello", "deleted", "broken", "absent"):
        grant = QuotaGrant(token=name, execution=name, order="01", since=time.time())
        await cli.store.put(cli.keys.quota_grant("gpu", name), encode(grant))

    quota, shown = await cli("quota", "explain", "gpu", "-o", "json"), await cli("quota", "explain", "gpu")
    findings = await examine_tasks(cli.store, cli.keys)

    whys = {
        "hello": "",
        "deleted": "its spec was deleted",
        "broken": "its spec can't be read",
        "absent": "it does not exist",
    }
    assert {each["execution"]: each["defect"] for each in quota.json["holders"]} == whys
    assert "deleted holds units that no engine releases: its spec was deleted" in shown.out
    assert "`rcfarm task explain deleted`" in shown.out
    for name in ("deleted", "broken"):
        assert f"`rcfarm task abort {name}`" in " ".join((await cli("task", "explain", name)).out.split())
    assert "`rcfarm task abort broken`" in {finding.advice for finding in findings}
    texts = [finding.message for finding in findings if "are held by task" in finding.message]
    assert sorted(texts) == sorted(
        f"1 units of gpu are held by task {name}, and {why}" for name, why in whys.items() if why
    )


async def test_a_damaged_task_is_aborted_or_dropped(cli: CommandLine) -> None:
    """A bad spec is written again with the abort; a bad state names the command that drops the task."""
    await cli("task", "submit", "-f", "-", stdin=TWO_LINES + "labels: {team: a}\n")
    await cli.store.put(cli.keys.task_spec("hello"), b'{"id": "hello", "labels": {"team": "a"}, "retries": "x"}')
    await _write(cli, "hello", step="running", phase="PhaseRunning", plugin="process", generation=5)

    aborted = await cli("task", "abort", "hello", "--detach")
    spec = (await Tasks(cli.store, cli.keys).get("hello")).spec
    await cli.store.put(cli.keys.task_state("hello"), b"{")
    refused, explained = await cli("task", "abort", "hello"), await cli("task", "explain", "hello")
    dropped = await cli("task", "delete", "--force", "--yes", "hello")

    assert (aborted.code, aborted.out) == (0, "task hello asked to stop\n")
    assert spec is not None
    assert spec.abort is not None
    assert (spec.plugin, spec.labels, spec.retries, spec.generation) == ("process", {"team": "a"}, 0, 6)
    assert refused.code == 1
    assert "rcfarm task delete --force hello" in " ".join(refused.err.split())
    assert "rcfarm task delete --force hello" in " ".join(explained.out.split())
    assert (dropped.code, await cli.store.keys(cli.keys.tasks)) == (0, [])


async def test_history_and_logs(cli: CommandLine) -> None:
    """Every event, and the last lines of each attempt."""
    await cli("task", "submit", "-f", "-", stdin=TWO_LINES)
    for n, phase in enumerate(("PhaseQueued", "PhaseRunning", "PhaseSuccess")):
        event = TaskEvent(n=n, at=time.time(), attempt=0, phase=phase, info=INFO)  # type: ignore[arg-type]
        await cli.store.txn([ops.put(cli.keys.task_event("hello", n), encode(event))])
    await _write(cli, "hello", **_ended("success"))

    history, logs = await cli("task", "history", "hello", "-o", "json"), await cli("task", "logs", "hello")

    assert [each["phase"] for each in history.json] == ["PhaseQueued", "PhaseRunning", "PhaseSuccess"]
    assert logs.out == "last words\n"


async def test_quotas_are_set_listed_and_deleted(cli: CommandLine) -> None:
    """What is not given stays as it is."""
    first = await cli("quota", "set", "gpu", "3", "--key", "team-a=2", "--rate", "10/60")
    await cli("quota", "set", "gpu", "4")
    listed = await cli("quota", "list", "-o", "json")
    gone = await cli("quota", "delete", "gpu", "--yes")

    assert first.out == "quota gpu: 3 units (it had none)\n"
    limit = msgspec.convert(listed.json[0]["limit"], QuotaLimit)
    assert (limit.units, limit.keys) == (4, {"team-a": 2})
    assert limit.rate is not None
    assert gone.code == 0
    assert "-1 units: the number is negative" in (await cli("quota", "set", "gpu", "-1")).err


async def test_apply_takes_every_kind_of_document(cli: CommandLine) -> None:
    """The same file again changes nothing; a task of the same id that differs is refused."""
    rc = "replicas: 0\nmanifest: {id: web, launchables: {w: {command: [a]}}}\n"
    raw = f"quota: gpu\nunits: 3\n---\n{TWO_LINES}---\n{rc}"
    first = await cli("apply", "-f", "-", "--yes", "--detach", stdin=raw)
    again = await cli("apply", "-f", "-", "--detach", stdin=raw)
    other = await cli("apply", "-f", "-", "--yes", "--detach", stdin=TWO_LINES.replace("hi", "ho"))

    assert first.out == "rc web created\nquota gpu created\ntask hello submitted\n"
    assert again.out == "rc web unchanged\nquota gpu unchanged\ntask hello unchanged\n"
    assert other.code == 1
    assert "a task never changes" in other.err


@pytest.mark.parametrize(
    ("raw", "kind"), [(TWO_LINES, "task"), ("units: 3\nquota: gpu\n", "quota"), (SCHEDULE, "schedule")]
)
async def test_what_is_no_rc_names_the_command_that_applies_it(
    cli: CommandLine, raw: str, kind: str, tmp_path: Path
) -> None:
    """A file and standard input; a file that has an RC before it is refused as a whole."""
    file = tmp_path / "work.yaml"
    file.write_text("id: web\nreplicas: 0\nmanifest: {id: web, launchables: {w: {command: [a]}}}\n---\n" + raw)
    ran = await cli("rc", "apply", "-f", str(file), "--yes")
    piped = await cli("rc", "apply", "-f", "-", "--yes", stdin=raw)

    assert (ran.code, piped.code) == (1, 1)
    assert f"{kind}: this is a {kind}, not an rc; `rcfarm apply -f {file}` applies every kind" in ran.err
    assert "not an rc; `rcfarm apply -f -` applies every kind" in piped.err
    assert await cli.store.keys(cli.keys.rcs) == []
    assert (await cli("apply", "-f", str(file), "--yes", "--detach")).code == 0


async def test_a_folder_stands_for_its_files(cli: CommandLine, tmp_path: Path) -> None:
    """In order of name, also in folders below it; other files and hidden ones are not read, and an object may be in
    one file only."""
    (tmp_path / "b.yaml").write_text(TWO_LINES)
    (tmp_path / "a.yml").write_text("quota: gpu\nunits: 3\n")
    (tmp_path / "notes.txt").write_text("- no YAML of ours")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / ".c.yaml").write_text("- no document")
    (tmp_path / "more" / "d.json").write_text('{\n\t"quota": "tpu",\n\t"units": 1\n}')
    ran = await cli("apply", "-f", str(tmp_path), "--yes", "--detach")
    again = await cli("apply", "-f", str(tmp_path), "-f", "-", "--yes", stdin=TWO_LINES)
    (tmp_path / "more" / "c.yaml").write_text("- no document")
    empty = await cli("apply", "-f", str(tmp_path / "more"), "--yes")
    for name in ("c.yaml", "d.json"):
        (tmp_path / "more" / name).unlink()
    none = await cli("apply", "-f", str(tmp_path / "more"), "--yes")

    assert (ran.code, ran.out) == (0, "quota gpu created\nquota tpu created\ntask hello submitted\n")
    assert f"standard input:1: task hello is given twice, first at {tmp_path}/b.yaml:1" in again.err
    assert "c.yaml:1: a document is a mapping of fields" in empty.err
    assert "no file in the folder, or below it, ends in .yaml, .yml or .json" in none.err


async def test_get_shows_a_file_that_can_be_applied(cli: CommandLine) -> None:
    """What `get` prints is the same task."""
    await cli("task", "submit", "-f", "-", stdin=TWO_LINES + "retries: 2\nquotas: {gpu: 1}\n")
    shown = await cli("task", "get", "hello")

    assert (await cli("apply", "-f", "-", stdin=shown.out)).out == "task hello unchanged\n"


@pytest.mark.parametrize("ring", [("a", "b"), ("a", "b", "c")])
async def test_explain_names_a_ring_of_dependencies(cli: CommandLine, ring: tuple[str, ...]) -> None:
    """Nothing else would say why none of them begins; one that has ended breaks the ring."""
    waits = zip(("late", *ring), ("a", *ring[1:], "a"), strict=True)
    specs = [TaskSpec(id=each, type="process", depends_on=(other,)) for each, other in waits]
    await cli.store.txn([ops.create(cli.keys.task_spec(spec.id), encode(spec)) for spec in specs])

    inside, outside = [await cli("task", "explain", each) for each in ("a", "late")]
    await _write(cli, "b", **_ended("aborted"))
    broken = await cli("task", "explain", "a", "-o", "json")

    words = f"never begin: {' -> '.join((*ring, 'a'))}; abort one of them"
    assert words in inside.out
    assert words in outside.out
    assert broken.json["cycle"] == []


async def test_explain_says_when_the_task_is_looked_at_again(cli: CommandLine) -> None:
    """The end of a wait and the deadlines of the file; nothing for a task that no engine has."""
    await cli("task", "submit", "-f", "-", stdin=TWO_LINES + "queue_timeout: 500\n")
    now = time.time()
    wait = Wait("Backoff", "failed twice in a row", since=now, until=now + 900)
    await _write(cli, "hello", phase="PhaseQueued", waiting_at=now, reasons=(wait,))
    assert (await cli("task", "explain", "hello", "-o", "json")).json["wakes_at"] == ""
    await _own(cli, "hello")

    shown, explained = await cli("task", "explain", "hello"), await cli("task", "explain", "hello", "-o", "json")
    assert "looked at again in 8m" in shown.out
    assert explained.json["wakes_at"] == timestamp(now + 500)


async def test_reasons_of_several_lines_are_one_line(cli: CommandLine) -> None:
    """What a program wrote stands after the sentence, not below it."""
    error = TaskError("Exit", "exited with code 1 on node-2:\n  attempt 0\n", "USER")
    await cli("task", "submit", "-f", "-", stdin=TWO_LINES)
    await _own(cli, "hello")
    await _write(cli, "hello", **_ended("failure", error=error))

    info = task_info(await Tasks(cli.store, cli.keys).get("hello"))
    assert summary(info) == "failed: Exit: exited with code 1 on node-2: attempt 0"
    rows = (await cli("task", "list")).out.splitlines()
    assert rows[1].endswith("Exit: exited with code 1 on node-2: attempt 0")


@pytest.mark.parametrize(("terminal", "length"), [(True, 120), (False, 501)])
def test_a_long_reason_is_cut_on_a_terminal(monkeypatch: pytest.MonkeyPatch, terminal: bool, length: int) -> None:
    """To three lines of a table, and not in a pipe."""
    monkeypatch.setattr("sys.stdout", io.StringIO())
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    cut = Output().brief("a " * 200 + "\n" + "b" * 101)
    assert (len(cut), cut.endswith("…")) == (length, terminal)
