"""A Framework operator relies on complete caches, and on UIDs instead of names."""

from __future__ import annotations

import asyncio

import pytest

from controllers.framework.api.types import FRAMEWORKS
from controllers.framework.operator import FrameworkOperator
from store.kube.api.errors import Expired, Unreachable
from store.kube.api.objects import CONFIG_MAPS, PODS, Object, uid_of
from store.kube.events import EventRecorder
from store.kube.memory.kube import Call
from tests.support.framework.cluster import NAMESPACE, Cluster, framework, now, role
from tests.support.jobs.train_jobs import Tally

pytestmark = pytest.mark.looptime


async def test_a_name_that_is_reused_during_an_outage_is_another_framework() -> None:
    """The operator sees the end of the first Framework and the creation of the second at the same moment, and before
    the end of the first one's pods: the second starts with its own attempt and pods."""
    async with Cluster().running() as cluster:
        first = await cluster.create(framework("job", role("worker", 2, annotations={})))
        before = await cluster.until_state("job", "AttemptRunning")

        is_away = {FRAMEWORKS, CONFIG_MAPS, PODS}

        def cut_off(call: Call) -> None:
            if call.verb in ("list", "watch") and call.resource in is_away:
                raise Unreachable("connection refused")

        cluster.api.before_call = cut_off
        cluster.api.break_watches(Expired("too old resource version", status=410))
        await asyncio.sleep(0.1)
        await cluster.api.delete(FRAMEWORKS, "job", NAMESPACE)
        second = await cluster.create(framework("job", role("worker", 2, annotations={})))
        await asyncio.sleep(30)
        is_away.remove(FRAMEWORKS)
        await asyncio.sleep(70)
        is_away.clear()

        assert uid_of(first) != uid_of(second)
        after = await cluster.until_state("job", "AttemptRunning")
        assert after["attemptStatus"]["id"] == 0
        assert after["attemptStatus"]["configMapUID"] != before["attemptStatus"]["configMapUID"]
        pods = await cluster.pods("job")
        assert {pod["metadata"]["annotations"]["FC_FRAMEWORK_UID"] for pod in pods.values()} == {uid_of(second)}
        assert {task["attemptStatus"]["podUID"] for task in await cluster.tasks("job", "worker")} == {
            uid_of(pod) for pod in pods.values()
        }


async def test_nothing_is_decided_on_caches_that_are_not_complete() -> None:
    """A new operator whose list of pods is late does nothing else, and then continues where the former one stopped."""
    async with Cluster().running() as cluster:
        await cluster.create(framework("job", role("worker", 2, annotations={})))
        before = await cluster.until_state("job", "AttemptRunning")
        await cluster.kill_operator()
        others: list[Call] = []
        listed = asyncio.Event()

        async def delay_pods(call: Call) -> None:
            if (call.verb, call.resource) == ("list", PODS):
                await asyncio.sleep(20)
                listed.set()
            elif call.verb not in ("list", "watch", "served"):
                others.append(call)

        cluster.api.before_call = delay_pods
        cluster.start_operator()
        await listed.wait()
        assert others == []
        await asyncio.sleep(60)
        assert await cluster.status("job") == before


async def test_a_conflict_is_no_failure() -> None:
    """Each write of a status finds that a user has just changed the spec. Both survive, and no sync is retried."""
    tally, edits = Tally(), 0

    async with Cluster().running(operator=False) as cluster:

        async def edit_before(call: Call) -> None:
            nonlocal edits
            if (call.verb, call.resource) == ("patch", FRAMEWORKS) and isinstance(call.body, list) and edits < 3:
                edits += 1
                await cluster.patch("job", {"description": f"edit {edits}"})

        cluster.api.before_call = edit_before
        recorder = EventRecorder(cluster.api, "rcfarm", clock=now)
        operator = FrameworkOperator(cluster.api, cluster.config, recorder, metrics=tally, clock=now)
        running = asyncio.create_task(operator.run())
        await cluster.create(framework("job", role("worker", 2)))
        await cluster.until_state("job", "Completed")
        running.cancel()
        await asyncio.wait([running])

        assert (await cluster.get("job"))["spec"]["description"] == "edit 3"
    assert "reconciled retry" not in tally.figures
    assert "reconciled ok" in tally.figures


async def test_a_status_is_never_written_onto_a_successor() -> None:
    """A user deletes the Framework and creates it again while its status is on the way, and the watch that would report
    it breaks: the operator retries for seconds, and the second Framework never has the status of the first."""
    stored: list[Object] = []  # statuses of the second
    async with Cluster().running() as cluster:
        uids = [uid_of(await cluster.create(framework("job", role("worker", 2, annotations={}))))]
        await cluster.until_state("job", "AttemptRunning")

        async def succeed(call: Call) -> None:
            if call.verb in ("list", "watch") and call.resource == FRAMEWORKS:
                await asyncio.sleep(5)  # until then the operator's cache shows the first
            if len(uids) == 1 and (call.verb, call.resource) == ("patch", FRAMEWORKS) and isinstance(call.body, list):
                cluster.api.break_watches(Expired("too old resource version", status=410))
                await asyncio.sleep(0.1)  # the watch has ended
                await cluster.api.delete(FRAMEWORKS, "job", NAMESPACE)
                uids.append(uid_of(await cluster.create(framework("job", role("worker", 2, annotations={})))))

        async def note(call: Call) -> None:
            if len(uids) == 2 and (call.verb, call.resource) == ("patch", FRAMEWORKS):
                stored.append(await cluster.status("job"))

        cluster.api.before_call, cluster.api.after_call = succeed, note
        await cluster.api.patch(FRAMEWORKS, "job", NAMESPACE, {"status": None})  # which the operator repairs
        await asyncio.sleep(100)

        assert len(set(uids)) == 2
        assert stored[0]["state"] == "AttemptCreationPending"
        assert stored[-1]["state"] == "AttemptRunning"
        assert {(status["attemptStatus"]["id"], status["startTime"]) for status in stored} == {
            (0, stored[0]["startTime"])
        }
        pods = await cluster.pods("job")
        assert {pod["metadata"]["annotations"]["FC_FRAMEWORK_UID"] for pod in pods.values()} == {uids[1]}


async def test_a_change_that_is_only_met_in_a_conflict_is_followed() -> None:
    """A user stops the Framework just before its status is written, and the watch that would report it breaks: later
    events are no newer than our own last write, and the operator stops the Framework all the same."""
    async with Cluster().running() as cluster:
        await cluster.create(framework("job", role("worker", 2, annotations={})))
        await cluster.until_state("job", "AttemptRunning")
        await asyncio.sleep(60)  # nothing else will wake the Framework
        is_met = False

        async def interfere(call: Call) -> None:
            nonlocal is_met
            if call.verb in ("list", "watch") and call.resource == FRAMEWORKS:
                await asyncio.sleep(5)  # our own write comes first
            if not is_met and (call.verb, call.resource) == ("patch", FRAMEWORKS) and isinstance(call.body, list):
                is_met = True
                cluster.api.break_watches(Expired("too old resource version", status=410))
                await asyncio.sleep(0.1)  # the watch has ended
                await cluster.patch("job", {"executionType": "Stop"})

        cluster.api.before_call = interfere
        await cluster.api.patch(FRAMEWORKS, "job", NAMESPACE, {"status": None})  # which the operator repairs
        status = await cluster.until_state("job", "Completed")
        assert is_met
        assert status["attemptStatus"]["completionStatus"]["code"] == -210
