"""The Kubernetes pattern, driven by an engine, against an API server in memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from controllers.tasks.api.phase import PhaseInfo, phase_info_running
from controllers.tasks.api.plugin import TaskExecutionContext
from controllers.tasks.patterns.kube import FINALIZER, AbortBehavior, KubeDefaults, Target
from controllers.tasks.patterns.kube_identity import ATTEMPT, EXECUTION, INTENT
from controllers.tasks.plugins.pod import PodPlugin
from store.kube.api.errors import Forbidden, Invalid, KubeError, ServerTimeout, TooLarge, TooManyRequests, Unreachable
from store.kube.api.objects import CONFIG_MAPS, PODS, Object, annotations_of, labels_of, name_of, uid_of
from store.kube.memory.kube import Call, MemoryKube
from store.kv import ops
from store.schema.tasks import TaskState
from tests.support import require
from tests.support.tasks.engines import wall
from tests.support.tasks.kube import NAMESPACE, POD, Stage, cpu_quota, wants
from tests.support.waiting import loop_time, until

pytestmark = pytest.mark.looptime

SUCCEEDED = {"phase": "Succeeded"}
RUNNING = {"phase": "Running"}


def stage(plugin: PodPlugin | None = None, /, **defaults: Any) -> Stage[MemoryKube]:
    return Stage(plugin or PodPlugin(KubeDefaults(**defaults)), MemoryKube(clock=wall, namespaces=[NAMESPACE]))


def fail_creations(api: MemoryKube, *errors: KubeError, applied: bool = False) -> list[str]:
    """Answer creations of pods with these errors, before or after they are `applied`. Return the names, as tried."""
    left, tried = list(errors), list[str]()

    def note(call: Call) -> None:
        if (call.verb, call.resource) == ("create", PODS):
            tried.append(call.body["metadata"]["name"])
            if not applied:
                fail(call)

    def fail(call: Call) -> None:
        if (call.verb, call.resource) == ("create", PODS) and left:
            raise left.pop(0)

    api.before_call, api.after_call = note, fail if applied else None
    return tried


async def test_a_pod_is_created_and_each_change_wakes_its_execution() -> None:
    """Nothing polls: minutes later the end is seen at once."""
    async with stage().playing() as world:
        pod = await world.running()
        await asyncio.sleep(200)
        ended = loop_time()
        await world.succeed(pod)

        assert loop_time() - ended < 1
        assert await world.phases("job") == ["Queued", "Running", "Success"]
        [kept] = await world.objects()
        assert uid_of(kept) == uid_of(pod)


async def test_stamps() -> None:
    """Labels and annotations of the task win over the object's, and those over the defaults."""
    defaults: dict[str, Any] = {
        "labels": {"a": "default", "b": "default", "c": "default"},
        "annotations": {"d": "default"},
    }
    body = {"metadata": {"labels": {"b": "object", "c": "object"}}, **POD}
    async with stage(finalizer=True, **defaults).playing() as world:
        pod = await world.started(config={"pod": body}, labels={"c": "task"}, annotations={"e": "task"})

    assert name_of(pod) == "job-n0-0"
    assert labels_of(pod) == {"a": "default", "b": "object", "c": "task", "rcfarm/plugin": "pod"}
    found = annotations_of(pod)
    assert (found["d"], found["e"], found[EXECUTION], found[ATTEMPT]) == ("default", "task", "job", "0")
    assert pod["metadata"]["finalizers"] == [FINALIZER]


async def test_a_creation_whose_answer_is_lost_makes_one_object() -> None:
    world = stage()
    tried = fail_creations(world.api, Unreachable("the connection was lost"), applied=True)
    async with world.playing():
        pod = await world.started()
        await world.succeed(pod)

        assert await world.phases("job") == ["Queued", "Success"]
        assert tried == ["job-n0-0"] * 2


async def test_a_creation_that_arrives_after_the_attempts_end_is_undone() -> None:
    """As of an engine that was stopped before it sent the creation. What another attempt, another execution of the same
    id, or another client has created stays."""
    async with stage().playing() as world:
        pod = await world.started()
        await world.abort("job")
        await world.until_done("job")

        async def gone() -> bool:
            return await world.objects() == []

        await until(gone, "the pod of the attempt gone")

        def late(name: str, **stamps: str) -> Object:
            annotations = {**annotations_of(pod), **{f"rcfarm/{stamp}": text for stamp, text in stamps.items()}}
            marks = {"name": name, "labels": labels_of(pod), "annotations": annotations}
            return {"metadata": marks, "spec": pod["spec"]}

        for body in (late("job-n0-0"), late("b", attempt="1"), late("c", intent="other"), late("d", execution="x")):
            await world.api.create(PODS, body, NAMESPACE)
        await asyncio.sleep(1)
        assert [name_of(each) for each in await world.objects()] == ["b", "c", "d"]


async def test_the_object_of_an_earlier_execution_of_the_same_id_makes_way() -> None:
    """Its success is not that of the new execution."""
    async with stage().playing() as world:
        former = await world.started()
        await world.succeed(former)
        await world.store.txn([ops.delete(world.keys.task_spec("job"))])

        async def removed() -> bool:
            return not (await world.store.list(world.keys.task("job"))).entries

        await until(removed, "the records removed")
        await world.start()

        async def created() -> bool:
            found = await world.objects()
            return [uid_of(each) for each in found] != [uid_of(former)] and len(found) == 1

        await until(created, "the new pod")
        assert (await world.state("job") or TaskState()).step == "running"
        made = await world.object()
        assert annotations_of(made)[INTENT] != annotations_of(former)[INTENT]
        await world.succeed(made)


async def test_an_object_of_another_client_is_never_touched() -> None:
    world = stage()
    await world.api.create(PODS, {"metadata": {"name": "job-n0-0"}, **POD}, NAMESPACE)
    async with world.playing():
        await world.start()
        state = await world.until_done("job")

        assert "NameTaken" in require(state.error).code
        assert name_of(await world.object()) == "job-n0-0"


async def test_an_object_that_is_gone_is_a_failure_of_the_system() -> None:
    """The next attempt has another name, and the task's own retries are not used."""
    async with stage().playing() as world:
        first = await world.running()
        await world.api.delete(PODS, name_of(first), NAMESPACE, grace_period=0)
        second = await world.created("job-n0-1")
        state = await world.succeed(second)

        failed = next(event for event in await world.events("job") if event.error)
        assert failed.error is not None
        assert (failed.error.code, failed.error.kind) == ("ResourceDeletedExternally", "SYSTEM")
        assert (state.system_failures, state.user_failures) == (1, 0)


async def test_a_deletion_stamp_on_a_live_object_is_a_failure_of_the_system() -> None:
    async with stage(finalizer=True).playing() as world:
        pod = await world.running()
        await world.api.delete(PODS, name_of(pod), NAMESPACE, grace_period=0)
        await world.created("job-n0-1")

        failed = next(event for event in await world.events("job") if event.error)
        assert require(failed.error).code == "UnexpectedObjectDeletion"
        assert [name_of(each) for each in await world.objects()] == ["job-n0-1"]


@pytest.mark.parametrize("cleans", [False, True])
async def test_finalize_removes_the_finalizer_and_deletes_only_if_asked(cleans: bool) -> None:
    async with stage(finalizer=True, delete_on_finalize=cleans).playing() as world:
        await world.start()
        await world.succeed(await world.object())

        left = await world.objects()
        assert [each["metadata"].get("finalizers") for each in left] == ([] if cleans else [None])


async def test_finalize_deletes_a_pod_whose_sidecar_still_runs() -> None:
    ended = {"name": "main", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
    async with stage().playing() as world:
        await world.start()
        await world.report(await world.object(), {**RUNNING, "containerStatuses": [ended]})
        await world.until_done("job")

        assert await world.phases("job") == ["Queued", "Success"]
        assert await world.objects() == []


async def test_an_abort_deletes_the_object_once() -> None:
    world = stage(finalizer=True)
    deletions: list[str] = []

    def count(call: Call) -> None:
        if call.verb == "delete":
            deletions.append(call.name)

    world.api.before_call = count
    async with world.playing():
        await world.running()
        await world.abort("job")
        await world.until_done("job")

        assert (await world.phases("job"))[-1] == "Aborted"
        assert await world.objects() == []
        assert deletions == ["job-n0-0"]


@pytest.mark.parametrize("confirms", [True, False])
async def test_an_aborted_pod_counts_as_live_until_its_node_has_stopped_it_or_is_lost(confirms: bool) -> None:
    world = stage()
    await world.quota("licences", 1)
    body = {"spec": {**POD["spec"], "nodeName": "node-1", "terminationGracePeriodSeconds": 30}}
    async with world.playing():
        pod = await world.running(config={"pod": body}, quotas={"licences": 1})
        aborted_at = loop_time()
        await world.abort("job")
        await asyncio.sleep(60)
        assert await world.holders() != []
        if confirms:
            await world.api.delete(PODS, name_of(pod), NAMESPACE, grace_period=0)
        await world.until_done("job")

        assert await world.holders() == []
        assert loop_time() - aborted_at == pytest.approx(60 if confirms else 90, abs=40)


async def test_an_engine_that_stops_leaves_the_object_and_the_next_one_follows_it() -> None:
    world = stage()
    async with world.playing():
        pod = await world.started()
    await world.report(pod, SUCCEEDED)
    async with world.playing(name="engine-b"):
        await world.until_done("job")

    assert uid_of(await world.object()) == uid_of(pod)


class Patching(PodPlugin):
    """Stops its work by a patch."""

    target: Target | None = None

    async def get_task_phase(self, context: TaskExecutionContext, resource: Object) -> PhaseInfo:
        return phase_info_running(0)

    async def on_abort(self, context: TaskExecutionContext, resource: Object) -> AbortBehavior:
        patch = {"metadata": {"annotations": {"stop": "yes"}}}
        return AbortBehavior("patch", patch, target=self.target, delete_on_error=True)

    def still_runs(self, resource: Object) -> bool:
        return False


async def aborted(world: Stage[MemoryKube]) -> None:
    await world.start()
    await world.object()
    await world.until_phase("Running")
    await world.abort("job")
    await world.until_done("job")


async def test_an_abort_may_patch_the_object_instead() -> None:
    async with stage(Patching()).playing() as world:
        await aborted(world)

        assert annotations_of(await world.object())["stop"] == "yes"


async def test_an_abort_may_patch_another_object() -> None:
    plugin = Patching()
    plugin.target = Target(CONFIG_MAPS, "control", NAMESPACE)
    async with stage(plugin).playing() as world:
        await world.api.create(CONFIG_MAPS, {"metadata": {"name": "control"}}, NAMESPACE)
        await aborted(world)

        assert annotations_of(await world.api.get(CONFIG_MAPS, "control", NAMESPACE))["stop"] == "yes"
        assert "stop" not in annotations_of(await world.object())


async def test_an_object_whose_patch_is_refused_is_deleted() -> None:
    world = stage(Patching())

    def refuse(call: Call) -> None:
        if call.verb == "patch":
            raise Forbidden("patching is forbidden", status=403)

    world.api.before_call = refuse
    async with world.playing():
        await aborted(world)

        assert await world.objects() == []


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (TooLarge("limit is 3145728", status=413), "EntityTooLarge", "USER"),
        (KubeError("etcdserver: request is too large", status=500), "EntityTooLarge", "USER"),
        (Forbidden("violates PodSecurity", status=403), "RuntimeFailure", "USER"),
        (Invalid("spec.containers: required", status=422), "BadConfig", "USER"),
    ],
)
async def test_a_refusal_that_ends_the_execution(error: KubeError, code: str, kind: str) -> None:
    world = stage()
    tried = fail_creations(world.api, *[error] * 5)
    async with world.playing():
        await world.start()
        state = await world.until_done("job")

    assert state.outcome == "failure"
    assert require(state.error).code.endswith(code)
    assert tried == ["job-n0-0"]


@pytest.mark.parametrize(
    "error",
    [
        TooManyRequests("slow down", status=429, retry_after=3.0),
        ServerTimeout("timed out", status=504),
        KubeError("try again", status=500, reason="ServerTimeout"),
    ],
)
async def test_a_refusal_that_is_waited_for(error: KubeError) -> None:
    world = stage()
    tried = fail_creations(world.api, error, error)
    async with world.playing():
        await world.start()
        waiting = await world.until_phase("WaitingForResources")
        pod = await world.object()
        await world.succeed(pod)

    assert waiting.reason == str(error)
    assert len(tried) == 3
    assert loop_time() >= (6 if error.retry_after else 3)


async def test_an_error_of_the_server_repeats_the_round() -> None:
    world = stage()
    tried = fail_creations(world.api, KubeError("broken", status=500), Forbidden("RBAC: not found", status=403))
    async with world.playing():
        await world.start()
        await world.object()

        assert len(tried) == 3
        assert await world.phases("job") == ["Queued"]


async def test_a_request_above_the_quotas_limit_fails_at_once_and_one_that_equals_it_waits() -> None:
    world = stage()
    limit = "3"
    world.api.admission = cpu_quota(lambda: limit)
    async with world.playing():
        await world.start("too-large", wants("5"))
        await world.start("equal", wants("4"))
        state = await world.until_done("too-large")
        assert require(state.error).code == "ResourceRequestsExceedLimits"
        waiting = await world.until_phase("WaitingForResources", "equal")
        assert "exceeded quota" in waiting.reason
        limit = "4"
        await world.created("equal-n0-0")


async def test_a_smaller_request_passes_while_a_larger_one_is_held_back() -> None:
    world = stage()
    limit = "1"
    world.api.admission = cpu_quota(lambda: limit)
    async with world.playing():
        await world.start("large", wants("2"))
        await world.until_phase("WaitingForResources", "large")
        await asyncio.sleep(30)  # the pause has grown
        tried = fail_creations(world.api)
        await world.start("equal", wants("2"))
        await world.start("small", wants("1"))
        await world.created("small-n0-0")
        assert tried == ["small-n0-0"]
        waiting = await world.until_phase("WaitingForResources", "equal")
        assert "pods in team are refused at present" in waiting.reason
        limit = "2"
        await world.created("large-n0-0")
        await world.created("equal-n0-0")


MAIN = {"name": "main", "image": "example.org/work:1"}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"pod": {"containers": [MAIN]}}, "has metadata and spec"),
        ({"pod": {"spec": {"containers": []}}}, "name at least one container"),
        ({"pod": {"spec": {"containers": {"main": MAIN}}}}, "must be a list of containers"),
        ({"pod": {"spec": {"containers": [{**MAIN, "command": "run"}]}}}, "containers.0.command: must be a list"),
        ({"pod": {"spec": {"containers": [{**MAIN, "env": ["A=b"]}]}}}, "containers.0.env: must be a list of name"),
        (
            {"pod": {"spec": {"containers": [{**MAIN, "resources": {"limits": "2"}}]}}},
            "resources.limits: must be a mapping",
        ),
        ({"pod": {"spec": {"containers": [{**MAIN, "resources": {"limits": {"cpu": "two"}}}]}}}, "not a quantity"),
        ({"pod": {"spec": {"containers": [MAIN], "restartPolicy": "Always"}}}, "use Never or OnFailure"),
        ({"pod": POD, "primary": "side"}, "has no container 'side'"),
        ({"pod": {**POD, "metadata": ["a"]}}, "config.pod.metadata"),
        ({"pod": {**POD, "metadata": {"labels": ["a"]}}}, "config.pod.metadata.labels: must be a mapping"),
        ({"pod": POD, "primry": "main"}, "primry"),
        ({"pod": {"spec": {"containers": [{**MAIN, "args": ["{{ .Inputs.day }}"]}]}}}, "day"),
    ],
)
async def test_a_wrong_configuration_fails_at_once_and_names_the_field(config: dict[str, Any], text: str) -> None:
    async with stage().playing() as world:
        await world.start(config=config, inputs={"night": 1})
        state = await world.until_done("job")

        assert await world.objects() == []
    assert loop_time() < 1
    assert text in require(state.error).message


async def test_the_task_s_values_reach_the_primary_container() -> None:
    """Commands are rendered; what the pod sets itself stays."""
    side = {"name": "side", "image": "example.org/side:1", "env": [{"name": "A", "value": "own"}]}
    work = {**MAIN, "args": ["--day", "{{ .Inputs.day }}"], "env": [{"name": "B", "value": "{{ .Namespace }}"}]}
    async with stage().playing() as world:
        await world.start(
            config={"pod": {"spec": {"containers": [side, work]}}, "primary": "main"},
            inputs={"day": "2026-01-01"},
            environment={"A": "task", "B": "task"},
            resources={"requests": {"cpu": "2"}},
            service_account="trainer",
        )
        spec = (await world.object())["spec"]

    [seen_side, main] = spec["containers"]
    assert seen_side["env"] == side["env"]
    assert main["args"] == ["--day", "2026-01-01"]
    assert main["env"] == [{"name": "A", "value": "task"}, {"name": "B", "value": "team"}]
    assert main["resources"] == {"requests": {"cpu": "2"}}
    assert (spec["serviceAccountName"], spec["restartPolicy"]) == ("trainer", "Never")


async def test_an_engine_without_a_cluster_says_so() -> None:
    async with stage().playing(has_cluster=False) as world:
        await world.start()
        state = await world.until_done("job")

    assert "this engine has none in its settings" in require(state.error).message


async def test_a_watch_that_breaks_costs_no_change() -> None:
    """While the informer has a problem, the API server is asked."""
    async with stage().playing() as world:
        pod = await world.started()

        def refuse(call: Call) -> None:
            if call.verb in ("list", "watch"):
                raise Forbidden("watching is forbidden", status=403)

        world.api.before_call = refuse
        world.api.break_watches()
        await world.succeed(pod)

    assert await world.phases("job") == ["Queued", "Success"]
