"""`rcfarm plan`, `rc apply --plan` and `rcfarm what-if` on an embedded store with nodes, but without a farm."""

from __future__ import annotations

import pytest

from rcfarm.cli import CHANGED_SINCE_PLANNED
from store.kv import ops
from store.kv.protocol import SessionSpec
from store.schema.records import (
    POD_ID_LABEL,
    RC_ID_LABEL,
    Brake,
    Health,
    Intent,
    NodeAlive,
    NodeSpec,
    encode,
)
from tests.support.programs.cli import CommandLine

FILE = "id: hello\nreplicas: 2\nmanifest: {id: hello, launchables: {web: {command: [serve]}}}\n"
CHANGED = FILE.replace("serve", "serve-better")


async def add_nodes(cli: CommandLine, *names: str) -> str:
    """Register live nodes. Return the session of their agents."""
    session = (await cli.store.create_session(SessionSpec("agents", ttl=86400, check_ttl=None))).id
    for name in names:
        spec = NodeSpec(name=name, labels={"rack": name[-1]})
        await cli.store.txn(
            [
                ops.put(cli.keys.node_spec(name), encode(spec)),
                ops.lock(cli.keys.node_alive(name), encode(NodeAlive(name, "2026-01-01T00:00:00Z")), session),
            ]
        )
    return session


async def run_pods(cli: CommandLine, session: str, *nodes: str) -> None:
    """Place the RC's pods as a farm does, and have them pass."""
    spec = await cli.rcs.get("hello")
    labels = {POD_ID_LABEL: "hello", RC_ID_LABEL: "hello"}
    for node in nodes:
        intent = Intent(manifest=spec.manifest, rc="hello", shard="00", labels=labels)
        await cli.store.txn(
            [
                ops.put(cli.keys.pod("hello", node), encode(labels)),
                ops.put(cli.keys.intent(node, "hello"), encode(intent)),
                ops.lock(cli.keys.health("hello", node), encode(Health("passing", spec.manifest)), session),
            ]
        )


@pytest.fixture
async def running(cli: CommandLine) -> CommandLine:
    """An RC of two pods on two of three nodes."""
    session = await add_nodes(cli, "n1", "n2", "n3")
    await cli("rc", "apply", "-f", "-", "-y", "-d", stdin=FILE)
    await run_pods(cli, session, "n1", "n2")
    return cli


async def test_a_new_rc_is_placed_in_one_step(cli: CommandLine) -> None:
    await add_nodes(cli, "n1", "n2", "n3")
    ran = await cli("plan", "-f", "-", stdin=FILE)
    assert ran.code == 2
    assert "rc hello: 1 step; 2 of 2 placed and converged after 1s" in ran.out
    assert "add n1, n2" in ran.out
    assert (await cli.rcs.list()).specs == [], "nothing is written"


async def test_a_change_is_shown_wave_by_wave(running: CommandLine) -> None:
    """With the difference first; unchanged files exit with 0."""
    ran = await running("plan", "-f", "-", stdin=CHANGED)
    assert ran.code == 2
    assert "serve-better" in ran.err
    assert [line.split(maxsplit=2)[2] for line in ran.out.splitlines()[2:4]] == ["change n1 (canary)", "change n2"]
    same = await running("plan", "-f", "-", stdin=FILE)
    assert (same.code, same.out.splitlines()[0]) == (0, "rc hello: no pod would change; 2 of 2 placed")


async def test_canaries_by_label_are_shown(running: CommandLine) -> None:
    """The node that the selector names goes first. Without one, the plan says that it could not end, and `rc apply`
    says so before it writes."""
    chosen = await running("plan", "-f", "-", stdin=CHANGED + "update: {canary_selector: rack=2}\n")
    assert [line.split(maxsplit=2)[2] for line in chosen.out.splitlines()[2:4]] == ["change n2 (canary)", "change n1"]
    nowhere = CHANGED + "update: {canary_selector: rack=9}\n"
    stuck = await running("plan", "-f", "-", stdin=nowhere)
    assert (stuck.code, "it waits for a pod on a live node that matches the canary_selector 'rack=9'" in stuck.out) == (
        3,
        True,
    )
    applied = await running("rc", "apply", "-f", "-", "-y", "-d", stdin=nowhere)
    assert (applied.code, "no node matches the canary_selector 'rack=9': a rollout would wait" in applied.err) == (
        0,
        True,
    )
    either = nowhere.replace("rack=9", "rack=2") + "node_selector: rack=1\n"
    applied = await running("rc", "apply", "-f", "-", "-y", "-d", stdin=either)
    assert "no node matches the canary_selector 'rack=2' and the node_selector: a rollout" in applied.err
    plain = await running("rc", "apply", "-f", "-", "-y", "-d", stdin=either.replace("rack=2", "''"))
    assert (plain.code, "no node matches" in plain.err) == (0, False)
    ill = await running("what-if", "--set", "canary_selector=a in (b")
    assert (ill.code, ill.err.startswith("error: --set canary_selector: selector 'a in (b'")) == (1, True)


async def test_analyses_that_decide_are_named(running: CommandLine) -> None:
    """The plan assumes that they succeed: its steps, and its digest, are those without them."""
    analysed = CHANGED + "update: {analysis: [{name: errors, command: b}, {name: smoke, command: c}]}\n"
    plain = await running("plan", "-f", "-", stdin=CHANGED)
    ran = await running("plan", "-f", "-", stdin=analysed)
    assert ran.code == 2
    assert "  goes on only while its analyses succeed: errors, smoke; the plan assumes that they do" in ran.out
    assert [line for line in ran.out.splitlines() if "analyses" not in line] == plain.out.splitlines()


async def test_more_replicas_than_nodes_are_refused(running: CommandLine) -> None:
    ran = await running("plan", "-f", "-", stdin=FILE.replace("replicas: 2", "replicas: 5"))
    assert ran.code == 3
    assert "2 of 5 replicas have no node" in ran.out


async def test_the_brake_is_part_of_it(running: CommandLine) -> None:
    brake = Brake(farm="f", since="2026-01-01T00:00:00Z", code="too_many_gone", message="half is gone")
    await running.store.put(running.keys.brake, encode(brake))
    ran = await running("plan", "-f", "-", stdin=FILE.replace("replicas: 2", "replicas: 1"))
    assert ran.code == 3
    assert "held: 1 surplus pod stays: the brake is on: half is gone" in ran.out


async def test_apply_refuses_another_outcome(running: CommandLine) -> None:
    """What was planned is applied although other records have changed; not after its canary would be another node."""
    planned = await running("plan", "-f", "-", "-o", "json", stdin=CHANGED)
    digest = planned.json[0]["preview"]["digest"]
    await running.store.txn([ops.delete(running.keys.health("hello", "n2"))])
    refused = await running("rc", "apply", "-f", "-", "-y", "-d", "--plan", digest, stdin=CHANGED)
    assert refused.code == CHANGED_SINCE_PLANNED
    assert f"the outcome would not be that of plan {digest}" in refused.err
    assert (await running.rcs.get("hello")).revision == 1
    again = await running("plan", "-f", "-", "-o", "json", stdin=CHANGED)
    digest = again.json[0]["preview"]["digest"]
    assert (await running("rc", "apply", "-f", "-", "-y", "-d", "--plan", digest, stdin=CHANGED)).code == 0
    assert (await running.rcs.get("hello")).revision == 2


async def test_what_if_nodes_are_lost_drained_or_added(running: CommandLine) -> None:
    """Nothing is written; exit 3 when an RC would not be whole, 0 when none would notice."""
    lost = await running("what-if", "--lose", "n1")
    assert lost.code == 3
    assert "a static RC keeps its pods there" in lost.out
    await running("rc", "apply", "-f", "-", "-y", "-d", stdin=FILE + "allocation_strategy: dynamic\n")
    drained = await running("what-if", "--drain", "rack=1")
    assert (drained.code, "1 pod moved; 2 of 2 placed" in drained.out) == (2, True)
    added = await running("what-if", "--add", "5", "--label", "rack=9")
    assert (added.code, added.out) == (0, "with 5 nodes more: 0 RCs of 1 would notice it\n")


async def test_what_if_rcs_had_other_settings(running: CommandLine) -> None:
    """For all RCs or some, and together with changes of the nodes; nothing is written."""
    other = FILE.replace("hello", "other").replace("replicas: 2", "replicas: 1")
    await running("rc", "apply", "-f", "-", "-y", "-d", stdin=other)
    more = await running("what-if", "--set", "replicas=3")
    assert (more.code, more.out.splitlines()[0]) == (2, "with replicas=3: 2 RCs of 2 would notice it")
    one = await running("what-if", "--set", "replicas=3", "--rc", "hello")
    assert "1 RC of 1 would notice it" in one.out
    assert "1 pod added; 3 of 3 placed" in one.out
    short = await running("what-if", "--set", "replicas=3", "--drain", "rack=3", "--rc", "hello")
    assert short.code == 3
    assert "without n3, drained and with replicas=3: 1 RC" in short.out
    assert "1 of 3 replicas has no node" in short.out
    many = await running("what-if", "--set", "replicas=1000000")
    assert many.code == 1
    assert "replicas: 1000000 is more than 999999; use `all`" in many.err
    assert [spec.replicas_desired for spec in (await running.rcs.list()).specs] == [2, 1]


async def test_settings_of_a_rollout_change_its_waves(running: CommandLine) -> None:
    """Of one that is under way: `max_unavailable` is that of `update`, which counts."""
    file = CHANGED.replace("replicas: 2", "replicas: 3")
    await run_pods(running, await add_nodes(running, "n4"), "n3")
    await running("rc", "apply", "-f", "-", "-y", "-d", stdin=file)
    faster = await running("what-if", "--set", "max_unavailable=100%", "--set", "update.canary=0", "-o", "json")
    assert faster.code == 2
    assert [wave["update"] for wave in faster.json[0]["preview"]["waves"]] == [["n1", "n2", "n3"]]


EVERYWHERE = FILE.replace("replicas: 2", "replicas: all")


async def test_a_daemon_set_keeps_its_pods_on_lost_nodes_and_leaves_drained_ones(running: CommandLine) -> None:
    """However many are drained, as the operator asks for that; and one that tolerates it stays there, too."""
    await running("rc", "apply", "-f", "-", "-y", "-d", stdin=EVERYWHERE)
    await run_pods(running, await add_nodes(running, "n4"), "n3", "n4")
    lost = await running("what-if", "--lose", "n1,n2,n3", "-o", "json")
    assert [wave for each in lost.json for wave in each["preview"]["waves"]] == []
    drained = await running("what-if", "--drain", "rack in (1,2,3)", "-o", "json")
    assert [wave["remove"] for wave in drained.json[0]["preview"]["waves"]] == [["n1", "n2", "n3"]]
    await running("rc", "apply", "-f", "-", "-y", "-d", stdin=EVERYWHERE + "tolerate_drain: true\n")
    stays = await running("what-if", "--drain", "rack in (1,2,3)", "-o", "json")
    assert [wave for each in stays.json for wave in each["preview"]["waves"]] == []


async def test_what_if_an_rc_became_a_daemon_set(running: CommandLine) -> None:
    ran = await running("what-if", "--set", "replicas=all", "--add", "1")
    assert (ran.code, "2 pods added; 4 of 4 placed" in ran.out) == (2, True)


async def test_waves_go_by_the_label_that_the_policy_names(running: CommandLine) -> None:
    file = CHANGED.replace("replicas: 2", "replicas: 4") + (
        "update: {wave_by: zone, canary: 0, max_unavailable: 100%, min_healthy_time: 1}\n"
    )
    await run_pods(running, await add_nodes(running, "n4"), "n3", "n4")
    for number, zone in enumerate(("b", "a", "b", "a"), start=1):
        await running("node", "label", f"n{number}", f"zone={zone}")
    shown = await running("plan", "-f", "-", "-o", "json", stdin=file)
    assert [wave["update"] for wave in shown.json[0]["preview"]["waves"]] == [["n2", "n4"], ["n1", "n3"]]


async def test_many_files_are_planned_like_few(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is the same whether records are read one by one or as whole trees, and with a damaged one."""
    session = await add_nodes(cli, "n1", "n2", "n3")
    await cli("rc", "apply", "-f", "-", "-y", "-d", stdin=FILE)
    await run_pods(cli, session, "n1", "n2")
    others = [FILE.replace("hello", f"web-{number}") for number in range(3)]
    await cli("rc", "apply", "-f", "-", "-y", "-d", stdin=others[0])
    await cli.store.put(cli.keys.spec("web-0"), b"{")
    documents = "---\n".join([CHANGED, *others])
    few = await cli("plan", "-f", "-", stdin=documents)
    monkeypatch.setattr("rcfarm.cli.plan.FEW", 0)
    many = await cli("plan", "-f", "-", stdin=documents)
    assert (many.code, many.out, many.err) == (few.code, few.out, few.err)
    assert "change n1 (canary)" in many.out
    await cli("rc", "delete", "hello", "--force", "-y", "-d")
    refused = await cli("plan", "-f", "-", stdin=FILE)
    assert (refused.code, "rc hello is being deleted" in refused.err) == (1, True)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ((), "say what would happen: --drain SELECTOR, --lose NODES, --add N or --set FIELD=VALUE"),
        (("--lose", "nope"), "--lose: there is no node nope"),
        (("--drain", "rack=7"), "--drain rack=7: no node has labels that match"),
        (("--drain", "a=b=c"), "a=b=c"),
        (("--add", "1", "--label", "x"), "--label"),
        (("--add", "1", "--label", "a b=c"), "--label: label key 'a b'"),
        (("--add", "1", "--label", "=c"), "--label: label key ''"),
        (("--add", "1", "--label", "a=b/c"), "--label: label value 'b/c'"),
        (("--lose", "n1", "--label", "a=b"), "--label: is of the nodes that would join; give --add N, too"),
        (("--set", "replicas"), "--set 'replicas': write FIELD=VALUE"),
        (("--set", "replica=3"), "--set replica: unknown field; did you mean replicas? it is one of replicas, "),
        (("--set", "update.replicas=3"), "--set update.replicas: unknown field"),
        (("--set", "replicas=many"), "--set replicas: 'many': "),
        (("--set", "replicas=null"), "--set replicas: 'null' is no value"),
        (("--set", "replicas=-1"), "rc hello: replicas: -1 is negative"),
        (("--set", "soak=10s"), "--set soak: '10s': "),
        (("--set", "soak=-1"), "--set soak: '-1': expected a number of at least 0"),
        (("--set", "max_surge=-1"), "--set max_surge: '-1': expected a whole number, or a share such as 25%"),
        (("--set", "soak=nan"), "--set soak: 'nan': "),
        (("--set", "disabled=maybe"), "--set disabled: 'maybe': "),
        (("--set", "max_unavailable=25 %"), "--set max_unavailable: '25 %': "),
        (("--set", "max_unavailable=0"), "rc hello: update.max_unavailable: 0, and update.max_surge is 0, too"),
        (("--set", "canary=1", "--set", "update.canary=2"), "--set canary: given twice"),
        (("--set", "canary=1", "--set", "canary=2"), "canary is given twice"),
        (("--set", "node_selector=a=b=c"), "--set node_selector: "),
        (("--set", "allocation_strategy=any"), "--set allocation_strategy: 'any' is neither static nor dynamic"),
        (("--set", "replicas=3", "--rc", "nope"), "--rc: there is no rc nope"),
        (("--lose", ","), "--lose ',' names no node"),
    ],
)
async def test_mistakes_are_named(running: CommandLine, options: tuple[str, ...], complaint: str) -> None:
    ran = await running("what-if", *options)
    assert ran.code in (1, 2)
    assert ran.err.startswith("error: ")
    assert complaint in ran.err


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--label", "a=b", "--lose", "n1"], "--label: is of the nodes that would join; give --add N, too"),
        (["--add", "1", "--label", "a b=c"], "--label: label key 'a b'"),
        (["--add", "1", "--label", "=c"], "--label: label key ''"),
        (["--add", "1", "--label", "a=b/c"], "--label: label value 'b/c'"),
        (["--set", "max_surge=-1"], "--set max_surge: '-1': expected a whole number, or a share such as 25%"),
        (["--set", "soak=-1"], "--set soak: '-1': expected a number of at least 0"),
    ],
)
async def test_what_can_not_be_asked_is_refused(running: CommandLine, options: list[str], complaint: str) -> None:
    ran = await running("what-if", *options)
    assert (ran.code, ran.out) == (1, "")
    assert complaint in ran.err


@pytest.mark.parametrize("number", ["0", "-1", "100001"])
async def test_no_more_nodes_join_than_memory_holds(running: CommandLine, number: str) -> None:
    ran = await running("what-if", "--add", number)
    assert ran.code
    assert f"'--add': {number} is not in the range 1<=x<=100000" in ran.err
