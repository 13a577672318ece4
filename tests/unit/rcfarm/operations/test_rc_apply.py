"""Planning what a file would change, and doing exactly that."""

from __future__ import annotations

import pytest

from rcfarm.operations import rc_apply
from rcfarm.operations.documents import BadFile
from rcfarm.operations.errors import BadInput, ChangedSincePlanned, RCRefused
from rcfarm.operations.rc_apply import RCDocument, load
from rcfarm.operations.rcs import ReplicationControllers
from store.embedded.store import EmbeddedStore
from store.schema.keys import Keys
from store.schema.manifest import digest

MANIFEST = "manifest: {id: hello, launchables: {web: {command: [serve]}}}\n"


@pytest.fixture
def rcs() -> ReplicationControllers:
    return ReplicationControllers(EmbeddedStore(), Keys("test"), actor="ada")


def document(text: str) -> RCDocument:
    return load("f.yaml", (text + MANIFEST).encode())[0]


async def apply(rcs: ReplicationControllers, text: str) -> None:
    await rc_apply.carry_out(rcs, await rc_apply.plan(rcs, document(text)))


async def test_a_new_rc_is_created_as_written(rcs: ReplicationControllers) -> None:
    """Fields that are left out have their defaults; the difference shows the whole RC."""
    planned = await rc_apply.plan(rcs, document("replicas: 2\nnode_selector: 'b=1, a=1'\npod_labels: {x: y}\n"))
    spec = await rc_apply.carry_out(rcs, planned)

    assert planned.action == "create"
    assert "+replicas: 2" in rc_apply.difference(planned)
    assert spec == await rcs.get("hello")
    assert (spec.replicas_desired, spec.node_selector, spec.pod_labels) == (2, "a=1,b=1", {"x": "y"})
    assert spec.rc_labels == {"pod_id": "hello"}
    assert digest(await rcs.manifest(spec.manifest)) == spec.manifest


async def test_what_is_left_out_stays(rcs: ReplicationControllers) -> None:
    """An omission neither widens a selector nor undoes a scale. A map in the file is the whole map; the label that
    rcfarm sets stays."""
    await apply(rcs, "replicas: 2\nnode_selector: pool=web\nrc_labels: {team: x}\n")
    await rcs.set_replicas("hello", 7)

    await apply(rcs, "max_unavailable: 3\npod_labels: {a: '1', b: '2'}\n")
    await apply(rcs, "pod_labels: {c: '3'}\n")

    spec = await rcs.get("hello")
    assert (spec.replicas_desired, spec.node_selector, spec.max_unavailable) == (7, "pool=web", 3)
    assert (spec.pod_labels, spec.rc_labels) == ({"c": "3"}, {"team": "x", "pod_id": "hello"})


async def test_the_difference_shows_what_changes_and_little_else(rcs: ReplicationControllers) -> None:
    """Old and new lines, with a mark between distant parts, whatever the lines begin with."""
    await apply(rcs, "replicas: 2\n")
    text = "replicas: 3\n" + MANIFEST.replace("serve", "--, x")

    lines = rc_apply.difference(await rc_apply.plan(rcs, load("f", text.encode())[0]))

    assert [line for line in lines if line[0] in "+-"] == [
        "-replicas: 2",
        "+replicas: 3",
        "-      - serve",
        "+      - --",
        "+      - x",
    ]
    assert "…" in lines


async def test_a_change_in_between_is_not_overwritten(rcs: ReplicationControllers) -> None:
    """Exactly the confirmed change is made, or none."""
    await apply(rcs, "replicas: 2\n")
    planned = await rc_apply.plan(rcs, document("replicas: 3\n"))
    await rcs.set_replicas("hello", 9)

    with pytest.raises(ChangedSincePlanned):
        await rc_apply.carry_out(rcs, planned)

    assert (await rcs.get("hello")).replicas_desired == 9


async def test_an_rc_created_in_between_is_not_overwritten(rcs: ReplicationControllers) -> None:
    """If two operators create the same RC, the second one's `carry_out` raises `ChangedSincePlanned`."""
    planned = await rc_apply.plan(rcs, document("replicas: 3\n"))
    await apply(rcs, "replicas: 1\n")

    with pytest.raises(ChangedSincePlanned, match="created in the meantime"):
        await rc_apply.carry_out(rcs, planned)

    assert (await rcs.get("hello")).replicas_desired == 1


async def test_an_rc_that_is_being_deleted_is_left_alone(rcs: ReplicationControllers) -> None:
    """Nothing revives an RC halfway through its deletion."""
    await apply(rcs, "replicas: 1\n")
    await rcs.delete("hello", force=True)

    with pytest.raises(RCRefused, match="being deleted"):
        await apply(rcs, "replicas: 1\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "rc hello would be new: replicas: missing"),
        ("replicas: -1\n", "replicas: -1 is negative"),
        ("replicas: 1\nnode_selector: 'a in ('\n", "node_selector"),
        ("replicas: 1\nallocation_strategy: best\n", "allocation_strategy: 'best'"),
        ("replicas: 1\nmax_unavailable: 0\n", "max_unavailable: 0"),
        ("replicas: 1\npod_labels: {'a b': c}\n", "pod_labels"),
        ("replicas: 1\nrc_labels: {pod_id: x}\n", "rc_labels: pod_id is set by rcfarm"),
    ],
)
async def test_values_are_checked_before_anything_is_written(
    rcs: ReplicationControllers, text: str, message: str
) -> None:
    """An invalid value is refused with its place and its field."""
    with pytest.raises(BadInput, match=f"f.yaml:1: .*{message}"):
        await apply(rcs, text)

    assert (await rcs.list()).specs == []


async def test_the_pod_id_of_an_rc_never_changes(rcs: ReplicationControllers) -> None:
    """A manifest of another pod id needs another RC."""
    await apply(rcs, "replicas: 1\n")
    text = "id: hello\n" + MANIFEST.replace("id: hello", "id: other")

    with pytest.raises(BadInput, match=r"f.yaml:1: manifest: its id is 'other', but rc hello runs 'hello'"):
        await rc_apply.plan(rcs, load("f.yaml", text.encode())[0])


SCRIPTED = """\
replicas: 2
node_selector: a!=1
pod_labels: {x: 'true'}
allocation_strategy: dynamic
manifest:
  id: hello
  launchables:
    web:
      command:
      - sh
      - -c
      - |
        echo "one: two" > file
        exec serve
"""


async def test_what_get_prints_can_be_applied(rcs: ReplicationControllers) -> None:
    """The YAML of an RC reads back to the same RC: applying it changes nothing. A script in it stays readable."""
    await rc_apply.carry_out(rcs, await rc_apply.plan(rcs, load("f", SCRIPTED.encode())[0]))
    spec = await rcs.get("hello")

    text = rc_apply.as_yaml(spec, await rcs.manifest(spec.manifest))
    planned = await rc_apply.plan(rcs, load("again", text.encode())[0])

    assert (planned.action, rc_apply.difference(planned)) == ("none", [])
    assert '- |\n        echo "one: two" > file\n        exec serve\n' in text


async def test_a_file_without_the_mark_of_a_restart_changes_nothing(rcs: ReplicationControllers) -> None:
    """The pods would be restarted again. What is changed beside it keeps the mark; a mark of the file's own counts."""
    await apply(rcs, "replicas: 2\n")
    restarted = await rcs.restart("hello")
    assert (await rc_apply.plan(rcs, document(""))).action == "none"
    changed = load("f.yaml", MANIFEST.replace("serve", "better").encode())[0]
    planned = await rc_apply.plan(rcs, changed)
    assert b"restarted_at" in planned.document.raw_manifest
    assert planned.new.manifest != restarted.manifest
    own = load("f.yaml", MANIFEST.replace("id: hello", "id: hello, restarted_at: now").encode())[0]
    assert b'"restarted_at":"now"' in (await rc_apply.plan(rcs, own)).document.raw_manifest


async def test_the_settings_of_rollouts(rcs: ReplicationControllers) -> None:
    """A number or a share. A field that is left out keeps its value; only what differs from the defaults is shown."""
    await apply(rcs, "replicas: 2\nupdate: {canary: 10%, max_surge: 2, soak: 30}\n")
    await apply(rcs, "update: {canary: 3}\n")
    spec = await rcs.get("hello")
    assert spec.update is not None
    assert (spec.update.canary, spec.update.max_surge, spec.update.soak) == ("3", "2", 30.0)
    shown = rc_apply.as_yaml(spec, await rcs.manifest(spec.manifest))
    assert "update:\n  canary: 3\n  max_surge: 2\n  soak: 30.0\npod_labels" in shown


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("update: {canary: -1}", r"f.yaml:1: update.canary: expected a whole number of at least 0$"),
        ("update: {canary: lots}", r"f.yaml:1: update.canary: expected a whole number, or a share such as 25%$"),
        ("update: {soak: .inf}", r"f.yaml:1: update.soak: expected a number of at most 1000000000$"),
        ("update: {max_surge: 5.5}", r"f.yaml:1: update.max_surge: "),
        ("update: {min_healthy_time: soon}", r"f.yaml:1: update.min_healthy_time: "),
        ("update: {canary_selector: 3}", r"f.yaml:1: update.canary_selector: "),
        ("update: {canaries: 1}", r"f.yaml:1: update.canaries: unknown field; did you mean canary"),
        ("url: consul://c", r"f.yaml:1: url: unknown field$"),  # that of an artifact is not meant
        ("update: 3", r"f.yaml:1: update: "),
    ],
)
def test_wrong_settings_of_rollouts_are_named(text: str, complaint: str) -> None:
    with pytest.raises(BadFile, match=complaint):
        document(f"{text}\n")


async def test_settings_that_contradict_each_other_are_refused(rcs: ReplicationControllers) -> None:
    await apply(rcs, "replicas: 2\n")
    for text, complaint in (
        ("max_unavailable: 1\nupdate: {max_unavailable: 2}\n", "max_unavailable is given beside it; keep one of them"),
        ("update: {max_unavailable: 0}\n", "no change could ever be rolled out"),
        ("update: {min_healthy_time: 400}\n", "every rollout would fail; raise it"),
        ("update: {canary_selector: rack in (a}\n", r"update\.canary_selector: .*'rack in \(a'"),
        ("update: {canary_selector: rack=a, canary: 0}\n", "but update.canary is 0, so that there is no canary"),
        (
            "update: {canary_selector: rack=a, max_unavailable: 0, max_surge: 1}\n",
            "but update.max_unavailable is 0, and canaries are changed in place",
        ),
    ):
        with pytest.raises(BadInput, match=complaint):
            await rc_apply.plan(rcs, document(text))


async def test_what_is_shown_can_be_applied(rcs: ReplicationControllers) -> None:
    """`rc get | rc apply`: also with a `max_unavailable` of the rollouts, which takes the place of the other."""
    await apply(rcs, "replicas: 2\nupdate: {max_unavailable: 25%, canary_selector: 'b=1,a'}\n")
    spec = await rcs.get("hello")
    assert spec.policy.canary_selector == "a,b=1"
    shown = rc_apply.as_yaml(spec, await rcs.manifest(spec.manifest))
    assert (await rc_apply.plan(rcs, load("f.yaml", shown.encode())[0])).action == "none"
