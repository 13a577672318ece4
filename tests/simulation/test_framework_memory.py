"""What a Framework operator believes: its caches, once they are complete, and never the former bearer of a name."""

from __future__ import annotations

import asyncio

import pytest

from controllers.framework.constants import FRAMEWORKS
from controllers.framework.operator import FrameworkOperator
from store.kube.errors import Expired, Unreachable
from store.kube.events import EventRecorder
from store.kube.memory import Call
from store.kube.objects import uid_of
from store.kube.resources import CONFIG_MAPS, PODS
from tests.support.frameworks import NAMESPACE, Cluster, framework, now, role
from tests.support.train_jobs import Tally

pytestmark = pytest.mark.looptime


async def test_a_name_that_is_reused_during_an_outage_is_another_framework() -> None:
    """The operator learns of the end of the first and of the second at the same moment, and before it learns of the end
    of the first one's pods: the second begins anew, with an attempt and pods of its own."""
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
    """A new operator whose list of pods is late asks for nothing else, and then goes on where the former was."""
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
    """Scenario 50 (framework): each write of a status finds that a user has just changed the spec. Both survive, and no
    sync has to be tried again for it."""
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


async def test_a_change_that_is_only_met_in_a_conflict_is_followed() -> None:
    """A user stops the Framework just before its status is written, and the watch that would tell of it breaks: what is
    seen later is no newer than our own last write, and still the operator stops the Framework."""
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
