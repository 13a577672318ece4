"""The manifests of HiveD fit each other, the extender and its configuration, and are as strict as possible."""

from __future__ import annotations

from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from controllers.extender.server import BIND, FILTER, PREEMPT
from rcfarm.config.sources import load, variables
from rcfarm.daemon.readiness import PORTS
from scheduler.hived.config.resolve import resolve
from scheduler.hived.contract import MAX_GUARANTEED_PRIORITY, OPPORTUNISTIC_PRIORITY, POD_SCHEDULING_ENABLE
from store.kube.api.objects import Object, name_of
from tests.support.extender.manifests import (
    COMPLETE,
    EXTENDER,
    built,
    configuration,
    extender_object,
    scheduler_configurations,
)
from tests.support.kube.shipped_manifests import documents

RESTRICTED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
EXTENDER_KINDS = {
    "Namespace", "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "ConfigMap", "Service", "StatefulSet",
    "NetworkPolicy",
}  # fmt: skip


def workloads() -> list[Object]:
    return [extender_object("StatefulSet"), *documents(COMPLETE / "scheduler" / "deployment.yaml")]


def container(workload: Object) -> dict[str, Any]:
    (found,) = workload["spec"]["template"]["spec"]["containers"]
    return dict(found)


def test_the_extender_can_be_installed_alone() -> None:
    """Its folder gives one object of each kind, all in its own namespace, and no kube-scheduler."""
    objects = built(EXTENDER)
    assert Counter(kind for kind, _ in objects) == Counter(EXTENDER_KINDS)
    for found in objects.values():
        assert found["metadata"].get("namespace", "rcfarm-hived") == "rcfarm-hived"


def test_the_extender_can_be_installed_with_tls() -> None:
    """Its settings are valid, every file in them is in a Secret, and the probes need no certificate."""
    workload = built(EXTENDER.parent / "extender-tls")["StatefulSet", "rcfarm-extender"]
    one, spec = container(workload), workload["spec"]["template"]["spec"]
    environ = {each["name"]: each["value"] for each in one["env"] if "value" in each}
    assert environ.keys() <= variables().keys()
    settings = load(environ=environ)
    assert settings.extender.tls is not None
    assert settings.extender.client_ca_file
    assert settings.web.listen == f"0.0.0.0:{PORTS['extender']}"
    secrets = {volume["name"] for volume in spec["volumes"] if "secret" in volume}
    mounted = {mount["mountPath"] for mount in one["volumeMounts"] if mount["name"] in secrets}
    files = (settings.extender.tls_cert_file, settings.extender.client_ca_file, settings.web.token_file)
    assert mounted == {str(Path(file).parent) for file in files}
    assert {one[probe]["httpGet"]["port"] for probe in ("livenessProbe", "readinessProbe")} == {"health"}
    assert {"name": "health", "containerPort": PORTS["extender"]} in one["ports"]


def test_a_changed_configuration_restarts_nothing() -> None:
    """The ConfigMap keeps its name, and is mounted as a folder, so that the extender can see it change."""
    assert built(EXTENDER)["ConfigMap", "rcfarm-extender"]["data"] == {
        "hived.yaml": (EXTENDER / "hived.yaml").read_text()
    }
    (mount,) = container(extender_object("StatefulSet"))["volumeMounts"]
    assert "subPath" not in mount
    assert container(extender_object("StatefulSet"))["args"] == [
        "extender",
        "--config",
        f"{mount['mountPath']}/hived.yaml",
    ]


def test_each_tenant_has_a_kube_scheduler() -> None:
    """A kube-scheduler is built for each tenant of the shipped hived.yaml, with its own configuration."""
    tenants = configuration(EXTENDER / "hived.yaml").virtual_clusters
    objects = built(COMPLETE)
    deployments = {name: found for (kind, name), found in objects.items() if kind == "Deployment"}
    assert deployments.keys() == {f"hived-scheduler-{tenant}" for tenant in tenants}
    for name, deployment in deployments.items():
        spec = deployment["spec"]["template"]["spec"]
        mounted = objects["ConfigMap", spec["volumes"][0]["configMap"]["name"]]
        scheduler = yaml.safe_load(mounted["data"]["scheduler.yaml"])
        tenant = name.removeprefix("hived-scheduler-")
        assert scheduler == scheduler_configurations()[tenant]
        assert deployment["spec"]["selector"]["matchLabels"] == deployment["spec"]["template"]["metadata"]["labels"]
        assert deployment["spec"]["selector"]["matchLabels"]["rcfarm/virtual-cluster"] == tenant


def test_the_whole_has_all_of_the_extender() -> None:
    """Applying the whole includes the extender."""
    assert built(EXTENDER).items() <= built(COMPLETE).items()


def test_the_shipped_configuration_is_valid() -> None:
    """It resolves, with the quotas of two tenants."""
    topology = resolve(configuration(EXTENDER / "hived.yaml"))
    assert {name: len(cells) for name, cells in topology.virtual_clusters.items()} == {"prod": 1, "research": 1}


@pytest.mark.parametrize("tenant", scheduler_configurations())
def test_kube_scheduler_finds_the_extender(tenant: str) -> None:
    """The address is the Service's, whose port leads to the pod's port, as in hived.yaml; the verbs are the extender's
    paths; the managed pods are those that the extender handles."""
    found = scheduler_configurations()[tenant]
    assert [profile["schedulerName"] for profile in found["profiles"]] == [f"hived-{tenant}"]
    assert found["leaderElection"]["resourceName"] == f"hived-{tenant}"
    assert found["percentageOfNodesToScore"] == 100
    (extender,) = found["extenders"]
    service, stateful_set = extender_object("Service"), extender_object("StatefulSet")
    (port,) = service["spec"]["ports"]
    address = f"http://{name_of(service)}.rcfarm-hived:{port['port']}"
    called = [f"{extender['urlPrefix']}/{extender[f'{verb}Verb']}" for verb in ("filter", "preempt", "bind")]
    assert called == [f"{address}{path}" for path in (FILTER, PREEMPT, BIND)]
    assert (extender["nodeCacheCapable"], extender["ignorable"]) == (True, False)
    assert extender["managedResources"] == [{"name": POD_SCHEDULING_ENABLE, "ignoredByScheduler": True}]
    (container_port,) = container(stateful_set)["ports"]
    assert port["targetPort"] == container_port["name"]
    assert configuration(EXTENDER / "hived.yaml").web_server_address == f":{container_port['containerPort']}"
    assert service["spec"]["selector"].items() <= stateful_set["spec"]["template"]["metadata"]["labels"].items()


def test_there_is_never_a_second_extender() -> None:
    """One replica of a StatefulSet: even when its node is lost, no other starts before it is known to be gone."""
    spec = extender_object("StatefulSet")["spec"]
    assert spec["replicas"] == 1
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > 20, "stopping outlasts our own drain"


def test_the_extender_is_probed_and_bounded() -> None:
    """Both probes use the port that kube-scheduler calls; the image has our version."""
    found = container(extender_object("StatefulSet"))
    assert found["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "extender"}
    assert found["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "extender"}
    assert {"cpu", "memory"} <= found["resources"]["requests"].keys()
    assert "memory" in found["resources"]["limits"]
    built_one = built(EXTENDER)["StatefulSet", "rcfarm-extender"]
    assert found["image"] == container(built_one)["image"] == f"rcfarm:{version('rcfarm')}"


def test_only_neighbours_reach_the_extender() -> None:
    """The policy covers exactly its pod and its port, and admits pods of the same namespace."""
    policy = extender_object("NetworkPolicy")["spec"]
    assert policy["podSelector"] == extender_object("StatefulSet")["spec"]["selector"]
    assert policy["ingress"] == [{"from": [{"podSelector": {}}], "ports": [{"port": "extender", "protocol": "TCP"}]}]


@pytest.mark.parametrize("workload", workloads(), ids=name_of)
def test_the_pods_pass_the_restricted_standard(workload: Object) -> None:
    """Kubernetes' strictest Pod Security Standard: no root, no privileges, nothing to write to."""
    spec = workload["spec"]["template"]["spec"]
    assert (
        spec["securityContext"].items() >= {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}.items()
    )
    assert container(workload)["securityContext"] == RESTRICTED
    assert all(volume.keys() == {"name", "configMap"} for volume in spec["volumes"])
    assert spec["priorityClassName"] == "system-cluster-critical", "pods that it schedules can't push it out"


def test_priorities_are_those_of_hived() -> None:
    """Each class has a priority that a pod-scheduling-spec can have, both ends included."""
    values = [found["value"] for found in documents(COMPLETE / "priority-classes.yaml")]
    assert values == sorted(values)
    assert (values[0], values[-1]) == (OPPORTUNISTIC_PRIORITY, MAX_GUARANTEED_PRIORITY)
