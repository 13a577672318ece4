"""The output of `rcfarm framework explain`: the reason for everything that does not happen, from a running operator's
statuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest

from controllers.framework.api.wire import decode_framework
from rcfarm.reports.framework import framework_info
from rcfarm.reports.framework_explain import codes_of, explain
from rcfarm.reports.jobs import JobReason, LeaseInfo, ObservedObjects
from store.kube.api.objects import CONFIG_MAPS, EVENTS, PODS, Object
from store.schema.reasons import FRAMEWORK
from tests.support.framework.cluster import NAMESPACE, Cluster, framework, now, role

pytestmark = pytest.mark.looptime

FOREVER: dict[str, str] = {}
FAILS_FIRST = {"minFailedTaskCount": 1}


@asynccontextmanager
async def running(*bodies: Object, operator: bool = True) -> AsyncIterator[Cluster]:
    """Yield a cluster with these Frameworks."""
    async with Cluster().running(operator=operator) as cluster:
        for body in bodies:
            await cluster.create(body)
        yield cluster


async def reasons(cluster: Cluster, name: str, leases: Sequence[LeaseInfo] | None = None) -> list[JobReason]:
    """Return everything that explain reports about a Framework now. Each reason has a code of the list, and those that
    the operator's metric shows are among them."""
    obj = await cluster.get(name)
    warnings = await cluster.api.list(EVENTS, NAMESPACE, field_selector="type=Warning")
    at = datetime.fromtimestamp(now(), UTC)
    observed = ObservedObjects(await cluster.pods(name), list(warnings.items), leases, at)
    decoded = decode_framework(obj)
    found = explain(decoded, obj, observed)
    assert (codes := {each.code for each in found}) <= FRAMEWORK.keys()
    assert decoded.status is None or set(codes_of(decoded.status)) <= codes
    return found


async def until_said(cluster: Cluster, name: str, text: str, subject: str = "framework") -> list[str]:
    """Wait until explain reports this text. Return everything it reports about the subject then."""
    async with asyncio.timeout(4000):
        while True:
            found = [each.reason for each in await reasons(cluster, name) if each.subject == subject]
            if any(text in reason for reason in found):
                return found
            await asyncio.sleep(0.5)


async def test_a_framework_that_is_fine_has_no_reason() -> None:
    """Explain reports nothing about running tasks."""
    async with running(framework("fine", role("worker", 2, annotations=FOREVER))) as cluster:
        await cluster.until("fine", lambda status: status["state"] == "AttemptRunning")
        async with asyncio.timeout(60):
            while await reasons(cluster, "fine"):
                await asyncio.sleep(0.5)


async def test_one_that_is_only_created_says_how_to_start_it() -> None:
    """With executionType Create, explain says how to start the Framework."""
    async with running(framework("later", role("worker", 1), executionType="Create")) as cluster:
        assert await until_said(cluster, "later", "executionType") == [
            "its executionType is Create: set it to Start to run it"
        ]
        assert [each.subject for each in await reasons(cluster, "later")] == ["framework"]


async def test_a_spec_that_can_not_be_used_names_the_field() -> None:
    """The field is named once, although an Event names it as well."""
    broken = role("worker", 1)
    broken["task"]["pod"] = {"spec": {"containers": "main"}}
    async with running(framework("broken", broken)) as cluster:
        (reason,) = await until_said(cluster, "broken", "spec can't be used")
        assert "spec.taskRoles[0].task.pod.spec.containers: must be a list" in reason
        assert framework_info(decode_framework(await cluster.get("broken"))).problems


async def test_a_foreign_object_that_has_a_name_is_named() -> None:
    """The foreign object is named once; the task refers to it."""
    async with running() as cluster:
        await cluster.api.create(CONFIG_MAPS, {"metadata": {"name": "taken-attempt"}}, NAMESPACE)
        await cluster.create(framework("taken", role("worker", 1)))
        (reason,) = await until_said(cluster, "taken", "NameTaken")
        assert "taken-attempt exists already and is not this Framework's (ConfigMap)" in reason
        await until_said(cluster, "taken", "see the Framework's reason", "worker-0")


async def test_a_delayed_retry_names_its_time() -> None:
    """Explain gives the outcome, the task that caused it, and the time of the next attempt."""
    starving = role("worker", 1, annotations={"hollow/exit-code": "201"}, policy=FAILS_FIRST)
    retry = {"fancyRetryPolicy": True, "maxRetryCount": 1}
    async with running(framework("starving", starving, retryPolicy=retry)) as cluster:
        found = await until_said(cluster, "starving", "tried again at")
        assert len(found) == 2
        assert "attempt 0 ended: ContainerTransientConflictFailed (201), by worker-0" in found[0]
        status = await cluster.status("starving")
        delay = status["retryPolicyStatus"]["retryDelaySec"]
        due = datetime.fromisoformat(status["transitionTime"]).timestamp() + delay
        assert f"{datetime.fromtimestamp(due, UTC):%Y-%m-%dT%H:%M:%SZ}" in found[1]


async def test_an_incomplete_gang_names_its_missing_pods() -> None:
    """Explain shows the barrier's own view, beside the scheduler's reason for the unplaced task."""
    held = {"hollow/barrier.run-seconds": "inf"}
    whole, lonely = (role(name, 1, annotations=held, init=["barrier"]) for name in ("chief", "worker"))
    lonely["task"]["pod"]["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "1000"}}
    async with running(framework("gang", whole, lonely)) as cluster:
        await until_said(cluster, "gang", "init container barrier has not ended", "chief-0")
        refusal = {"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available"}
        await cluster.api.patch(
            PODS, "gang-worker-0", NAMESPACE, {"status": {"conditions": [refusal]}}, subresource="status"
        )
        found = await until_said(cluster, "gang", "1 of 2")
        assert found == ["the gang is not whole, 1 of 2 are there; missing: worker-0 (no address yet)"]
        await until_said(cluster, "gang", "not scheduled: 0/2 nodes are available", "worker-0")


@pytest.mark.parametrize(("grace", "text"), [(None, "no podGracefulDeletionTimeoutSec"), (900, "by force at")])
async def test_a_pod_that_does_not_end_names_its_node(grace: int | None, text: str) -> None:
    """Explain names the node, and says whether the pod will be deleted by force."""
    stuck = role("worker", 1, annotations={"hollow/stuck": "true"}, grace=grace)
    async with running(framework("stuck", stuck)) as cluster:
        await cluster.until("stuck", lambda status: status["state"] == "AttemptRunning")
        await cluster.patch("stuck", {"executionType": "Stop"})
        found = await until_said(cluster, "stuck", "should have ended", "worker-0")
        assert len(found) == 1
        assert "check hollow-" in found[0] or "check node-" in found[0]
        assert text in found[0]
        await until_said(cluster, "stuck", "until the pods of the attempt are gone: stuck-worker-0")


async def test_a_failed_framework_says_which_task_failed_and_how() -> None:
    """After the end: the outcome with its trigger, the failed task; nothing about the tasks that were only stopped with
    it."""
    failing = role("bad", 1, annotations={"hollow/exit-code": "7"}, policy=FAILS_FIRST)
    async with running(framework("failed", failing, role("good", 2, annotations=FOREVER))) as cluster:
        await cluster.until_state("failed", "Completed")
        found = await reasons(cluster, "failed")
        assert [each.subject for each in found] == ["framework", "bad-0"]
        assert found[0].reason.startswith("attempt 0 ended: ContainerUnrecognizedFailed (7), by bad-0: ")
        assert "exited with 7" in found[1].reason


async def test_a_cluster_without_a_leader_is_the_first_reason() -> None:
    """A missing operator is reported with or without a status, but not for completed Frameworks."""
    async with running(framework("waiting", role("worker", 1)), operator=False) as cluster:
        (unseen,) = await reasons(cluster, "waiting", [])
        assert unseen.state == "Unknown"
        assert "no operator leads" in unseen.reason
        (unknown,) = await reasons(cluster, "waiting", None)
        assert "no operator has taken it up" in unknown.reason
        cluster.start_operator()
        await cluster.until("waiting", lambda status: status["state"] == "AttemptRunning")
        assert "no operator leads" in (await reasons(cluster, "waiting", []))[0].reason
        await cluster.until_state("waiting", "Completed")
        assert not any("leads" in each.reason for each in await reasons(cluster, "waiting", []))


async def test_events_about_earlier_namesakes_do_not_count() -> None:
    """A Warning is shown only if it is about this very Framework, by its UID."""
    async with running(framework("again", role("worker", 1), executionType="Create")) as cluster:
        await until_said(cluster, "again", "executionType")
        uid = (await cluster.get("again"))["metadata"]["uid"]
        for about, text in (("another", "of old"), (uid, "of now")):
            event = {
                "metadata": {"name": f"again.{about}"},
                "type": "Warning",
                "reason": "Odd",
                "message": text,
                "involvedObject": {"kind": "Framework", "name": "again", "uid": about},
            }
            await cluster.api.create(EVENTS, event, NAMESPACE)
        said = [each.reason for each in await reasons(cluster, "again")]
        assert "Odd: of now" in said
        assert "Odd: of old" not in said


@pytest.mark.parametrize("is_recorded", [True, False])
async def test_a_pod_of_another_attempt_explains_nothing(is_recorded: bool) -> None:
    """A pod that has the task's name, but not the UID that the status records, is an earlier or a later attempt's."""
    async with running(framework("job", role("worker", 1, annotations=FOREVER))) as cluster:
        await cluster.until_state("job", "AttemptRunning")
        ((name, pod),) = (await cluster.pods("job")).items()
        refusal = {"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available"}
        metadata = pod["metadata"] if is_recorded else {**pod["metadata"], "uid": "another"}
        shown = {**pod, "metadata": metadata, "status": {"phase": "Pending", "conditions": [refusal]}}
        obj = await cluster.get("job")
        observed = ObservedObjects({name: shown}, [], None, datetime.fromtimestamp(now(), UTC))
        found = explain(decode_framework(obj), obj, observed)
    assert [each.reason for each in found] == ["not scheduled: 0/2 nodes are available"] * is_recorded
