"""`rcfarm node …`, `rcfarm brake …` and `rcfarm status` on an embedded store."""

from __future__ import annotations

from functools import partial

import pytest
from msgspec.structs import replace

from store.kv import ops
from store.kv.protocol import SessionSpec
from store.schema.audit import events
from store.schema.records import (
    ALL_NODES,
    TASK_LABEL,
    Brake,
    Capacity,
    FarmMember,
    Intent,
    NodeAlive,
    NodeSpec,
    Owner,
    RCState,
    RCStatus,
    Reason,
    encode,
)
from store.schema.schedules import ScheduleSpec
from store.schema.tasks import EngineLoad, EngineMember, EnginePause, TaskSpec
from tests.support.hostile import DEEP
from tests.support.programs.cli import CommandLine

MANIFEST = b'{"id":"hello","launchables":{"web":{"command":["true"]}}}'
BRAKE = Brake(farm="farm-1", since="2026-01-01T00:00:00Z", code="too_many_gone", message="7 of 9 RCs are gone")


async def _session(cli: CommandLine) -> str:
    return (await cli.store.create_session(SessionSpec("x", ttl=86400, check_ttl=None))).id


async def _add_node(cli: CommandLine, name: str, *, live: bool = True, **fields: object) -> None:
    spec = NodeSpec(name=name, **fields)  # type: ignore[arg-type]
    await cli.store.put(cli.keys.node_spec(name), encode(spec))
    if live:
        alive = encode(NodeAlive("agent", "2026-01-01T00:00:00Z", "10.0.0.1", "0.1.0"))
        await cli.store.txn([ops.lock(cli.keys.node_alive(name), alive, await _session(cli))])


async def test_nodes_are_listed_with_their_state(cli: CommandLine) -> None:
    """Live, dead, cordoned and unreadable nodes each have a row; the unreadable ones name the reason."""
    await _add_node(cli, "node-1", labels={"pool": "web"}, capacity=Capacity(cpu=4000, memory=8 * 2**30))
    await _add_node(cli, "node-2", live=False, schedulable=False)
    await cli.store.put(cli.keys.node_spec("node-3"), DEEP)
    await _add_node(cli, "node-4")
    await cli.store.put(cli.keys.node_alive("node-4"), DEEP)
    await cli.store.put(cli.keys.intent("node-1", "web"), b"{}")

    table = await cli("node", "list")
    chosen = (await cli("node", "list", "-l", "pool=web", "-o", "json")).json

    rows = [line.split("  ") for line in table.out.splitlines()]
    assert [word.strip() for word in rows[1] if word][:5] == ["node-1", "ready", "1", "pool=web", "4 cores, 8.0 GiB"]
    assert "dead, cordoned" in table.out
    assert [line.split()[:2] for line in table.out.splitlines()[3:]] == [
        ["node-3", "unreadable"],
        ["node-4", "unreadable"],
    ]
    assert "unreadable: fleet/nodes/node-3/spec: not a valid NodeSpec: nested more than" in table.err
    assert "unreadable: fleet/nodes/node-4/alive: not a valid NodeAlive: nested more than" in table.err
    assert [(node["name"], node["live"], node["pods"]) for node in chosen] == [("node-1", True, 1)]


async def test_labels_are_set_and_removed_and_audited(cli: CommandLine) -> None:
    """`key=value` sets, `key-` removes, in one audited change."""
    await _add_node(cli, "node-1", labels={"a": "1", "b": "2"})

    ran = await cli("node", "label", "node-1", "c=3", "a-")

    assert ran.out == "node node-1 has the labels b=2,c=3\n"
    (event,) = await events(cli.store, cli.keys)
    assert event.event_type == "LABELS_CHANGED"
    assert event.event_details == {"type": "node", "id": "node-1", "set": {"c": "3"}, "removed": ["a"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("node-1", "novalue"), "label 'novalue': write KEY=VALUE"),
        (("node-1", "bad key=1"), "label key 'bad key'"),
        (("node-1", "a=b/c"), "label value 'b/c'"),
        (("node-1", "a=1", "a-"), "label a: is both set and removed"),
        (("ghost", "a=1"), "there is no node ghost; `rcfarm node list`"),
        (("Not A Node", "a=1"), "there is no node Not A Node"),
    ],
)
async def test_bad_labels_and_nodes_are_refused(cli: CommandLine, arguments: tuple[str, ...], message: str) -> None:
    """The error is one line that names the label or the node; nothing changes."""
    await _add_node(cli, "node-1", labels={"a": "1"})

    ran = await cli("node", "label", *arguments)

    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith(f"error: {message}"), ran.err


async def test_cordon_and_uncordon(cli: CommandLine) -> None:
    """Cordoning keeps pods, evicting moves them, uncordoning undoes both; the rest of the record stays."""
    await _add_node(cli, "node-1", labels={"a": "1"})

    cordoned = await cli("node", "cordon", "node-1")
    evicting = (await cli("node", "cordon", "node-1", "--evict", "-o", "json")).json
    listed = await cli("node", "list")
    back = await cli("node", "uncordon", "node-1")

    assert cordoned.out == "node node-1 is cordoned; there is no pod on it\n"
    assert (evicting["schedulable"], evicting["evict"], evicting["labels"]) == (False, True, {"a": "1"})
    assert "evicting" in listed.out
    assert back.out == "node node-1 takes pods again\n"
    node = (await cli("node", "get", "node-1", "-o", "json")).json
    assert (node["schedulable"], node["evict"]) == (True, False)


async def test_evicting_says_what_moves_and_what_stays(cli: CommandLine) -> None:
    """Pods of static and disabled RCs are not moved: the command says why, with advice. Those of daemon sets go, unless
    they tolerate it."""
    await _add_node(cli, "node-1")
    manifest = b'{"id":"p","launchables":{"web":{"command":["true"]}}}'
    for rc_id, strategy, disabled in (("a", "dynamic", False), ("b", "static", False), ("c", "dynamic", True)):
        await cli.rcs.create(manifest, rc_id=rc_id, allocation_strategy=strategy, disabled=disabled)
        await cli.store.put(cli.keys.pod(rc_id, "node-1"), b'{"pod_id":"p"}')
    for rc_id, tolerates in (("d", False), ("e", True)):
        await cli.rcs.create(manifest, rc_id=rc_id, replicas=ALL_NODES)
        await cli.rcs.update(rc_id, partial(replace, tolerate_drain=tolerates))
        await cli.store.put(cli.keys.pod(rc_id, "node-1"), b'{"pod_id":"p"}')
    of_task = Intent(manifest="x", rc="", shard="00", labels={TASK_LABEL: "job"})
    await cli.store.put(cli.keys.intent("node-1", "job-0"), encode(of_task))

    ran = await cli("node", "cordon", "node-1", "--evict")
    await _add_node(cli, "node-2")
    empty = await cli("node", "cordon", "node-2", "--evict")

    assert ran.out.splitlines() == [
        "node node-1 is cordoned",
        "  will be removed, because daemon sets leave a drained node: 1 pod of d",
        "    d waits for a farm that owns the RC (`rcfarm farm`)",
        "  will stay, because their daemon sets have `tolerate_drain`: 1 pod of e",
        "  will stay, because no other node may take them: 1 pod of a; add or uncordon nodes: `rcfarm rc explain RC` "
        "has every node",
        "    a waits for a farm that owns the RC (`rcfarm farm`)",
        "  will stay, because their strategy is static: 1 pod of b; to have them moved, set `allocation_strategy: "
        "dynamic` in their files and apply them with `rcfarm rc apply -f FILE`",
        "  will stay, because they are disabled: 1 pod of c; `rcfarm rc enable RC`",
        "  will stay until they end, except for those of interruptible tasks: 1 pod of tasks: job",
    ]
    assert empty.out == "node node-2 is cordoned\n  there is no pod on it\n"


async def test_a_selector_that_matches_no_node_is_named(cli: CommandLine) -> None:
    """The note names the selector; it does not advise starting an agent, because there are nodes."""
    await _add_node(cli, "node-1")

    ran = await cli("node", "list", "-l", "pool=ghost")

    assert ran.err == "no node has labels that match pool=ghost\n"


async def test_an_unreadable_node_is_not_overwritten(cli: CommandLine) -> None:
    """Editing an unreadable record fails with its key, and leaves the record unchanged."""
    await cli.store.put(cli.keys.node_spec("node-1"), b'{"labels":{}}')

    ran = await cli("node", "cordon", "node-1")

    assert ran.code == 1
    assert "fleet/nodes/node-1/spec: not a valid NodeSpec" in ran.err
    entry = await cli.store.get(cli.keys.node_spec("node-1"))
    assert entry is not None
    assert entry.value == b'{"labels":{}}'


async def test_the_brake_is_shown_and_released(cli: CommandLine) -> None:
    """`brake status` says why the brake is on; `brake release` asks for confirmation and is audited."""
    off = await cli("brake", "status")
    await cli.store.put(cli.keys.brake, encode(BRAKE))
    on = await cli("brake", "status")
    unsure = await cli("brake", "release")
    released = await cli("brake", "release", "--yes")
    again = await cli("brake", "release", "--yes")

    assert off.out == "the brake is off: farms remove pods that are no longer desired\n"
    assert "7 of 9 RCs are gone" in on.out
    assert (unsure.code, "not confirmed" in unsure.err) == (1, True)
    assert released.out == "the brake is released; removals resume\n"
    assert again.out == "the brake is not on\n"
    assert [event.event_type for event in await events(cli.store, cli.keys)] == ["BRAKE_RELEASED"]
    assert (await cli("brake", "status", "-o", "json")).json == {"on": False, "brake": None}


async def test_an_unreadable_brake_can_still_be_released(cli: CommandLine) -> None:
    """Farms hold while the key exists, whatever its content, so an operator must be able to remove it."""
    await cli.store.put(cli.keys.brake, b"garbage")

    shown = await cli("brake", "status")
    released = await cli("brake", "release", "--yes")

    assert shown.code == 1
    assert "fleet/brake: not a valid Brake" in shown.err
    assert released.out == "the brake is released; removals resume\n"
    assert await cli.store.get(cli.keys.brake) is None


async def test_status_shows_what_the_task_engines_have_in_hand(cli: CommandLine) -> None:
    """By their member records alone: no execution is read. What a dead engine had in hand is not counted."""
    session = await _session(cli)
    loads = [
        EngineLoad(
            owned=14, phases={"Queued": 9, "NotReady": 1, "Running": 3, "cleaning": 1}, waits={"LimitReached": 9}
        ),
        EngineLoad(owned=2, phases={"Running": 2}, undelivered=1),
        EngineLoad(owned=7, phases={"Running": 7}),
    ]
    pause = EnginePause(kind="plugin", name="http", calls="handle", since=1e9, error="no route to host")
    for number, load in enumerate(loads):
        pauses = (pause,) if number == 1 else ()
        member = EngineMember(engine=f"engine-{number}", selector="pool=a" if number else "", load=load, pauses=pauses)
        key = cli.keys.engine(member.engine)
        await cli.store.txn([ops.lock(key, encode(member), session) if number < 2 else ops.put(key, encode(member))])
    task = TaskSpec(id="", type="process")
    for name, paused in (("nightly", False), ("often", True)):
        spec = ScheduleSpec(name=name, cron=("0 3 * * *",), task=task, paused=paused)
        await cli.store.put(cli.keys.schedule_spec(name), encode(spec))
    await cli.store.put(cli.keys.schedule_spec("broken"), DEEP)

    ran = await cli("status")
    fleet = (await cli("status", "-o", "json")).json["tasks"]

    assert (
        "tasks  2 engines live, 1 dead; 10 waiting, 5 running, 1 stopping; 9 wait: LimitReached; "
        "1 with events that a sink has not taken; 3 schedules, 1 paused\n"
    ) in ran.out
    rows = [line.split() for line in ran.out.splitlines() if line.startswith("engine-")]
    assert [row[:4] for row in rows] == [
        ["engine-0", "live", "14", "-"],
        ["engine-1", "live", "2", "pool=a"],
        ["engine-2", "dead", "0", "pool=a"],
    ]
    assert "paused on engine engine-1, plugin http takes no calls since 2001-09-09T01:46:40Z" in ran.out
    assert "unreadable: fleet/schedules/broken/spec" in ran.out
    assert (fleet["by_state"], fleet["waits"]) == ({"waiting": 10, "running": 5, "stopping": 1}, {"LimitReached": 9})
    assert [engine["owned"] for engine in fleet["engines"]] == [14, 2, 0]
    assert "no route to host" in fleet["engines"][1]["paused"][0]
    assert (fleet["schedules"], fleet["schedules_paused"]) == (3, 1)


async def test_status_without_a_live_engine_says_what_to_start(cli: CommandLine) -> None:
    """Where tasks are not used, nothing is shown of them."""
    unused = await cli("status")
    await cli.store.put(cli.keys.engine("engine-1"), encode(EngineMember(engine="engine-1")))
    dead = await cli("status")

    assert "tasks" not in unused.out
    assert "tasks  0 engines live, 1 dead; start one with `rcfarm tasks`\n" in dead.out


async def test_status_is_the_fleet_at_a_glance(cli: CommandLine) -> None:
    """`status` shows farms, nodes, pods, RCs by state, and each RC in trouble with the reason."""
    await _add_node(cli, "node-1")
    await _add_node(cli, "node-2", live=False)
    await cli.rcs.create(MANIFEST, rc_id="web", replicas=2)
    await cli.rcs.create(MANIFEST, rc_id="idle")
    session = await _session(cli)
    await cli.store.txn([ops.lock(cli.keys.farm("farm-1"), encode(FarmMember(farm="farm-1")), session)])
    await cli.store.txn([ops.lock(cli.keys.owner("idle"), b'{"farm":"farm-1","since":""}', session)])
    met = RCStatus(state="converged", generation=1, desired=0, placed=0, healthy=0, farm="farm-1", token=1)
    await cli.store.put(cli.keys.status("idle"), encode(met))
    await cli.store.put(cli.keys.brake, encode(BRAKE))

    shown = (await cli("status")).out
    fleet = (await cli("status", "-o", "json")).json

    assert "BRAKE ON" in shown
    assert "nodes  1 live, 1 dead" in shown
    assert "rcs    1 converged, 1 unowned" in shown
    assert "no farm owns rc web yet; farm-1 may claim it" in shown
    assert fleet["rcs_by_state"] == {"converged": 1, "unowned": 1}
    assert (fleet["pods_desired"], fleet["nodes_live"], fleet["farms"][0]["owned"]) == (2, 1, 1)
    assert [rc["id"] for rc in fleet["troubled"]] == ["web"]
    assert fleet["brake"]["code"] == "too_many_gone"


async def test_many_rcs_in_one_trouble_hide_no_other(cli: CommandLine) -> None:
    """An RC whose rollout was reverted is shown among thirty that only lack nodes."""
    session = await _session(cli)
    states: dict[str, tuple[RCState, str]] = {f"a-{number}": ("short", "short") for number in range(30)}
    states["z"] = "converged", "rollout_reverted"
    for rc_id, (state, code) in states.items():
        await cli.rcs.create(MANIFEST, rc_id=rc_id)
        reasons = (Reason(code, f"because of {code}"),)
        status = RCStatus(state=state, generation=1, desired=1, placed=0, healthy=0, farm="f", token=1, reasons=reasons)
        owner = ops.lock(cli.keys.owner(rc_id), encode(Owner("f", "")), session)
        await cli.store.txn([owner, ops.put(cli.keys.status(rc_id), encode(status))])

    ran = await cli("status")

    assert "rollout_reverted: because of rollout_reverted" in ran.out
    assert "and 21 others; see `rcfarm rc list`" in ran.out
