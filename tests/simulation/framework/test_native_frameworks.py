"""Features of native mode only: the status subresource, Services and disruption budgets around the pods."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from controllers.framework.api.types import FRAMEWORKS
from controllers.framework.config import shipped_config
from store.kube.api.errors import Forbidden, Unreachable
from store.kube.api.objects import (
    CONFIG_MAPS,
    POD_DISRUPTION_BUDGETS,
    PODS,
    SERVICES,
    Object,
    controller_of,
    name_of,
    uid_of,
)
from store.kube.memory.kube import Call
from tests.support.framework.cluster import NAMESPACE, Cluster, framework, role

pytestmark = pytest.mark.looptime

RUNS_ON: dict[str, str] = {}


def native() -> Cluster:
    config = msgspec.structs.replace(
        shipped_config(), native_mode=True, headless_services=True, disruption_budgets=True
    )
    return Cluster(config)


async def services(cluster: Cluster) -> Sequence[Object]:
    return (await cluster.api.list(SERVICES, NAMESPACE)).items


async def budget(cluster: Cluster, name: str = "job-attempt") -> Object:
    return await cluster.api.get(POD_DISRUPTION_BUDGETS, name, NAMESPACE)


async def test_pods_have_services_and_a_budget_before_they_exist() -> None:
    """Each role has its headless Service and the attempt its budget before the first pod is created; the ConfigMap owns
    all of them, and each pod has its name under its role's Service."""
    made: list[str] = []
    async with native().running() as cluster:
        cluster.api.after_call = lambda call: made.append(call.resource.kind) if call.verb == "create" else None
        await cluster.create(
            framework("job", role("ps", 1, annotations=RUNS_ON), role("worker", 2, annotations=RUNS_ON))
        )
        await cluster.until_state("job", "AttemptRunning")
        owner = uid_of(await cluster.api.get(CONFIG_MAPS, "job-attempt", NAMESPACE))
        found = {name_of(service): service for service in await services(cluster)}
        assert found.keys() == {"job-ps", "job-worker"}
        worker = found["job-worker"]["spec"]
        assert worker["clusterIP"] == "None"
        assert worker["publishNotReadyAddresses"] is True
        assert worker["selector"] == {"FC_FRAMEWORK_NAME": "job", "FC_TASKROLE_NAME": "worker"}
        kept = await budget(cluster)
        assert kept["spec"] == {"minAvailable": 3, "selector": {"matchLabels": {"FC_FRAMEWORK_NAME": "job"}}}
        assert {(controller_of(each) or {})["uid"] for each in (*found.values(), kept)} == {owner}
        pod = (await cluster.pods("job"))["job-worker-1"]
        assert (pod["spec"]["hostname"], pod["spec"]["subdomain"]) == ("job-worker-1", "job-worker")
    ours = [kind for kind in made if kind in ("Service", "PodDisruptionBudget", "Pod")]
    assert ours[:3] == ["Service", "Service", "PodDisruptionBudget"]
    assert set(ours[3:]) == {"Pod"}


async def test_they_follow_a_rescale_and_go_with_the_attempt() -> None:
    """A larger role raises the budget, a new role gets its Service; at the end of the attempt nothing is left."""
    async with native().running() as cluster:
        worker = role("worker", 1, annotations=RUNS_ON)
        await cluster.create(framework("job", worker))
        await cluster.until_state("job", "AttemptRunning")
        await cluster.patch("job", {"taskRoles": [worker | {"taskNumber": 3}, role("ps", 1, annotations=RUNS_ON)]})
        async with asyncio.timeout(600):
            while len(await cluster.pods("job")) < 4:
                await asyncio.sleep(1)
        assert (await budget(cluster))["spec"]["minAvailable"] == 4
        assert {name_of(service) for service in await services(cluster)} == {"job-ps", "job-worker"}
        await cluster.patch("job", {"executionType": "Stop"})
        await cluster.until_state("job", "Completed")
        assert await services(cluster) == []
        assert (await cluster.api.list(POD_DISRUPTION_BUDGETS, NAMESPACE)).items == []


async def test_a_name_that_is_taken_holds_up_no_pod() -> None:
    """A foreign Service stays as it is; an Event reports it, and the Framework runs."""
    async with native().running() as cluster:
        stranger = {"metadata": {"name": "job-worker"}, "spec": {"selector": {"app": "other"}}}
        await cluster.api.create(SERVICES, stranger, NAMESPACE)
        await cluster.create(framework("job", role("worker", 1)))
        await cluster.until_state("job", "Completed")
        assert "ServiceRefused" in await cluster.events("job")
        (left,) = await services(cluster)
        assert left["spec"]["selector"] == {"app": "other"}


async def test_a_right_that_is_missing_holds_up_no_pod() -> None:
    """If budgets are switched on without the right to create them, an Event reports it, and the Framework runs."""

    def forbid(call: Call) -> None:
        if call.verb == "create" and call.resource.plural == POD_DISRUPTION_BUDGETS.plural:
            raise Forbidden("not yours", status=403)

    async with native().running() as cluster:
        cluster.api.before_call = forbid
        await cluster.create(framework("job", role("worker", 1)))
        await cluster.until_state("job", "Completed")
        assert "PodDisruptionBudgetRefused" in await cluster.events("job")


async def test_pods_wait_for_services_that_are_late() -> None:
    """While the API server does not answer, no pod is created before its Service and budget."""
    tries: list[Call] = []

    def lose(call: Call) -> None:
        if call.verb == "create" and call.resource == SERVICES:
            tries.append(call)
            if len(tries) < 4:
                raise Unreachable("connection refused")

    async with native().running() as cluster:
        cluster.api.before_call = lose
        await cluster.create(framework("job", role("worker", 1, annotations=RUNS_ON)))
        await cluster.until_state("job", "AttemptRunning")
        assert len(tries) == 4
        assert "ServiceRefused" not in await cluster.events("job")


async def test_a_user_can_not_overwrite_a_native_status() -> None:
    """A write of the main resource leaves the status as it is."""
    async with native().running() as cluster:
        await cluster.create(framework("job", role("worker", 1, annotations=RUNS_ON)))
        await cluster.until_state("job", "AttemptRunning")
        answer = await cluster.api.patch(FRAMEWORKS, "job", NAMESPACE, {"status": {"state": "Completed"}})
        assert answer["status"]["state"] == "AttemptRunning"


@pytest.mark.parametrize("is_native", [False, True])
async def test_a_crd_that_is_replaced_under_the_operator_stops_it(is_native: bool) -> None:
    """No pod is created for a Framework whose status the API server drops, not even right after the CRD of the other
    mode was applied; when the CRD fits again, the job runs once."""
    cluster = Cluster(msgspec.structs.replace(shipped_config(), native_mode=is_native))
    made: list[str] = []
    async with cluster.running():

        def note(call: Call) -> None:
            if (call.verb, call.resource, call.subresource) == ("create", PODS, ""):
                made.append(call.name)

        cluster.api.after_call = note
        await cluster.create(framework("first", role("worker", 1)))
        await cluster.until_state("first", "Completed")
        cluster.api.register(FRAMEWORKS, has_status=not is_native)
        await cluster.create(framework("second", role("worker", 2)))
        await asyncio.sleep(10)
        assert cluster.operator is not None
        mode = "native" if is_native else "compatible"
        assert f"this operator is set to {mode} mode" in cluster.operator.problems()["operator"]
        await asyncio.sleep(300)
        assert await cluster.pods("second") == {}
        cluster.api.register(FRAMEWORKS, has_status=is_native)
        await asyncio.sleep(5)
        assert cluster.operator.problems()["operator"] == ""
        await cluster.until_state("second", "Completed")
    assert sorted(made) == ["first-worker-0", "second-worker-0", "second-worker-1"]
