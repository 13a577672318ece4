"""The process around the algorithm: its calls, cluster events, decisions and bindings, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from structlog.testing import capture_logs

from controllers.extender.pod_states import PodState
from controllers.extender.reporting import EvictionResult, Metrics, Outcome
from controllers.extender.scheduler import PATIENCE
from controllers.extender.wire import ExtenderFilterResult, MetaVictims
from scheduler.hived.algorithm import PodScheduleResult, SchedulingPhase
from scheduler.hived.contract import POD_BIND_INFO, POD_LEAF_CELL_ISOLATION, POD_SCHEDULING_SPEC
from scheduler.hived.errors import NotNow, PlatformError, UserError
from store.kube.api.errors import ServerError, Unreachable
from store.kube.api.objects import NODES, PODS, Object, Resource, annotations_of, uid_of
from store.kube.memory.kube import Call
from tests.support.extender.process import (
    NAMESPACE,
    SPEC,
    Process,
    ScriptedAlgorithm,
    binds,
    on_binding,
    placed,
    preempts,
    waits,
)
from tests.support.hived.cluster import node_object, pod_object
from tests.support.waiting import background, loop_time

pytestmark = pytest.mark.looptime


@pytest.fixture
def algorithm() -> ScriptedAlgorithm:
    return ScriptedAlgorithm()


@pytest.fixture
async def process(algorithm: ScriptedAlgorithm) -> AsyncIterator[Process]:
    one = Process(algorithm, nodes=("n0", "n1"))
    async with one.running():
        await one.add_nodes("n0", "n1")
        yield one


async def decided(process: Process, algorithm: ScriptedAlgorithm, result: PodScheduleResult) -> Object:
    """Return a new pod `p` after a filter with this decision."""
    pod = await process.add_pod("p")
    algorithm.decisions["p"] = result
    await process.filter(pod)
    return pod


def failing_once(process: Process, error: Exception) -> Callable[[Call], None]:
    """Return a hook that raises for the first Binding, before or after it is done."""

    def fail(call: Call) -> None:
        process.api.before_call = process.api.after_call = None
        raise error

    return on_binding(fail)


class TestDecisions:
    async def test_from_waiting_to_bound(self, process: Process, algorithm: ScriptedAlgorithm) -> None:
        """filter decides and allocates at once, bind writes node and annotations together, and the watch confirms."""
        pod = await process.add_pod("p")
        assert process.state(pod) is PodState.WAITING
        algorithm.decisions["p"] = binds("n1", 3, 1)
        assert await process.filter(pod) == ExtenderFilterResult(node_names=("n1",))
        assert process.state(pod) is PodState.BINDING
        assert algorithm.heard[-3:] == ["add p", "Filtering p", "place p on n1"]
        await process.bind(pod, "n1")
        await process.settled()
        assert process.state(pod) is PodState.BOUND
        bound = await process.read("p")
        assert bound["spec"]["nodeName"] == "n1"
        assert annotations_of(bound)[POD_LEAF_CELL_ISOLATION] == "3,1"
        assert '"node":"n1"' in annotations_of(bound)[POD_BIND_INFO]
        await process.delete("p")
        assert (process.state(pod), algorithm.heard[-1]) == (PodState.UNKNOWN, "release p")

    async def test_waiting(self, process: Process, algorithm: ScriptedAlgorithm) -> None:
        """The reason is under a node that does not exist, so that it reaches the pod's owner."""
        pod = await process.add_pod("p")
        algorithm.decisions["p"] = waits("chain x: 2 of 3 cells are free")
        answer = await process.filter(pod)
        assert answer.failed_nodes is not None
        assert [*answer.failed_nodes] == ["hivedscheduler"]
        assert answer.failed_nodes["hivedscheduler"].endswith("chain x: 2 of 3 cells are free")
        assert (answer.node_names, answer.error) == (None, "")
        assert process.state(pod) is PodState.WAITING

    async def test_preempting(self, process: Process, algorithm: ScriptedAlgorithm) -> None:
        """filter names the victims' node and keeps the state; preempt names the victims, and the pod is Preempting."""
        pod, victim = await process.add_pod("p"), placed(await process.add_pod("v"), "n0", 0)
        algorithm.decisions["p"] = preempts("n0", victim)
        answer = await process.filter(pod)
        assert answer.failed_nodes is not None
        assert "default/v" in answer.failed_nodes["n0"]
        assert process.state(pod) is PodState.WAITING
        found = await process.preempt(pod)
        assert found.node_name_to_meta_victims == {"n0": MetaVictims((uid_of(victim),))}
        assert process.state(pod) is PodState.PREEMPTING
        await process.filter(pod)
        assert process.state(pod) is PodState.PREEMPTING
        algorithm.decisions["p"] = waits()
        assert (await process.preempt(pod)).node_name_to_meta_victims is None
        assert process.state(pod) is PodState.WAITING

    async def test_preempt_finds_free_cells(self, process: Process, algorithm: ScriptedAlgorithm) -> None:
        """The answer is empty and allocates nothing: the next filter binds."""
        pod = await process.add_pod("p")
        algorithm.decisions["p"] = binds("n0")
        assert (await process.preempt(pod)).node_name_to_meta_victims is None
        assert process.state(pod) is PodState.WAITING
        assert not algorithm.allocated
        assert (await process.filter(pod)).node_names == ("n0",)

    @pytest.mark.parametrize("error", [UserError("pod default/p: priority 1001"), PlatformError("lost count")])
    async def test_an_error_changes_nothing(
        self, process: Process, algorithm: ScriptedAlgorithm, error: UserError | PlatformError
    ) -> None:
        """It is raised for the web server to answer with; the pod keeps waiting, and the scheduler works on."""
        pod = await process.add_pod("p")
        algorithm.decisions["p"] = error
        for call in (process.filter, process.preempt):
            with pytest.raises(type(error), match=str(error)):
                await call(pod)
        assert process.state(pod) is PodState.WAITING

    async def test_a_repeated_refusal_is_no_news(self, process: Process, algorithm: ScriptedAlgorithm) -> None:
        """The same error is logged once, though kube-scheduler repeats the call while the pod exists; another error,
        and one that comes back after a decision, is logged again, and so is the decision.
        """
        pod = await process.add_pod("p")
        await process.filter(pod)

        async def is_news(problem: str) -> bool:
            algorithm.decisions["p"] = UserError(problem)
            with pytest.raises(UserError, match=problem) as refused:
                await process.filter(pod)
            return refused.value.is_news

        assert [await is_news("one"), await is_news("one"), await is_news("other")] == [True, False, True]
        algorithm.decisions["p"] = waits("full")
        with capture_logs() as logs:
            await process.filter(pod)
        assert [entry["log_level"] for entry in logs] == ["info"]
        assert await is_news("other")

    async def test_a_binding_pod_insists_on_its_node(self, process: Process, algorithm: ScriptedAlgorithm) -> None:
        """P13: once Binding, every filter answers the same node, without asking the algorithm; preempt is refused."""
        pod = await decided(process, algorithm, binds("n0"))
        algorithm.decisions["p"] = binds("n1")
        assert [(await process.filter(pod)).node_names for _ in range(2)] == [("n0",), ("n0",)]
        assert algorithm.heard.count("Filtering p") == 1
        with pytest.raises(UserError, match="preempt of pod default/p: it is already being bound"):
            await process.preempt(pod)

    async def test_a_pod_with_other_annotations(self, process: Process, algorithm: ScriptedAlgorithm) -> None:
        """kube-scheduler may see a change first: it counts, and claims made under the old annotations end."""
        pod = await process.add_pod("p")
        changed = {"metadata": {"annotations": {POD_SCHEDULING_SPEC: "virtualCluster: b"}}}
        newer = pod | {"metadata": pod["metadata"] | changed["metadata"]}
        await process.filter(newer)
        assert algorithm.heard[-3:] == ["delete p", "add p", "Filtering p"]
        assert annotations_of(algorithm.unallocated[uid_of(pod)]) == changed["metadata"]["annotations"]
        await process.api.patch(PODS, "p", NAMESPACE, changed)
        await process.settled()
        assert algorithm.heard[-1] == "Filtering p"

    async def test_changes_of_nodes(self, process: Process, algorithm: ScriptedAlgorithm) -> None:
        """A node that changes, is deleted, or is replaced under its name is passed to the algorithm as such."""
        await process.api.patch(NODES, "n0", "", {"spec": {"unschedulable": True}})
        await process.api.delete(NODES, "n0")
        await process.add_nodes("n0")
        assert algorithm.heard[-3:] == ["add node n0", "delete node n0", "add node n0"]

    async def test_each_decision_is_logged(self, process: Process, algorithm: ScriptedAlgorithm) -> None:
        """One line each, with the pod and the reason; repeated decisions are logged at debug level."""
        pod = await process.add_pod("p")
        with capture_logs() as logs:
            await process.filter(pod)
            await process.filter(pod)
            algorithm.decisions["p"] = waits("nearly full")
            await process.filter(pod)
            algorithm.decisions["p"] = binds("n0", 2)
            await process.filter(pod)
        common = {"pod": "default/p", "uid": uid_of(pod), "phase": "Filtering", "event": "Decided", "log_level": "info"}
        assert logs == [
            common | {"decision": "wait", "reason": "full"},
            common | {"decision": "wait", "reason": "full", "log_level": "debug"},
            common | {"decision": "wait", "reason": "nearly full"},
            common | {"decision": "bind", "node": "n0", "devices": [2]},
        ]

    async def test_a_released_place_is_logged(self, process: Process, algorithm: ScriptedAlgorithm) -> None:
        """Once, whether the pod has ended or was deleted; a pod without a place releases nothing."""
        places = {"done": "n0", "deleted": "n1"}
        for name, node in places.items():
            algorithm.decisions[name] = binds(node)
            pod = await process.add_pod(name)
            await process.filter(pod)
            await process.bind(pod, node)
        await process.add_pod("waiting")
        with capture_logs() as logs:
            await process.complete("done", "Failed")
            for name in ("done", "deleted", "waiting"):
                await process.delete(name)
            await process.settled()
        logged = [(entry["event"], entry["pod"], entry["node"]) for entry in logs]
        assert logged == [("Pod released its cells", f"default/{name}", node) for name, node in places.items()]


class TestTooEarly:
    async def test_everything_listed_is_applied_before_the_first_answer(self, algorithm: ScriptedAlgorithm) -> None:
        """A call that comes while the first lists are loading is answered from the whole view, nodes first."""
        one = Process(algorithm, nodes=("n0",))
        for number in range(3):
            await one.add_nodes(f"n{number}")
            bound = await one.add_pod(f"b{number}")
            await one.bind_as(placed(bound, f"n{number}"))
        pod = await one.add_pod("p")

        async def slow(call: Call) -> None:
            await asyncio.sleep({NODES: 0.4, PODS: 0.2}[call.resource] if call.verb == "list" else 0.0)

        one.api.before_call = slow
        async with one.running(ready=False):
            await one.filter(pod)
        adds = [f"add node n{number}" for number in range(3)]
        places = [f"place b{number} on n{number}" for number in range(3)]
        assert algorithm.heard == [*adds, *places, "add p", "Filtering p"]

    async def test_no_view_yet(self, algorithm: ScriptedAlgorithm) -> None:
        """While the API server is unreachable after a start, calls are refused after a moment with `NotNow`."""
        one = Process(algorithm)
        pod = await one.add_pod("p")

        def away(call: Call) -> None:
            raise Unreachable("connection refused")

        one.api.before_call = away
        async with one.running(ready=False):
            for call in (one.filter(pod), one.preempt(pod), one.bind(pod, "n0")):
                began = loop_time()
                with pytest.raises(NotNow):
                    await call
                assert loop_time() - began == PATIENCE
            one.api.before_call = None
            await one.scheduler.ready.wait()
            assert (await one.filter(pod)).failed_nodes

    async def test_a_pod_that_is_seen_a_moment_later(self, process: Process) -> None:
        """kube-scheduler may see a pod first; an error would cost the pod a minute, so the call waits a little."""
        calls: list[asyncio.Task[ExtenderFilterResult]] = []

        def notified_first(resource: Resource, new: Object, old: Object | None) -> None:
            assert process.state(new) is PodState.UNKNOWN
            calls.append(asyncio.create_task(process.filter(new)))

        process.api.admission = notified_first
        await process.add_pod("p")
        assert (await calls[0]).failed_nodes

    async def test_a_call_that_ends_while_it_waits(self, process: Process) -> None:
        """Nothing of the call is kept."""
        pod = await process.add_pod("p")
        unseen = pod | {"metadata": pod["metadata"] | {"uid": "another"}}
        async with background(process.filter(unseen)):
            await asyncio.sleep(PATIENCE / 2)
        assert not process.scheduler._awaited

    async def test_an_unknown_pod(self, process: Process) -> None:
        """A pod that does not exist, or does not ask for HiveD, is a user error after a moment."""
        pod = await process.add_pod("p")
        await process.delete("p")
        await process.add_pod("plain", containers=[{"name": "c", "image": "i"}])
        for unknown in (pod, await process.read("plain")):
            with pytest.raises(UserError, match="does not exist"):
                await process.filter(unknown)


class TestBinding:
    async def test_refusals(self, process: Process, algorithm: ScriptedAlgorithm) -> None:
        """bind accepts only a pod with a decision, and only its node."""
        pod = await process.add_pod("p")
        with pytest.raises(UserError, match="bind of pod default/p: it has no node yet"):
            await process.bind(pod, "n0")
        algorithm.decisions["p"] = binds("n0")
        await process.filter(pod)
        with pytest.raises(UserError, match="decided for node n0, not for n1"):
            await process.bind(pod, "n1")
        assert not (await process.read("p"))["spec"].get("nodeName")

    async def test_again_and_again(self, process: Process, algorithm: ScriptedAlgorithm) -> None:
        """Binds that overlap and binds afterwards all succeed, and the pod is bound once."""
        pod = await decided(process, algorithm, binds("n0"))
        await asyncio.gather(*(process.bind(pod, "n0") for _ in range(3)))
        await process.settled()
        assert process.state(pod) is PodState.BOUND
        await process.bind(pod, "n0")

    async def test_a_failure_keeps_the_place(self, process: Process, algorithm: ScriptedAlgorithm) -> None:
        """The API server is unreachable: the call fails with `NotNow`, and the next attempt binds to the same place."""
        pod = await process.add_pod("p")
        algorithm.decisions["p"] = binds("n0")
        for error in (ServerError("etcd has no leader", status=500), Unreachable("connection refused")):
            process.api.before_call = failing_once(process, error)
            with pytest.raises(NotNow, match="pod default/p is not bound yet"):
                await process.attempt(pod)
            assert process.state(pod) is PodState.BINDING
        assert await process.attempt(pod) == "n0"
        assert process.state(pod) is PodState.BOUND

    async def test_a_lost_answer(self, process: Process, algorithm: ScriptedAlgorithm) -> None:
        """The Binding went in but its answer was lost: trying again finds it done."""
        pod = await decided(process, algorithm, binds("n0"))
        process.api.after_call = failing_once(process, Unreachable("connection reset"))
        with pytest.raises(NotNow):
            await process.bind(pod, "n0")
        await process.bind(pod, "n0")
        await process.settled()
        assert process.state(pod) is PodState.BOUND

    async def test_another_process_was_first(self, process: Process, algorithm: ScriptedAlgorithm) -> None:
        """The pod has the intended node, but other devices: it is not bound as decided."""
        pod = await decided(process, algorithm, binds("n0", 1))

        async def first(call: Call) -> None:
            process.api.before_call = None
            await process.bind_as(placed(pod, "n0", 2))

        process.api.before_call = on_binding(first)
        with pytest.raises(UserError, match="can't be bound"):
            await process.bind(pod, "n0")

    async def test_a_slow_bind_blocks_nothing(self, process: Process, algorithm: ScriptedAlgorithm) -> None:
        """While a Binding takes its time, decisions are made for other pods, and pods are seen, at once."""
        slow, other = await process.add_pod("slow"), await process.add_pod("other")
        algorithm.decisions |= {"slow": binds("n0"), "other": binds("n1")}
        await process.filter(slow)
        process.api.before_call = on_binding(lambda call: asyncio.sleep(2))
        async with asyncio.TaskGroup() as group:
            binding = group.create_task(process.bind(slow, "n0"))
            await process.settled()
            began = loop_time()
            assert (await process.filter(other)).node_names == ("n1",)
            assert (await process.filter(slow)).node_names == ("n0",)
            await process.add_pod("new")
            assert algorithm.heard[-1] == "add new"
            assert loop_time() == began
            assert not binding.done()

    @pytest.mark.parametrize("how", ["deleted", "succeeded", "failed"])
    async def test_a_pod_that_ends_while_it_binds(
        self, process: Process, algorithm: ScriptedAlgorithm, how: str
    ) -> None:
        """Its devices are free at once, and the late Binding is a user error."""
        pod = await decided(process, algorithm, binds("n0"))
        if how == "deleted":
            await process.delete("p")
        else:
            await process.complete("p", how.capitalize())
        assert (process.state(pod), algorithm.heard[-1]) == (PodState.UNKNOWN, "release p")
        with pytest.raises(UserError, match="does not exist"):
            await process.bind(pod, "n0")

    async def test_a_pod_that_ends_while_its_binding_is_on_its_way(
        self, process: Process, algorithm: ScriptedAlgorithm
    ) -> None:
        """The API server no longer has it; the answer says so."""
        pod = await decided(process, algorithm, binds("n0"))
        process.api.before_call = on_binding(lambda call: process.delete("p"))
        with pytest.raises(UserError, match="can't be bound"):
            await process.bind(pod, "n0")
        assert not algorithm.allocated

    async def test_bound_otherwise(self, process: Process, algorithm: ScriptedAlgorithm) -> None:
        """A user bound it to another node while it was Binding: our place is released, and its annotations count."""
        pod = await decided(process, algorithm, binds("n0"))
        await process.bind_as(placed(pod, "n1", 5))
        assert algorithm.heard[-2:] == ["release p", "place p on n1"]
        assert process.state(pod) is PodState.BOUND
        with pytest.raises(UserError, match="decided for node n1"):
            await process.bind(pod, "n0")


class TestForceBinding:
    async def forced(self, process: Process, name: str) -> bool:
        await process.settled()
        return bool((await process.read(name))["spec"].get("nodeName"))

    async def test_at_the_fourth_filter(self, process: Process, algorithm: ScriptedAlgorithm) -> None:
        """The default threshold of 3 counts filters after the first; the answer stays the node."""
        pod = await process.add_pod("p")
        algorithm.decisions["p"] = binds("n0")
        for _ in range(3):
            assert (await process.filter(pod)).node_names == ("n0",)
            assert not await self.forced(process, "p")
        assert (await process.filter(pod)).node_names == ("n0",)
        assert await self.forced(process, "p")
        assert process.state(pod) is PodState.BOUND

    @pytest.mark.parametrize(("node", "suggested"), [("n1", ["n0"]), ("gone", ["n0", "gone"])])
    async def test_a_node_that_kube_scheduler_can_not_bind_to(
        self, process: Process, algorithm: ScriptedAlgorithm, node: str, suggested: list[str]
    ) -> None:
        """A node that was not suggested, or that does not exist, is bound at the first filter."""
        pod = await process.add_pod("p")
        algorithm.decisions["p"] = binds(node)
        assert (await process.filter(pod, suggested)).node_names == (node,)
        assert await self.forced(process, "p")

    async def test_the_answer_does_not_wait_for_it(self, process: Process, algorithm: ScriptedAlgorithm) -> None:
        """The answer does not wait for a slow API server, and another filter in between does not post twice."""
        pod = await process.add_pod("p")
        algorithm.decisions["p"] = binds("n0")
        posts: list[Call] = []

        async def slow(call: Call) -> None:
            posts.append(call)
            await asyncio.sleep(2)

        process.api.before_call = on_binding(slow)
        began = loop_time()
        for _ in range(3):
            await process.filter(pod, [])
        assert loop_time() == began
        await asyncio.sleep(3)
        assert len(posts) == 1
        assert await self.forced(process, "p")

    async def test_a_failure(self, process: Process, algorithm: ScriptedAlgorithm) -> None:
        """It is logged, and the next filter tries again."""
        pod = await process.add_pod("p")
        algorithm.decisions["p"] = binds("n0")
        process.api.before_call = failing_once(process, Unreachable("connection refused"))
        with capture_logs() as logs:
            await process.filter(pod, [])
            assert not await self.forced(process, "p")
        assert [entry["event"] for entry in logs if entry["log_level"] == "warning"][-1] == "Pod not bound"
        await process.filter(pod, [])
        assert await self.forced(process, "p")

    async def test_without_a_filter_nothing_happens(self, process: Process, algorithm: ScriptedAlgorithm) -> None:
        """There is no timer: a pod that kube-scheduler forgets stays Binding."""
        pod = await decided(process, algorithm, binds("n0"))
        await asyncio.sleep(3600)
        assert process.state(pod) is PodState.BINDING


class TestFifo:
    async def test_a_wait_holds_up_filters_only(self, algorithm: ScriptedAlgorithm) -> None:
        """The answer and other filters are delayed by the block; cluster events, binds and preempts are not."""
        one = Process(algorithm, nodes=("n0",), waiting_pod_scheduling_block_milli_sec=50)
        async with one.running():
            await one.add_nodes("n0")
            waiting, ready, bound = [await one.add_pod(name) for name in ("waiting", "ready", "bound")]
            algorithm.decisions |= {"ready": binds("n0", 1), "bound": binds("n0", 2)}
            await one.filter(bound)
            began, times = loop_time(), list[float]()
            async with asyncio.TaskGroup() as group:
                first = group.create_task(one.filter(waiting))
                await one.settled()
                second = group.create_task(one.filter(ready))
                second.add_done_callback(lambda _: times.append(loop_time()))
                await one.bind(bound, "n0")
                await one.preempt(waiting)
                await one.add_pod("new")
                assert algorithm.heard[-1] == "add new"
                assert loop_time() == began
                await first
                assert loop_time() == began + 0.05
        assert times == [began + 0.05]


class Tally(Metrics):
    """Records measurements as words."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def decided(self, phase: SchedulingPhase, decision: Outcome, seconds: float) -> None:
        self.heard.append(f"{phase} {decision}")

    def bound(self, *, forced: bool, ok: bool) -> None:
        self.heard.append(f"bound {forced=} {ok=}")

    def evicted(self, result: EvictionResult) -> None:
        self.heard.append(f"evicted {result}")

    def not_recovered(self) -> None:
        self.heard.append("not recovered")

    def bound_elsewhere(self) -> None:
        self.heard.append("bound elsewhere")


class TestReports:
    async def test_what_is_counted(self, algorithm: ScriptedAlgorithm) -> None:
        """Decisions of both phases, refusals included; bindings; evictions; pods that are left out."""
        tally = Tally()
        one = Process(algorithm, nodes=("n0",), metrics=tally, evict_victims="always")
        async with one.running():
            await one.add_nodes("n0")
            pod, victim, _ = [await one.add_pod(name) for name in ("p", "v", "hand")]
            algorithm.decisions |= {"p": waits(), "v": binds("n0")}
            await one.attempt(pod)
            await one.attempt(victim)
            algorithm.decisions["p"] = preempts("n0", victim)
            await one.filter(pod)
            await one.settled()
            await one.bind_by_hand("hand", "n0")
            algorithm.decisions["p"] = UserError("no")
            with pytest.raises(UserError):
                await one.filter(pod)
            algorithm.decisions["p"] = binds("n0")
            await one.filter(pod, [])
            await one.settled()
        assert tally.heard == [
            "Filtering wait",
            "Preempting wait",
            "Filtering bind",
            "bound forced=False ok=True",
            "Filtering preempt",
            "Preempting preempt",
            "evicted accepted",
            "not recovered",
            "Filtering error",
            "Filtering bind",
            "bound forced=True ok=True",
        ]

    async def test_the_end(self, algorithm: ScriptedAlgorithm) -> None:
        """Calls in progress end with it, and later calls are refused with `NotNow`."""
        one = Process(algorithm, nodes=("n0",), evict_victims="always")
        async with one.running():
            pod, victim, other = [await one.add_pod(name) for name in ("p", "v", "o")]
            await one.bind_as(placed(victim, "n0"))
            algorithm.decisions |= {"p": preempts("n0", victim), "o": binds("n0")}
            one.api.before_call = lambda call: asyncio.sleep(3600) if call.subresource else None
            await one.filter(pod)
            await one.filter(other, [])
            began = loop_time()
        assert loop_time() == began
        with pytest.raises(NotNow):
            await one.filter(pod)


class TestOddPods:
    async def test_bound_by_hand(self, process: Process, algorithm: ScriptedAlgorithm) -> None:
        """P20: a pod without a placement is left out, with one warning and an Event, and nothing stops."""
        pod = await process.add_pod("p")
        with capture_logs() as logs:
            await process.bind_by_hand("p", "n0")
            await process.api.patch(PODS, "p", NAMESPACE, {"metadata": {"labels": {"a": "b"}}})
            await process.settled()
        warnings = [entry for entry in logs if entry["log_level"] == "warning"]
        assert [(entry["pod"], POD_BIND_INFO in entry["reason"]) for entry in warnings] == [("default/p", True)]
        assert [(reason, name) for reason, name, _ in process.recorder.events] == [("HivedPodLeftOut", "p")]
        assert process.state(pod) is PodState.UNKNOWN
        assert process.scheduler.view.left_out == {uid_of(pod)}
        assert (await process.filter(await process.add_pod("other"))).failed_nodes
        await process.delete("p")
        assert not process.scheduler.view.left_out
        assert not algorithm.allocated

    async def test_bound_by_hand_while_binding(self, process: Process, algorithm: ScriptedAlgorithm) -> None:
        """Also on the decided node: the container would not get its devices, so our place is released."""
        pod = await decided(process, algorithm, binds("n0"))
        await process.bind_by_hand("p", "n0")
        assert algorithm.heard[-1] == "release p"
        assert process.state(pod) is PodState.UNKNOWN

    async def test_bound_by_another_extender(self, algorithm: ScriptedAlgorithm) -> None:
        """Two extenders allocate devices twice: each pod bound by the other is logged as an error, and counted. Pods
        found at the start, and pods created bound, may well be an earlier process's.
        """
        tally = Tally()
        one = Process(algorithm, nodes=("n0",), metrics=tally)
        await one.add_nodes("n0")
        before = await one.add_pod("before")
        await one.bind_as(placed(before, "n0", 1))
        with capture_logs() as logs:
            async with one.running():
                restored = placed(pod_object("restored", {POD_SCHEDULING_SPEC: SPEC}), "n0", 2)
                restored["metadata"]["namespace"] = NAMESPACE
                await one.api.create(PODS, restored, NAMESPACE)
                await one.bind_as(placed(await one.add_pod("theirs"), "n0", 3))
        assert algorithm.heard[-4:] == ["place restored on n0", "add theirs", "delete theirs", "place theirs on n0"]
        assert [entry["pod"] for entry in logs if entry["log_level"] == "error"] == ["default/theirs"]
        assert tally.heard == ["bound elsewhere"]

    async def test_a_placement_that_is_written_later(self, process: Process, algorithm: ScriptedAlgorithm) -> None:
        """A user repairs the annotations of a pod that was left out: it is recovered."""
        pod = await process.add_pod("p")
        await process.bind_by_hand("p", "n0", {POD_BIND_INFO: "nonsense"})
        decided = placed(pod, "n0", 2)
        await process.api.patch(PODS, "p", NAMESPACE, {"metadata": {"annotations": annotations_of(decided)}})
        await process.settled()
        assert algorithm.heard[-1] == "place p on n0"
        assert process.state(pod) is PodState.BOUND
        assert not process.scheduler.view.left_out

    async def test_annotations_of_a_bound_pod(self, process: Process, algorithm: ScriptedAlgorithm) -> None:
        """Whatever a user changes later, the released place is the allocated one."""
        pod = await process.add_pod("p")
        algorithm.decisions["p"] = binds("n0")
        await process.attempt(pod)
        change = {POD_SCHEDULING_SPEC: "virtualCluster: b", POD_BIND_INFO: None}
        await process.api.patch(PODS, "p", NAMESPACE, {"metadata": {"annotations": change}})
        await process.settled()
        assert POD_BIND_INFO in annotations_of(algorithm.allocated[uid_of(pod)])
        await process.delete("p")
        assert algorithm.heard[-1] == "release p"

    async def test_a_malformed_pod_leaves_nothing(self, process: Process, algorithm: ScriptedAlgorithm) -> None:
        """A waiting pod with an unreadable request is refused, and forgotten when it is deleted."""
        pod = await process.add_pod("p", "{")
        algorithm.decisions["p"] = UserError("pod default/p: annotation can't be read")
        with pytest.raises(UserError):
            await process.filter(pod)
        await process.delete("p")
        assert not process.scheduler.view.statuses
        assert not algorithm.unallocated

    async def test_a_successor(self, process: Process, algorithm: ScriptedAlgorithm) -> None:
        """A pod that was replaced under its name between two events is a new one: deleted, then added."""
        pod = await decided(process, algorithm, binds("n0"))
        process.api.break_watches()
        await process.delete("p")
        successor = await process.add_pod("p")
        await asyncio.sleep(60)
        assert algorithm.heard[-2:] == ["release p", "add p"]
        assert (process.state(pod), process.state(successor)) == (PodState.UNKNOWN, PodState.WAITING)

    async def test_an_algorithm_that_fails_on_a_pod(self, process: Process, algorithm: ScriptedAlgorithm) -> None:
        """A defect during one pod's recovery is logged with its stack, and the pod is left out."""
        pod = await process.add_pod("p")

        def fail(pod: object) -> None:
            raise KeyError("lost")

        algorithm.restore = fail  # type: ignore[method-assign]
        with capture_logs() as logs:
            await process.bind_as(placed(pod, "n0"))
        assert ("error", True) in [(entry["log_level"], "exc_info" in entry) for entry in logs]
        assert process.scheduler.view.left_out == {uid_of(pod)}
        assert (await process.filter(await process.add_pod("other"))).failed_nodes


class TestLog:
    async def test_a_node_becomes_bad_and_heals(self) -> None:
        """Each change is one line with its cause; initial states, and changes without effect, are not logged."""
        one = Process(ScriptedAlgorithm(), nodes=("n0",))
        with capture_logs() as logs:
            await one.add_nodes("n0")
            async with one.running():
                for change in ({"unschedulable": True}, {"unschedulable": True, "taints": []}, {"unschedulable": None}):
                    await one.api.patch(NODES, "n0", "", {"spec": change})
                    await one.settled()
                await one.api.delete(NODES, "n0")
                await one.settled()
                await one.api.create(NODES, node_object("n1"))
                await one.settled()
        logged = [
            (each["event"], each["node"], each.get("reason")) for each in logs if each["event"].startswith("Node ")
        ]
        assert logged == [
            ("Node became bad", "n0", "it is cordoned"),
            ("Node became healthy", "n0", None),
            ("Node deleted", "n0", None),
            ("Node became healthy", "n1", None),
        ]
