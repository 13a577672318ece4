"""`rcfarm doctor` finds and names every kind of trouble, with advice."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import pytest

from store.kv import ops
from store.kv.protocol import SessionSpec
from store.schema.quota import QuotaLimit
from store.schema.records import (
    TASK_LABEL,
    Brake,
    FarmMember,
    Incident,
    Intent,
    NodeAlive,
    NodeSpec,
    Owner,
    RCState,
    RCStatus,
    Reality,
    Reason,
    encode,
)
from store.schema.tasks import EngineMember, EnginePause, TaskSpec, TaskState
from tests.support.hostile import DEEP
from tests.support.programs.cli import CommandLine, run

MANIFEST = b'{"id":"hello","launchables":{"web":{"command":["true"]}}}'
LABELS = b'{"pod_id":"hello","replication_controller_id":"web"}'


@pytest.fixture
async def session(cli: CommandLine) -> str:
    """Create a session that lives as long as the test."""
    return (await cli.store.create_session(SessionSpec("all", ttl=86400, check_ttl=None))).id


@pytest.fixture
async def healthy(cli: CommandLine, session: str) -> CommandLine:
    """Create a healthy fleet: a farm, a node, and an RC `web` with its one pod."""
    spec = await cli.rcs.create(MANIFEST, rc_id="web", replicas=1)
    intent = Intent(manifest=spec.manifest, rc="web", shard="00")
    await cli.store.txn(
        [
            ops.lock(cli.keys.farm("farm-1"), encode(FarmMember(farm="farm-1")), session),
            ops.put(cli.keys.node_spec("node-1"), encode(NodeSpec(name="node-1"))),
            ops.lock(cli.keys.node_alive("node-1"), encode(NodeAlive("node-1", "")), session),
            ops.lock(cli.keys.owner("web"), encode(Owner("farm-1", "")), session),
            ops.put(cli.keys.pod("web", "node-1"), LABELS),
            ops.put(cli.keys.intent("node-1", "hello"), encode(intent)),
            ops.put(cli.keys.status("web"), status_of("converged")),
        ]
    )
    return cli


async def examine(cli: CommandLine) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """Return the exit code, and the findings that are not ok, by check."""
    ran = await cli("doctor", "-o", "json")
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in ran.json:
        if finding["level"] != "ok":
            found.setdefault(finding["check"], []).append(finding)
    return ran.code, found


def status_of(state: RCState, *reasons: Reason, at: str = "") -> bytes:
    """Return the status of an RC of one pod, as its owner writes it."""
    return encode(
        RCStatus(
            state=state, generation=1, desired=1, placed=1, healthy=int(state == "converged"), farm="farm-1", token=1,
            reasons=reasons, updated_at=at,
        )
    )  # fmt: skip


def messages(findings: Sequence[dict[str, Any]]) -> str:
    return "\n".join(f"{finding['level']}: {finding['message']} → {finding['advice']}" for finding in findings)


async def failing(cli: CommandLine, check: str) -> str:
    """Return the findings of a check; the doctor's exit code must be 1."""
    code, found = await examine(cli)
    assert code == 1
    return messages(found[check])


async def test_a_fleet_in_order_has_no_findings(healthy: CommandLine) -> None:
    """Every check reports its observation, each line begins with its sign, and the exit code is 0."""
    ran = await healthy("doctor")

    assert ran.code == 0, ran.out
    lines = ran.out.splitlines()
    assert all(line.startswith("✓ ") for line in lines), ran.out
    checks = [line.split()[1] for line in lines]
    assert {"settings", "store", "clock", "sessions", "permissions", "records", "brake", "farms"} <= set(checks)
    assert {"nodes", "rcs", "orphans"} <= set(checks)
    assert "every record can be read (1 RC, 1 node)" in ran.out
    assert "1 node, live" in ran.out


async def test_an_unused_store_is_no_error(cli: CommandLine) -> None:
    """A new, empty installation gets warnings that explain how to begin, and no error."""
    code, found = await examine(cli)

    assert code == 0
    assert "rcfarm farm" in messages(found["farms"])
    assert "rcfarm agent" in messages(found["nodes"])


async def test_unreadable_records_are_named_by_key_and_reason(healthy: CommandLine) -> None:
    """Unreadable records of every kind are named, and their neighbours are still checked."""
    bad = {
        healthy.keys.spec("broken"): b'{"id":"broken","manifest":"x"}',
        healthy.keys.node_spec("node-2"): b"[]",
        healthy.keys.farm("farm-2"): b"nonsense",
        healthy.keys.intent("node-2", "x"): b"{}",
        healthy.keys.reality("node-2", "x"): b"",
        healthy.keys.health("web", "node-1"): b"1",
        f"{healthy.keys.rcs}00/web/what": b"",
        healthy.keys.mutation("web"): DEEP,
        healthy.keys.pools + "node-1": DEEP,
    }
    lock = (await healthy.store.create_session(SessionSpec("a", ttl=86400, check_ttl=None))).id
    for key, value in bad.items():
        await healthy.store.txn([ops.lock(key, value, lock)])

    code, found = await examine(healthy)

    text = messages(found["records"])
    assert code == 1
    assert all(key in text for key in bad), text
    replaced = "`rcfarm rc apply -f` the RC's file, which replaces it; or repair its value with `consul kv put {} -`"
    assert replaced.format(healthy.keys.spec("broken")) in text
    assert text.count("`rcfarm rc apply -f`") == 1, "no file of an RC replaces another record"
    assert f"`consul kv delete {healthy.keys.farm('farm-2')}`" in text
    assert "missing required field `replicas_desired`" in text
    assert "rcs" not in found


async def test_the_brake_is_an_error(healthy: CommandLine) -> None:
    """The finding says why the brake is on, and both ways out."""
    brake = Brake(farm="farm-1", since="", code="no_rcs_found", message="all 9 RCs are gone")
    await healthy.store.put(healthy.keys.brake, encode(brake))

    code, found = await examine(healthy)

    assert code == 1
    assert "all 9 RCs are gone" in messages(found["brake"])
    assert "rcfarm brake release" in messages(found["brake"])


async def test_rcs_without_owner_or_in_trouble_are_named(healthy: CommandLine) -> None:
    """An unowned RC is an error with its reason; a short one is a warning; a quarantined one an error."""
    await healthy.rcs.create(MANIFEST, rc_id="lonely")
    await healthy.store.txn([ops.unlock(healthy.keys.owner("web"), b"{}", await _holder(healthy, "web"))])
    states: dict[str, RCState] = {"short": "short", "sick": "quarantined"}
    for rc_id, state in states.items():
        await healthy.rcs.create(MANIFEST, rc_id=rc_id)
        holder = (await healthy.store.create_session(SessionSpec("f", ttl=86400, check_ttl=None))).id
        status = status_of(state, Reason(state, f"because {rc_id}"))
        await healthy.store.txn(
            [
                ops.lock(healthy.keys.owner(rc_id), encode(Owner("f", "")), holder),
                ops.put(healthy.keys.status(rc_id), status),
            ]
        )

    text = await failing(healthy, "rcs")

    assert "error: no farm owns rc lonely yet; farm-1 may claim it" in text
    assert "warning: rc short is short: because short" in text
    assert "error: rc sick keeps failing: because sick" in text


async def _holder(cli: CommandLine, rc_id: str) -> str:
    entry = await cli.store.get(cli.keys.owner(rc_id))
    assert entry is not None
    assert entry.session
    return entry.session


async def test_dead_nodes_are_an_error_when_they_should_run_pods(healthy: CommandLine, session: str) -> None:
    """A dead node with pods, or pods on a node without a record, are errors; a dead node without pods is a warning."""
    await healthy.store.put(healthy.keys.node_spec("node-2"), encode(NodeSpec(name="node-2")))
    await healthy.store.txn([ops.unlock(healthy.keys.node_alive("node-1"), b'{"agent":"a","since":""}', session)])
    intent = encode(Intent(manifest="x", rc="web", shard="00"))
    await healthy.store.put(healthy.keys.intent("node-9", "hello"), intent)
    await healthy.store.put(healthy.keys.pod("web", "node-9"), LABELS)

    text = await failing(healthy, "nodes")

    assert "error: node-1 is dead and should run 1 pod →" in text
    assert "warning: node-2 is dead; nothing is placed there" in text
    assert "if the machine is gone: `rcfarm node remove node-2`" in text
    assert "error: node-9 has pods but no record" in text


async def test_orphans_are_named_with_what_to_do(healthy: CommandLine) -> None:
    """An RC without spec, a lost manifest, a pod without a placement and a process on a dead node are named."""
    keys, spec = healthy.keys, await healthy.rcs.get("web")
    await healthy.store.put(keys.pod("gone", "node-1"), LABELS)
    await healthy.store.delete(keys.manifest(spec.manifest))
    await healthy.store.put(keys.intent("node-8", "hello"), encode(Intent(manifest="x", rc="web", shard="00")))
    reality = encode(Reality(manifest="x", rc="web", state="running"))
    await healthy.store.put(keys.reality("node-7", "left"), reality)

    text = await failing(healthy, "orphans")

    assert "rc gone has no spec, but other records" in text
    assert f"`consul kv delete -recurse {keys.rc('gone')}`" in text
    assert "rc web: its manifest" in text
    assert "hello on node-8 runs for rc web, which has no placement there" in text
    assert "warning: left on node-7 may still run: its agent is dead" in text


async def test_the_pod_of_a_task_is_no_orphan(healthy: CommandLine) -> None:
    """It belongs to no RC, but to a task that must be in the store. Without an intent it may still run on a dead
    node, as any pod."""
    intent = Intent(manifest="x", rc="", shard="00", labels={TASK_LABEL: "job"})
    await healthy.store.put(healthy.keys.intent("node-1", "job-0"), encode(intent))
    _, found = await examine(healthy)
    assert "job-0 on node-1 runs for task job, which is not in the store" in messages(found["orphans"])
    await healthy.store.put(healthy.keys.task_spec("job"), encode(TaskSpec(id="job", type="process")))
    _, found = await examine(healthy)
    assert "orphans" not in found
    assert "job-0 (task job)" in (await healthy("node", "get", "node-1")).out

    left = encode(Reality(manifest="x", rc="", state="running", task="job"))
    await healthy.store.put(healthy.keys.task_pod("node-7", "job-0"), left)
    _, found = await examine(healthy)
    assert "job-0 on node-7 may still run: its agent is dead" in messages(found["orphans"])


async def test_pods_of_a_lost_tree_are_never_advised_to_be_deleted(healthy: CommandLine) -> None:
    """If the tree of RCs is gone but the intents are not, the advice is to keep the pods and apply the RCs again."""
    for entry in (await healthy.store.list(healthy.keys.rcs)).entries:
        await healthy.store.delete(entry.key)
    for number in range(14):
        intent = encode(Intent(manifest="x", rc=f"rc-{number % 3}", shard="00"))
        await healthy.store.put(healthy.keys.intent("node-1", f"pod-{number}"), intent)
    await healthy.store.put(healthy.keys.pod("rc-0", "node-1"), LABELS)
    pods = len(await healthy.store.keys(healthy.keys.intents))

    text = await failing(healthy, "orphans")

    assert f"{pods} pods run for RCs that are not in the store (rc-0, rc-1, rc-2" in text
    assert "`rcfarm rc apply -f FILE`" in text
    assert "kv delete" not in text
    listed = await healthy("rc", "list")
    assert f"{pods} pods run for RCs that are not in the store" in listed.err
    assert "create one" not in listed.err
    assert f"{pods} pods run for RCs that are not in the store" in (await healthy("status")).out


async def test_pods_of_a_lost_root_are_named_while_the_brake_is_on(healthy: CommandLine) -> None:
    """If the whole root is gone, agents keep their pods and report them again."""
    for prefix in (healthy.keys.rcs, healthy.keys.intents):
        for key in await healthy.store.keys(prefix):
            await healthy.store.delete(key)
    reality = encode(Reality(manifest="x", rc="web", state="running", reason="its intent vanished"))
    await healthy.store.put(healthy.keys.reality("node-1", "hello"), reality)
    brake = Brake(farm="farm-1", since="2026-01-01T00:00:00Z", code="no_rcs_found", message="all 1 RCs are gone")
    await healthy.store.put(healthy.keys.brake, encode(brake))

    assert "1 pod runs for RCs that are not in the store (web)" in (await healthy("status")).out
    assert "1 pod runs for RCs that are not in the store (web)" in (await healthy("rc", "list")).err
    _, found = await examine(healthy)
    assert "hello on node-1 runs without an intent: its intent vanished → `rcfarm rc apply -f` the" in messages(
        found["orphans"]
    )


async def test_no_live_farm_is_an_error_once_there_are_rcs(healthy: CommandLine, session: str) -> None:
    """The finding names the last farm."""
    await healthy.store.txn([ops.unlock(healthy.keys.farm("farm-1"), encode(FarmMember(farm="farm-1")), session)])

    code, found = await examine(healthy)

    assert code == 1
    assert "error: no farm is live, and there are 1 RCs" in messages(found["farms"])
    assert "warning: not live any more: farm-1" in messages(found["farms"])


async def test_many_findings_of_a_kind_are_shortened(healthy: CommandLine) -> None:
    """A hundred bad records do not bury the rest."""
    for number in range(100):
        await healthy.store.put(healthy.keys.spec(f"bad-{number}"), b"{")

    _, found = await examine(healthy)

    assert len(found["records"]) == 21
    assert "and 80 more of the kind" in messages(found["records"])


async def test_many_findings_of_one_kind_hide_no_other(healthy: CommandLine) -> None:
    """An RC whose rollout was reverted, and one that keeps failing, are shown among thirty that only lack nodes."""
    holder = (await healthy.store.create_session(SessionSpec("f", ttl=86400, check_ttl=None))).id
    states: dict[str, tuple[RCState, Reason]] = {f"a-{n}": ("short", Reason("short", "no node")) for n in range(30)}
    states["y"] = "quarantined", Reason("bad_rollout", "it can't be read")
    states["z"] = "converged", Reason("rollout_reverted", "it crashed")
    for rc_id, (state, reason) in states.items():
        await healthy.rcs.create(MANIFEST, rc_id=rc_id)
        owner = ops.lock(healthy.keys.owner(rc_id), encode(Owner("f", "")), holder)
        await healthy.store.txn([owner, ops.put(healthy.keys.status(rc_id), status_of(state, reason))])

    _, found = await examine(healthy)

    text = messages(found["rcs"])
    assert len(found["rcs"]) == 21
    assert "error: rc y keeps failing: it can't be read" in text
    assert "warning: rc z is reverted: it crashed" in text
    assert "warning: and 12 more of the kind" in text


async def test_keys_that_the_layout_does_not_have_are_to_be_removed(healthy: CommandLine) -> None:
    """Neither a repaired value nor a file of an RC would help. The command can be pasted, whatever the key is."""
    intent = encode(Intent(manifest="x", rc="web", shard="00"))
    spec = encode(await healthy.rcs.get("web"))
    keys = {
        healthy.keys.intents + "node-1": intent,
        healthy.keys.intents + "node-1/two words": intent,
        healthy.keys.intents + "node-1/web/more": b"garbage",
        healthy.keys.rcs + "zz/web/spec": spec,
        healthy.keys.rcs + "00": b"",
    }
    for key, value in keys.items():
        await healthy.store.put(key, value)

    code, found = await examine(healthy)

    text = messages(found["records"])
    assert (code, len(found["records"])) == (1, len(keys))
    assert all(f"`consul kv delete {shlex.quote(key)}`" in text for key in keys), text
    assert "kv put" not in text
    assert "rc apply" not in text


async def test_settings_that_make_no_sense_together_are_found(healthy: CommandLine) -> None:
    """The doctor validates the settings in the environment, including relations between them."""
    ran = await healthy("doctor", RCFARM_FARM_NODE_LOST_AFTER="1")

    assert ran.code == 1
    assert "✗ settings     farm.node_lost_after: 1 s must be above agent.session_ttl" in ran.out


async def test_a_newer_layout_ends_the_examination(cli: CommandLine) -> None:
    """A store with an unknown schema is not examined further."""
    await cli.store.put(cli.keys.meta, b'{"schema":9,"shards":32}')

    ran = await cli("doctor")

    assert ran.code == 1
    assert "✗ layout       fleet/meta: the store is of schema 9" in ran.out
    assert "orphans" not in ran.out


def test_a_store_that_is_away_is_the_only_finding() -> None:
    """An unreachable store is the only finding, with advice."""
    ran = run("doctor", "--store", "consul://127.0.0.1:9")

    assert ran.code == 1
    assert ran.out.splitlines()[1].startswith("✗ store        Consul at 127.0.0.1:9 is unavailable")
    assert len(ran.out.splitlines()) == 3


@pytest.mark.parametrize(
    ("code", "level"), [("crashing", "error"), ("blocked", "error"), ("failed", "warning"), ("starting", "warning")]
)
async def test_rcs_whose_pods_do_not_run_are_named(healthy: CommandLine, code: str, level: str) -> None:
    """Pods that crash or can't start are an error with their cause; failed one-offs, and pods not reported for a
    minute, are a warning."""
    status = status_of("progressing", Reason(code, f"1 of 1 pod: {code} node-1"), at="2026-01-01T00:00:00Z")
    await healthy.store.put(healthy.keys.status("web"), status)

    exit_code, found = await examine(healthy)

    assert exit_code == (1 if level == "error" else 0)
    assert messages(found["rcs"]).startswith(f"{level}: rc web ")
    assert f"1 of 1 pod: {code} node-1" in messages(found["rcs"])


async def test_tasks_without_engine_plugin_or_limit_are_reported(cli: CommandLine, session: str) -> None:
    """Nothing is said where tasks are not used; then each thing that keeps one from running, and events that stay."""
    unused = {each["check"] for each in (await cli("doctor", "-o", "json")).json}
    assert not {"engines", "quotas", "task_types", "outbox"} & unused
    lonely = TaskSpec(id="lonely", type="bogus", quotas={"gpu": 1})
    ended = TaskState(step="done", outcome="success", ended_at=1.0, next_event=2, sent=1)
    await cli.store.txn(
        [
            ops.put(cli.keys.task_spec("lonely"), encode(lonely)),
            ops.put(cli.keys.task_spec("ended"), encode(TaskSpec(id="ended", type="process"))),
            ops.put(cli.keys.task_state("ended"), encode(ended)),
            ops.put(cli.keys.task_spec("broken"), b"{"),
        ]
    )
    code, found = await examine(cli)

    assert code == 1
    assert "1 executions wait for an engine" in messages(found["engines"])
    assert "of type bogus" in messages(found["task_types"])
    assert "rcfarm quota set gpu UNITS" in messages(found["quotas"])
    assert "ended" in messages(found["outbox"])
    assert "broken" in messages(found["task_records"])

    pauses = (
        EnginePause(kind="plugin", name="http", calls="handle", since=1.0, probes=3, error="RemoteTransient: 503"),
        EnginePause(kind="sink", name="webhook", since=1.0, error="https://hooks.example answered 500"),
    )
    for name in ("engine-1", "engine-2"):
        await cli.store.txn(
            [ops.lock(cli.keys.engine(name), encode(EngineMember(engine=name, pauses=pauses)), session)]
        )
    code, found = await examine(cli)
    assert code == 1
    assert "on engine engine-1, plugin http takes no calls since 1970-01-01T00:00:01Z" in messages(found["plugins"])
    assert "sink webhook takes no events" in messages(found["sinks"])
    assert "the last error is: https://hooks.example answered 500" in messages(found["sinks"])

    for name in ("engine-1", "engine-2"):
        await cli.store.txn([ops.lock(cli.keys.engine(name), encode(EngineMember(engine=name)), session)])
    await cli.store.txn([ops.put(cli.keys.quota_limit("gpu"), encode(QuotaLimit(units=1)))])
    assert not {"engines", "quotas"} & (await examine(cli))[1].keys()


async def test_incidents_that_cant_be_sent_are_an_error(healthy: CommandLine) -> None:
    """With the receiver's answer; those that the receiver knows are none."""
    since = "2026-01-01T00:00:00Z"
    sent = Incident(kind="node", about="n", summary="s", severity="warning", since=since, farm="farm-1", sent=since)
    await healthy.store.put(healthy.keys.incident("node", "n"), encode(sent))
    assert "✓ notifier     1 incident open; the receiver knows" in (await healthy("doctor")).out
    waiting = Incident(kind="rc", about="web", summary="s", severity="error", since=since, farm="farm-1", problem="500")
    await healthy.store.put(healthy.keys.incident("rc", "web"), encode(waiting))
    code, found = await examine(healthy)
    assert code == 1
    assert "1 incident can't be sent (rc web): 500" in messages(found["notifier"])
