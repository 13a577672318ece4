"""`rcfarm rc …` on an embedded store, through its API, with no other client."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rcfarm.cli import CHANGED_SINCE_PLANNED
from rcfarm.cli.kit.command import explain
from rcfarm.operations.errors import ChangedSincePlanned
from store.kv import ops
from store.kv.protocol import SessionSpec
from store.schema import audit
from store.schema.manifest import MAX_MANIFEST_BYTES
from store.schema.records import Mutation, NodeSpec, Owner, RCState, RCStatus, Reason, encode
from tests.support.programs.cli import CommandLine, run

MANIFEST = b'{"id":"hello","launchables":{"web":{"command":["true"]}}}'
FILE = "replicas: 2\nnode_selector: pool=web\nmanifest: {id: hello, launchables: {web: {command: [serve]}}}\n"


async def _own(cli: CommandLine, rc_id: str) -> None:
    session = (await cli.store.create_session(SessionSpec("farm-1", ttl=86400, check_ttl=None))).id
    await cli.store.txn([ops.lock(cli.keys.owner(rc_id), encode(Owner("farm-1", "2026-01-01T00:00:00Z")), session)])


async def test_apply_shows_creates_and_then_changes(cli: CommandLine) -> None:
    """The difference comes first; the same file again changes nothing; another one changes what differs."""
    created = await cli("rc", "apply", "-f", "-", "--yes", "--detach", stdin=FILE)
    again = await cli("rc", "apply", "-f", "-", "--detach", stdin=FILE)
    changed = await cli("rc", "apply", "-f", "-", "--yes", "--detach", stdin=FILE.replace("2", "5"))

    assert (created.code, created.out) == (0, "rc hello created\n")
    assert "rc hello will be created:" in created.err
    assert "+node_selector: pool=web" in created.err
    assert (again.code, again.out, again.err) == (0, "rc hello unchanged\n", "rc hello: nothing to change\n")
    assert (changed.code, changed.out) == (0, "rc hello changed\n")
    assert "-replicas: 2\n  +replicas: 5" in changed.err
    assert (await cli.rcs.get("hello")).replicas_desired == 5


async def test_apply_asks_for_confirmation(cli: CommandLine) -> None:
    """Without a terminal, `apply` changes nothing and names --yes."""
    ran = await cli("rc", "apply", "-f", "-", stdin=FILE)

    assert ran.code == 1
    assert "error: not confirmed: standard input is not a terminal; give --yes" in ran.err
    assert (await cli.rcs.list()).specs == []


async def test_a_dry_run_changes_nothing(cli: CommandLine) -> None:
    """`--dry-run` shows the difference and stops."""
    ran = await cli("rc", "apply", "-f", "-", "--dry-run", stdin=FILE)

    assert ran.code == 0
    assert "+replicas: 2" in ran.err
    assert (await cli.rcs.list()).specs == []


async def test_apply_takes_several_documents(cli: CommandLine, tmp_path: Path) -> None:
    """All documents are planned before the first is applied: a bad one stops them all."""
    second = FILE.replace("manifest", "id: other\nmanifest")
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(FILE + "---\n" + second)
    bad.write_text(FILE.replace("replicas: 2", "replicas: 9") + "---\n" + second.replace("2", "-2"))

    done = await cli("rc", "apply", "-f", str(good), "-y", "-d", "-o", "json")
    refused = await cli("rc", "apply", "-f", str(bad), "-y", "-d")

    assert [(o["id"], o["action"], o["complete"]) for o in done.json] == [
        ("hello", "created", None),
        ("other", "created", None),
    ]
    assert refused.code == 1
    assert refused.err.endswith(f"error: {bad}:5: replicas: -2 is negative; use 0 to remove every pod\n")
    assert (await cli.rcs.get("hello")).replicas_desired == 2


async def test_apply_takes_several_files(cli: CommandLine, tmp_path: Path) -> None:
    """All files are read before the first is applied; an RC in two of them is an error."""
    a, b, other = tmp_path / "a.yaml", tmp_path / "b.yaml", tmp_path / "other.yaml"
    a.write_text(FILE.replace("manifest", "id: one\nmanifest", 1))
    b.write_text(FILE.replace("manifest", "id: two\nmanifest", 1))
    other.write_text(b.read_text())

    twice = await cli("rc", "apply", "-f", str(b), "--file", str(other), "-y", "-d")
    done = await cli("rc", "apply", "-f", str(a), "-f", str(b), "-y", "-d")

    assert (twice.code, twice.err) == (1, f"error: {other}:1: rc two is given twice, first at {b}:1\n")
    assert done.out == "rc one created\nrc two created\n"
    assert [spec.id for spec in (await cli.rcs.list()).specs] == ["one", "two"]


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["rc", "create", "-m", "a", "-m", "b"], "--manifest / -m"),
        (["rc", "create", "-m", "a", "--replicas", "1", "--replicas=2"], "--replicas"),
        (["rc", "list", "-l", "a=1", "-l", "b=2"], "--selector / -l"),
        (["status", "-o", "json", "-o", "table"], "--output / -o"),
    ],
)
def test_an_option_that_is_given_twice_is_refused(arguments: list[str], option: str) -> None:
    """No value is dropped silently; flags and repeatable options are exempt."""
    ran = run(*arguments, env={"RCFARM_STORE": "consul://127.0.0.1:1"})

    assert ran.code in (1, 2)  # click's own 2 is made 1 by `run()` of the program
    assert f"{option} is given 2 times; give it once" in ran.err


@pytest.mark.parametrize(
    ("record", "generation"),
    [(b'{"id": "hello", "generation": 7, "replicas_desired": "three"}', 8), (b"{" * 5000, 1), (b"\xff\x00", 1)],
)
async def test_a_record_that_can_not_be_read_is_replaced_by_its_file(
    cli: CommandLine, record: bytes, generation: int
) -> None:
    """The old record is shown before the confirmation; pods stay, and the audit log keeps the old record."""
    key = cli.keys.spec("hello")
    await cli.store.put(key, record)
    await cli.store.put(cli.keys.pod("hello", "n1"), b'{"replication_controller_id":"hello","pod_id":"hello"}')

    sick = await cli("rc", "status", "hello")
    asked = await cli("rc", "apply", "-f", "-", "-d", stdin=FILE)
    done = await cli("rc", "apply", "-f", "-", "-d", "-y", stdin=FILE)

    assert sick.out.startswith("hello  unreadable  1 placed; the desired number can't be read\n")
    assert "rc hello: its record can't be read (" in asked.err
    assert "all of it will be replaced" in asked.err
    assert "+replicas: 2" in asked.err
    assert asked.code == 1
    assert (done.code, done.out) == (0, "rc hello replaced\n")
    spec = await cli.rcs.get("hello")
    assert (spec.replicas_desired, spec.generation) == (2, generation)
    assert [pod.node for pod in await cli.rcs.pods("hello")] == ["n1"]
    (event,) = await cli.rcs.history("hello")
    assert event.event_type == "REPLICATION_CONTROLLER_CHANGED"
    assert event.event_details["replaced_unreadable"]["value"] == record[:1000].decode(errors="replace")


async def test_a_record_is_not_replaced_by_another_pods_file(cli: CommandLine) -> None:
    """A file with another pod id than the placed pods' does not replace the record, nor a record that is newer."""
    await cli.store.put(cli.keys.spec("hello"), b"{")
    await cli.store.put(cli.keys.pod("hello", "n1"), b'{"replication_controller_id":"hello","pod_id":"other"}')

    ran = await cli("rc", "apply", "-f", "-", "-d", "-y", stdin=FILE)

    assert ran.code == 1
    assert "the pod id of rc hello is 'other', and a pod id never changes" in ran.err


async def test_rcs_applied_before_an_error_are_named(cli: CommandLine) -> None:
    """Each RC is a separate transaction: if the second is refused, a note names the first as applied."""
    await cli.rcs.create(MANIFEST.replace(b"hello", b"other"), rc_id="other")
    session = (await cli.store.create_session(SessionSpec("x", ttl=86400, check_ttl=None))).id
    record = Mutation(holder="rollout-7", reason="", since="")
    await cli.store.txn([ops.lock(cli.keys.mutation("other"), encode(record), session)])

    ran = await cli("rc", "apply", "-f", "-", "-y", "-d", stdin=FILE + "---\n" + FILE.replace("hello", "other"))

    assert ran.code == 1
    assert ran.err.splitlines()[-2:] == [
        "applied before the error: rc hello",
        "error: rc other is being changed by rollout-7; try again when that is done",
    ]
    assert (await cli.rcs.get("hello")).replicas_desired == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"replicas: [", "f.yaml:2: not valid YAML"),
        (b"", "the file is empty"),
        (b"replicas: 1\nmanifesto: {}\n", "f.yaml:2: manifesto: unknown field; did you mean manifest?"),
        (FILE.replace("pool=web", "pool in (web").encode(), "node_selector"),
        (FILE.encode() + b"pod_labels: {'bad key': x}\n", "pod_labels: label key 'bad key'"),
        (FILE.replace("replicas: 2\n", "").encode(), "replicas: missing"),
    ],
)
async def test_a_bad_file_is_explained(cli: CommandLine, tmp_path: Path, content: bytes, message: str) -> None:
    """Each kind of mistake gives one line on standard error and exit code 1; nothing is written."""
    path = tmp_path / "f.yaml"
    path.write_bytes(content)

    ran = await cli("rc", "apply", "-f", str(path), "--yes")

    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("error: ")
    assert message in ran.err
    assert ran.err.count("\n") == 1
    assert (await cli.rcs.list()).specs == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--node-selector", "a in ("], "node_selector: selector 'a in ('"),
        (["--replicas", "-3"], "replicas: -3 is negative"),
        (["--allocation-strategy", "best"], "allocation_strategy: 'best' is neither static nor dynamic"),
        (["--pod-label", "novalue"], "--pod-label 'novalue': write KEY=VALUE"),
        (["--pod-label", "a=1", "--pod-label", "a=2"], "--pod-label 'a=2': a is given twice"),
        (["--rc-label", "bad key=1"], "rc_labels: label key 'bad key'"),
        (["--rc-label", "pod_id=x"], "rc_labels: pod_id is set by rcfarm"),
        (["--id", "No_Label"], "id: 'No_Label' is not a DNS label"),
        (["--max-unavailable", "0"], "max_unavailable: 0"),
    ],
)
async def test_create_refuses_bad_options(cli: CommandLine, tmp_path: Path, arguments: list[str], message: str) -> None:
    """The error names the invalid option."""
    path = tmp_path / "m.json"
    path.write_bytes(MANIFEST)

    ran = await cli("rc", "create", "--manifest", str(path), *arguments)

    assert ran.code == 1
    assert ran.err.startswith(f"error: {message}"), ran.err
    assert (await cli.rcs.list()).specs == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "can't be read: No such file or directory"),
        (b"  \n", "the file is empty"),
        (b"id: [", "manifest: not valid YAML"),
        (b'{"id":"x"}', "manifest: Object missing required field `launchables`"),
        (b"id: x\nlaunchables: {a: {command: [b]}}\nportz: {}\n", "portz"),
        (b" " * (MAX_MANIFEST_BYTES + 1) + MANIFEST, "the limit is 262144"),
        (b"\xff\xfe\xfd", "manifest: not valid YAML"),
        (FILE.encode(), "this is an RC's file, not a manifest; `rcfarm rc apply -f"),
    ],
)
async def test_create_never_takes_an_unusable_manifest(
    cli: CommandLine, tmp_path: Path, content: bytes | None, message: str
) -> None:
    """An unreadable path is never an empty manifest; malformed and oversized manifests are explained."""
    path = tmp_path / "m.yaml"
    if content is not None:
        path.write_bytes(content)

    ran = await cli("rc", "create", "--manifest", str(path))

    assert ran.code == 1
    assert message in ran.err
    assert (await cli.store.list(cli.keys.manifests)).entries == []


async def test_create_scale_enable_disable(cli: CommandLine, tmp_path: Path) -> None:
    """Each command prints its outcome and writes the change."""
    path = tmp_path / "m.json"
    path.write_bytes(MANIFEST)

    created = await cli(
        *("rc", "create", "-m", str(path), "--id", "web", "--replicas", "1", "-n", "a=1", "-s", "dynamic"),
        *("-p", "tier=web", "-r", "team=x", "--detach"),
    )
    scaled = await cli("rc", "scale", "web", "4", "--detach")
    disabled = await cli("rc", "disable", "web")
    negative = await cli("rc", "scale", "web", "-1")

    assert (created.out, scaled.out, disabled.out) == ("rc web created\n", "rc web scaled\n", "rc web disabled\n")
    assert (negative.code, negative.err) == (1, "error: replicas: -1 is negative; use 0 to remove every pod\n")
    spec = await cli.rcs.get("web")
    assert (spec.replicas_desired, spec.node_selector, spec.allocation_strategy) == (4, "a=1", "dynamic")
    assert (spec.pod_labels, spec.rc_labels) == ({"tier": "web"}, {"team": "x", "pod_id": "hello"})
    assert spec.disabled
    assert (await cli("rc", "enable", "web", "-o", "json")).json["rc"]["disabled"] is False


async def test_following_without_a_farm_says_so(cli: CommandLine) -> None:
    """An RC without an owner gives a note while waiting, and exit code 2 at the end."""
    await cli.rcs.create(MANIFEST, rc_id="web")

    ran = await cli("rc", "scale", "web", "1", "--timeout", "2.5")

    assert ran.code == 2
    assert "no live farm: rc web waits until one is started (`rcfarm farm`)" in ran.err
    assert ran.out == "rc web scaled, but not complete: 0 of 1 placed, 0 healthy\n  no farm owns it\n"


def test_a_stale_plan_has_its_own_exit_code() -> None:
    """If another process changes the RC between the difference and its confirmation, the exit code is 3."""
    assert explain(ChangedSincePlanned("rc hello was changed")) == ("rc hello was changed", CHANGED_SINCE_PLANNED)
    assert CHANGED_SINCE_PLANNED == 3


async def test_list_shows_every_rc_and_isolates_the_unreadable(cli: CommandLine) -> None:
    """`list` prints a table, or JSON with documented fields; a bad record has its own line and hides no neighbour."""
    await cli.rcs.create(MANIFEST, rc_id="good", replicas=2, rc_labels={"team": "x"})
    await cli.store.put(cli.keys.spec("bad"), b'{"id":"bad"}')

    table = await cli("rc", "list")
    listed = (await cli("rc", "list", "-o", "json")).json
    chosen = (await cli("rc", "list", "-l", "team=x", "-o", "json")).json

    assert table.out.splitlines() == [
        "RC    STATE       PLACED  HEALTHY  POD    OWNER  NODES",
        "bad   unreadable       -        0  -      -      -",
        "good  unowned        0/2        0  hello  -      -",
    ]
    assert [rc["state"] for rc in listed] == ["unreadable", "unowned"]
    assert listed[0]["reasons"][0]["code"] == "unreadable"
    assert [rc["id"] for rc in chosen] == ["good"]


async def test_an_empty_fleet_is_no_error(cli: CommandLine) -> None:
    """Without RCs, JSON is an empty list, and the table a hint."""
    assert (await cli("rc", "list", "-o", "json")).json == []
    assert "no replication controllers; create one" in (await cli("rc", "list")).err


async def test_status_shows_state_reasons_and_pods(cli: CommandLine) -> None:
    """`status` shows the owner, the reasons for missing pods, and each pod."""
    spec = await cli.rcs.create(MANIFEST, rc_id="web", replicas=2)
    await _own(cli, "web")
    status = RCStatus(
        state="short",
        generation=1,
        desired=2,
        placed=1,
        healthy=0,
        farm="farm-1",
        token=1,
        reasons=(Reason("short", "1 of 2 replicas has no node"),),
    )
    await cli.store.put(cli.keys.status("web"), encode(status))
    await cli.store.put(cli.keys.pod("web", "node-1"), b'{"pod_id":"hello","replication_controller_id":"web"}')

    shown = await cli("rc", "status", "web")
    as_json = (await cli("rc", "status", "web", "-o", "json")).json

    lines = shown.out.splitlines()
    assert lines[0] == "web  short  1 of 2 placed, 0 healthy"
    assert lines[1].startswith("owner: farm-1 since ")
    assert lines[2] == "  short: 1 of 2 replicas has no node"
    assert lines[-1].split() == ["node-1", "waiting", "unknown", "-", "-"]
    assert as_json["rc"]["manifest"] == spec.manifest
    assert as_json["pods"][0]["health"] == "unknown"


async def test_get_prints_what_apply_takes_and_the_exact_manifest(cli: CommandLine) -> None:
    """`get` round-trips through `apply`; `get --manifest` prints the given bytes exactly."""
    await cli.rcs.create(MANIFEST, rc_id="web", replicas=2)

    text = (await cli("rc", "get", "web")).out
    again = await cli("rc", "apply", "-f", "-", "--detach", stdin=text)

    assert again.out == "rc web unchanged\n"
    assert (await cli("rc", "get", "web", "--manifest")).out.encode() == MANIFEST
    assert (await cli("rc", "get", "web", "-o", "json")).json["replicas_desired"] == 2


async def test_explain_gives_the_reasons_of_the_status_first(cli: CommandLine) -> None:
    """What the owner wrote is the reason; only without one do the pods, or the missing turn of the owner, explain."""
    await cli.rcs.create(MANIFEST, rc_id="web", replicas=1)
    await _own(cli, "web")

    async def reasons(state: RCState, *given: Reason) -> list[str]:
        status = RCStatus(
            state=state, generation=1, desired=1, placed=1, healthy=0, farm="farm-1", token=1, reasons=given
        )
        await cli.store.put(cli.keys.status("web"), encode(status))
        return [each["message"] for each in (await cli("rc", "explain", "web", "-o", "json")).json["why"]]

    assert await reasons("progressing", Reason("unhealthy", "a pod fails its probe")) == ["a pod fails its probe"]
    assert await reasons("progressing") == ["its owner has not processed the latest change of its pods yet"]
    await cli.store.put(cli.keys.pod("web", "node-1"), b'{"pod_id":"hello","replication_controller_id":"web"}')
    assert (await reasons("progressing"))[0].startswith("pods do not pass yet: node-1 ")


async def test_owner_history_and_explain(cli: CommandLine) -> None:
    """`owner` names the farm, `history` the events and their actors, `explain` a verdict on each node."""
    await cli.rcs.create(MANIFEST, rc_id="web", node_selector="pool=web")
    await cli.store.put(cli.keys.node_spec("node-1"), encode(NodeSpec(name="node-1", labels={"pool": "db"})))
    unowned = await cli("rc", "owner", "web")
    await _own(cli, "web")
    await cli.rcs.set_replicas("web", 3)

    owner = (await cli("rc", "owner", "web", "-o", "json")).json
    history = (await cli("rc", "history", "web")).out.splitlines()
    explained = (await cli("rc", "explain", "web")).out

    assert unowned.out == "no live farm: rc web waits until one is started (`rcfarm farm`)\n"
    assert owner == {"farm": "farm-1", "held": True, "since": "2026-01-01T00:00:00Z", "token": 1}
    assert "created" in history[1]
    assert history[2].endswith("test  replicas desired 0 → 3")
    assert "node-1  no     it has pool=db, the selector asks for pool=web" in explained


@pytest.mark.parametrize("command", [("get",), ("status",), ("owner",), ("explain",), ("enable",), ("delete", "-y")])
async def test_an_unknown_rc_is_named(cli: CommandLine, command: tuple[str, ...]) -> None:
    """Every command on an RC that does not exist says so in one line."""
    ran = await cli("rc", command[0], "ghost", *command[1:])

    assert (ran.code, ran.out) == (1, "")
    assert ran.err == "error: there is no rc ghost; `rcfarm rc list` shows those that exist\n"


async def test_the_mutation_lock_is_respected_and_its_holder_named(cli: CommandLine) -> None:
    """An edit during a rollout is refused."""
    await cli.rcs.create(MANIFEST, rc_id="web")
    session = (await cli.store.create_session(SessionSpec("x", ttl=86400, check_ttl=None))).id
    record = Mutation(holder="rollout-7", reason="rolling update", since="")
    await cli.store.txn([ops.lock(cli.keys.mutation("web"), encode(record), session)])

    ran = await cli("rc", "scale", "web", "3")

    assert ran.code == 1
    assert ran.err.splitlines() == [
        "rc web: 3 of 3 replicas will have no node: no node may take pods",
        "error: rc web is being changed by rollout-7 (rolling update); try again when that is done",
    ]


async def test_delete_asks_while_there_are_pods(cli: CommandLine) -> None:
    """`delete` asks for confirmation only while there are pods, and then marks the RC as deleting."""
    await cli.rcs.create(MANIFEST, rc_id="web", replicas=2)
    await cli.rcs.create(MANIFEST, rc_id="idle")

    asked = await cli("rc", "delete", "web", "--detach")
    forced = await cli("rc", "delete", "web", "--detach", "--yes")
    idle = await cli("rc", "delete", "idle", "--detach")

    assert (asked.code, forced.code, idle.code) == (1, 0, 0)
    assert "not confirmed" in asked.err
    assert (await cli.rcs.get("web")).deleting
    assert (await cli.rcs.get("idle")).deleting


async def test_a_new_store_gets_its_layout_with_the_first_rc(cli: CommandLine, tmp_path: Path) -> None:
    """Reading an unused store writes nothing; creating fixes the layout."""
    path = tmp_path / "m.json"
    path.write_bytes(MANIFEST)
    elsewhere = {"RCFARM_STORE_ROOT": "elsewhere"}

    assert (await cli("rc", "list", "-o", "json", **elsewhere)).json == []
    assert await cli.store.get("elsewhere/meta") is None
    await cli("rc", "create", "-m", str(path), "--detach", **elsewhere)

    meta = await cli.store.get("elsewhere/meta")
    assert meta is not None
    assert json.loads(meta.value) == {"schema": 2, "shards": 32}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Consul at 127.0.0.1:9 is unavailable: "),
        (["--token-file", "none"], "--token-file none: can't be read: No such file or directory\n"),
    ],
)
def test_a_store_that_can_t_be_opened_is_one_line(arguments: list[str], message: str) -> None:
    """The error names the address and the cause, or the option and the path; there is no traceback."""
    ran = run("rc", "list", "--store", "consul://127.0.0.1:9", *arguments)

    assert ran.code == 1
    assert ran.err.startswith(f"error: {message}")
    assert ran.err.count("\n") == 1


async def test_the_audit_names_more_than_the_claimed_name(cli: CommandLine) -> None:
    """Beside the claimed name (LOGNAME), events have the user's id, and the manifest's digest before and after."""
    document = json.dumps(
        {"id": "web", "replicas": 0, "manifest": {"id": "web", "launchables": {"a": {"command": ["a"]}}}}
    )
    await cli("rc", "apply", "-f", "-", "-y", "-d", stdin=document)
    await cli("rc", "apply", "-f", "-", "-y", "-d", stdin=document.replace('["a"]', '["b"]'))
    await cli("rc", "scale", "web", "1", "-d", LOGNAME="the-ceo")
    created, changed, scaled = (await cli("rc", "history", "web", "-o", "json")).json
    before, after = changed["event_details"]["manifest"]
    assert created["event_details"]["manifest"] == [None, before]
    assert before != after
    assert scaled["event_details"]["manifest"] == [after, after]
    assert scaled["actor"].startswith("the-ceo@")
    assert scaled["uid"] == os.getuid()
    shown = (await cli("rc", "history", "web")).out.splitlines()
    assert f"(uid {os.getuid()})" in shown[-1]
    assert f"manifest {before[:12]}" in shown[1]
    assert f"manifest {before[:12]} → {after[:12]}" in shown[2]
    assert "manifest" not in shown[3]


async def test_an_event_of_another_form_is_shown_as_it_is(cli: CommandLine) -> None:
    """Whatever a program has written into its event, `history` shows that event and its neighbours."""
    odd: list[object] = ["x", {"a": "xyz"}, {"a": [1]}, [1], {"a": [1, 2]}]
    for changes in odd:
        await cli.store.txn([audit.event_op(cli.keys, "EVENT", {"rc": "web", "changes": changes}, actor="other")])

    ran = await cli("rc", "history", "web")

    assert ran.code == 0
    assert [line.rpartition("  ")[2] for line in ran.out.splitlines()[1:]] == [
        "changes x", "a xyz", "a 1", "changes 1", "a 1 → 2",
    ]  # fmt: skip


async def test_the_audit_log_is_exported_as_lines(cli: CommandLine) -> None:
    """Events of farms, which have no user, and of operators are exported oldest first, optionally of one RC."""
    farms = audit.event_op(cli.keys, "NODE_TRANSFER_STARTED", {"rc": "web"}, actor="farm-1")
    await cli.store.txn([farms])
    await cli.rcs.create(MANIFEST, rc_id="other")
    await cli("rc", "scale", "other", "1", "-d")

    lines = [json.loads(line) for line in (await cli("audit", "export")).out.splitlines()]
    others = [json.loads(line) for line in (await cli("audit", "export", "--rc", "other")).out.splitlines()]

    assert lines[0]["key"] == farms.key
    assert lines[0]["actor"] == "farm-1"
    assert not lines[0].keys() & {"uid", "accessor"}
    assert lines[-1]["uid"] == os.getuid()
    assert others == lines[1:]
    assert len(others) == 2
