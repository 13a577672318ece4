"""Following an RC, on virtual time; the tests write the owner's records."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from rcfarm.cli.rc.follow import CRASHES, NOTE_AFTER, OBSTACLE_AFTER, Followed, Follower
from rcfarm.operations.rcs import ReplicationControllers
from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.kv.protocol import Op, SessionSpec
from store.schema.keys import Keys
from store.schema.records import (
    FarmMember,
    Health,
    HealthState,
    NodeAlive,
    Owner,
    Process,
    RCState,
    RCStatus,
    Reality,
    Reason,
    encode,
    rfc3339,
)

pytestmark = pytest.mark.looptime

MANIFEST = b'{"id":"hello","launchables":{"web":{"command":["true"]}}}'
TIMEOUT = 60.0


class Scene:
    """An RC `hello`, and methods that write as its owner and its agents would."""

    def __init__(self) -> None:
        self.store, self.keys = EmbeddedStore(), Keys("test")
        self.rcs = ReplicationControllers(self.store, self.keys)
        self.said: list[str] = []
        self.notes: list[str] = []
        self.session = self.manifest = ""

    @classmethod
    async def of(cls, replicas: int, *nodes: str, state: RCState | None = None, owned: bool = True) -> Scene:
        """Return an RC with a pod placed on each node, and its owner's status."""
        scene = cls()
        scene.manifest = (await scene.rcs.create(MANIFEST, rc_id="hello", replicas=replicas)).manifest
        scene.session = (await scene.store.create_session(SessionSpec("all", ttl=86400, check_ttl=None))).id
        if owned:
            await scene.claim()
        for node in nodes:
            await scene.place(node)
        if state is not None:
            await scene.status(state)
        return scene

    async def claim(self) -> None:
        await self.store.txn([ops.lock(self.keys.owner("hello"), encode(Owner("farm-1", "")), self.session)])

    async def place(self, node: str) -> None:
        labels = {"pod_id": "hello", "replication_controller_id": "hello"}
        await self.store.put(self.keys.pod("hello", node), encode(labels))

    async def report(
        self, node: str, status: HealthState = "passing", reason: str = "", *, since: str = "", condition: str = ""
    ) -> None:
        output = "refused" if status != "passing" else ""
        health = Health(status, self.manifest, output, since, condition, reason if condition else "")
        process = Process(state="backoff" if reason else "running", reason=reason)
        reality = Reality(manifest=self.manifest, rc="hello", state="running", launchables={"web": process})
        await self.store.txn(
            [
                ops.lock(self.keys.node_alive(node), encode(NodeAlive(node, "")), self.session),
                ops.lock(self.keys.health("hello", node), encode(health), self.session),
                ops.put(self.keys.reality(node, "hello"), encode(reality)),
            ]
        )

    async def status(self, state: RCState, *, generation: int = 1, reason: str = "", code: str = "") -> None:
        reasons = (Reason(code or state, reason),) if reason else ()
        status = RCStatus(
            state=state, generation=generation, desired=0, placed=0, healthy=0, farm="f", token=1, reasons=reasons
        )
        await self.store.put(self.keys.status("hello"), encode(status))

    def follower(self, timeout: float = TIMEOUT) -> Follower:
        return Follower(self.store, self.keys, "hello", timeout=timeout, say=self.said.append, note=self.notes.append)


async def during(
    steps: Callable[[], Coroutine[None, None, None]], waiting: Awaitable[Followed]
) -> tuple[Followed, float]:
    """Run the steps of owner and agents while a follower waits. Return its result and the time."""
    playing = asyncio.create_task(steps())
    followed, ended = await waiting, now()
    await playing
    return followed, ended


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_it_ends_as_soon_as_every_pod_passes() -> None:
    """Pods must be healthy, not only placed; a state reached at 7 s is reported at 7 s."""
    scene = await Scene.of(2)

    async def owner() -> None:
        await asyncio.sleep(2)
        await scene.place("node-1")
        await scene.place("node-2")
        await scene.status("converged")
        await asyncio.sleep(5)
        await scene.report("node-1")
        await scene.report("node-2")

    followed, ended = await during(owner, scene.follower().until_placed(1))

    assert followed == (True, [])
    assert ended == pytest.approx(7.0, abs=0.1)
    assert scene.said[0] == "0 of 2 placed, 0 healthy"
    assert scene.said[-1] == "2 of 2 placed, 2 healthy"


async def test_an_old_status_does_not_count() -> None:
    """Until the owner has acted on this generation the change is not complete, whatever the counts are."""
    scene = await Scene.of(0)
    await scene.status("converged", generation=1)
    await scene.rcs.disable("hello")
    await scene.rcs.enable("hello")

    async def owner() -> None:
        await asyncio.sleep(4)
        await scene.status("converged", generation=3)

    followed, ended = await during(owner, scene.follower().until_placed(3))

    assert followed == (True, [])
    assert ended == pytest.approx(4.0, abs=0.1)


async def test_a_shortage_that_passes_is_none() -> None:
    """A farm that sees its nodes one by one is short only briefly; following continues."""
    scene = await Scene.of(1, state="short")

    async def owner() -> None:
        await asyncio.sleep(OBSTACLE_AFTER / 2)
        await scene.place("node-1")
        await scene.report("node-1")
        await scene.status("converged")

    followed, _ = await during(owner, scene.follower().until_placed(1))

    assert followed == (True, [])


@pytest.mark.parametrize("state", ["short", "held", "quarantined", "disabled"])
async def test_an_obstacle_ends_it_once_it_has_lasted(state: RCState) -> None:
    """A shortage, the brake, a quarantine and a disabled RC end following early, with the owner's reasons."""
    scene = await Scene.of(2, "node-1")
    await scene.report("node-1")
    await scene.status(state, reason="because")

    assert await scene.follower().until_placed(1) == (False, ["because"])
    assert now() == pytest.approx(OBSTACLE_AFTER, abs=0.1)


async def test_sick_pods_are_named_at_the_timeout() -> None:
    """After the timeout each pod that does not pass is listed with its agent's report."""
    scene = await Scene.of(3, "node-1", "node-2", "node-3", state="converged")
    await scene.report("node-1")
    await scene.report("node-2", "critical", "exit code 7")

    complete, reasons = await scene.follower(20).until_placed(1)

    assert not complete
    assert now() == pytest.approx(20.0, abs=0.1)
    assert reasons == [
        "3 of 3 placed, 1 healthy after 20 seconds",
        "node-2: running, health critical, exit code 7, refused",
        "node-3: its agent has not reported the pod yet",
    ]


async def test_health_of_another_manifest_does_not_count() -> None:
    """While the old manifest still runs, the change is not complete."""
    scene = await Scene.of(1, "node-1")
    await scene.report("node-1")
    await scene.rcs.set_manifest("hello", MANIFEST.replace(b"true", b"false"))
    await scene.status("converged", generation=2)

    complete, _ = await scene.follower(5).until_placed(2)

    assert not complete


async def test_pods_that_still_stop_are_waited_for() -> None:
    """A scale-down is complete when the removed pods' health records, which their agents delete last, are gone."""
    scene = await Scene.of(1, "node-1", state="converged")
    await scene.report("node-1")
    await scene.report("node-2")

    async def agent() -> None:
        await asyncio.sleep(3)
        await scene.store.delete(scene.keys.health("hello", "node-2"))

    followed, ended = await during(agent, scene.follower().until_placed(1))

    assert followed == (True, [])
    assert ended == pytest.approx(3.0, abs=0.1)
    assert "1 of 1 placed, 1 healthy, 1 stopping" in scene.said


async def test_an_rc_without_owner_is_noted_once_and_waited_for() -> None:
    """Without an owner, a note says why after two seconds; a farm that starts later still completes the change."""
    scene = await Scene.of(0, owned=False)
    member = encode(FarmMember(farm="farm-1", selector="team=other"))
    await scene.store.txn([ops.lock(scene.keys.farm("farm-1"), member, scene.session)])

    async def farm() -> None:
        await asyncio.sleep(NOTE_AFTER + 3)
        await scene.place("node-9")
        await asyncio.sleep(1)
        await scene.store.delete(scene.keys.pod("hello", "node-9"))
        await asyncio.sleep(2)
        await scene.claim()
        await scene.status("converged")

    followed, _ = await during(farm, scene.follower().until_placed(1))

    assert followed == (True, [])
    assert scene.notes == ["no live farm matches the labels of rc hello (pod_id=hello): farm-1 takes team=other"]


async def test_a_deletion_by_another_process_ends_it() -> None:
    """Following ends at once when the RC is deleted."""
    scene = await Scene.of(1)

    async def operator() -> None:
        await asyncio.sleep(1)
        await scene.rcs.delete("hello", force=True)

    followed, _ = await during(operator, scene.follower().until_placed(1))

    assert followed == (False, ["the RC was deleted"])


async def test_a_later_manifest_ends_it() -> None:
    """A deployment whose manifest another operator replaces has not been carried out, however well the other one
    does."""
    scene = await Scene.of(1, "node-1")
    spec = await scene.rcs.get("hello")

    async def operator() -> None:
        await asyncio.sleep(1)
        changed = msgspec.structs.replace(spec, generation=2, revision=2, revised_by="bob@laptop")
        await scene.store.put(scene.keys.spec("hello"), encode(changed))
        await scene.report("node-1")
        await scene.status("converged", generation=2)

    followed, ended = await during(operator, scene.follower().until_placed(1, revision=1))

    text = "revision 1 was replaced by revision 2 of bob@laptop; `rcfarm rollout status hello` shows that"
    assert followed == (False, [text])
    assert ended == pytest.approx(1.0, abs=0.1)
    assert (await scene.follower().until_placed(1)).complete, "a change of the replicas alone asks for no manifest"


async def _delete_folder(scene: Scene) -> None:
    folder: list[Op] = [ops.delete_tree(scene.keys.rc("hello"))]
    await scene.store.txn(folder)


async def test_a_deletion_is_complete_when_keys_and_processes_are_gone() -> None:
    """A deletion is complete once the RC's folder is empty and the last agent reports no process."""
    scene = await Scene.of(1, "node-1")
    await scene.report("node-1")
    await scene.rcs.delete("hello", force=True)

    async def owner_then_agent() -> None:
        await asyncio.sleep(1)
        for key in (scene.keys.spec("hello"), scene.keys.pod("hello", "node-1"), scene.keys.health("hello", "node-1")):
            await scene.store.delete(key)
        await asyncio.sleep(3)
        assert scene.said[-1] == "0 pods left"  # the owner's own key is still there
        await _delete_folder(scene)
        await asyncio.sleep(3)
        await scene.store.delete(scene.keys.reality("node-1", "hello"))

    followed, ended = await during(owner_then_agent, scene.follower().until_gone("hello"))

    assert followed == (True, [])
    assert ended == pytest.approx(7.0, abs=0.1)
    assert scene.said[-1] == "waiting for node-1/hello to stop"


async def test_another_rcs_process_of_the_same_pod_id_is_none_of_ours() -> None:
    """A reality that belongs to another RC does not keep a deletion from being complete."""
    scene = await Scene.of(0)
    foreign = Reality(manifest="x", rc="other", state="running")
    await scene.store.put(scene.keys.reality("node-1", "hello"), encode(foreign))
    await _delete_folder(scene)

    assert await scene.follower().until_gone("hello") == (True, [])


async def test_a_process_on_a_dead_node_is_named_and_not_waited_for() -> None:
    """A dead agent can't report that the process stopped, so following ends; the result names the process."""
    scene = await Scene.of(1)
    await scene.report("node-1")
    await scene.store.txn([ops.unlock(scene.keys.node_alive("node-1"), b"{}", scene.session)])
    await _delete_folder(scene)

    complete, reasons = await scene.follower().until_gone("hello")

    assert not complete
    assert reasons == ["node-1: a process may be left: its agent does not answer"]
    assert now() < 1


async def test_the_brake_ends_waiting_for_a_deletion() -> None:
    """While the brake is on, following a deletion ends early: only an operator can release the brake."""
    scene = await Scene.of(1, "node-1")
    await scene.rcs.delete("hello", force=True)
    await scene.status("held", generation=2, reason="the brake is on")

    assert await scene.follower().until_gone("hello") == (False, ["the brake is on"])
    assert now() == pytest.approx(OBSTACLE_AFTER, abs=0.1)


async def test_a_cancelled_follower_leaves_nothing_behind() -> None:
    """Ctrl-C ends the watch and leaves no task."""
    scene = await Scene.of(1)
    waiting = asyncio.create_task(scene.follower().until_placed(1))
    await asyncio.sleep(1)

    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_it_waits_until_the_pods_have_stayed_healthy() -> None:
    """A pod that starts to pass must keep passing; a crash restarts the required time."""
    scene = await Scene.of(1, "node-1", state="converged")

    async def agent() -> None:
        await asyncio.sleep(1)
        await scene.report("node-1", since="1")
        await asyncio.sleep(6)
        await scene.report("node-1", "critical", since="2")
        await asyncio.sleep(2)
        await scene.report("node-1", since="3")

    followed, ended = await during(agent, scene.follower().until_placed(1, 10.0))

    assert followed == (True, [])
    assert ended == pytest.approx(19.0, abs=0.1)
    assert "1 of 1 placed, 1 healthy; waiting until healthy for 10s" in scene.said


@pytest.mark.parametrize(("ago", "condition", "waited"), [(60, "", 0.0), (0, "completed", 0.0), (-3600, "", 10.0)])
async def test_the_time_already_healthy_counts(ago: float, condition: str, waited: float) -> None:
    """A completed pod counts at once; a timestamp in the future, of an agent whose clock is ahead, is ignored."""
    scene = await Scene.of(1, "node-1", state="converged")
    await scene.report("node-1", since=rfc3339(datetime.now(UTC) - timedelta(seconds=ago)), condition=condition)

    assert (await scene.follower().until_placed(1, 10.0)).complete
    assert now() == pytest.approx(waited, abs=0.1)


async def test_the_timeout_may_come_before_they_have_stayed_healthy() -> None:
    """Pods healthy for too short a time do not complete the change, and the reason says so."""
    scene = await Scene.of(1, "node-1", state="converged")
    await scene.report("node-1", since="1")

    complete, reasons = await scene.follower(4).until_placed(1, 10.0)

    assert not complete
    assert reasons == ["not healthy for 10s without interruption yet (--wait-healthy)"]


@pytest.mark.parametrize(
    ("code", "patience"), [("crashing", CRASHES), ("blocked", CRASHES), ("failed", OBSTACLE_AFTER)]
)
async def test_pods_that_crash_end_the_wait_with_their_cause(code: str, patience: float) -> None:
    """A crash loop, a pod that can't start and a failed one-off end following early."""
    scene = await Scene.of(1, "node-1")
    await scene.report("node-1", "critical", "web exited with code 3", condition=code)
    await scene.status("progressing", code=code, reason="1 of 1 pod …")

    complete, reasons = await scene.follower().until_placed(1, 10.0)

    assert not complete
    assert now() == pytest.approx(patience, abs=0.1)
    assert len(reasons) == 1
    assert reasons[0].startswith("node-1: ")
    assert "web exited with code 3" in reasons[0]
