"""The manifests of task engines for Kubernetes match the code, and are as strict as possible."""

from __future__ import annotations

import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from rcfarm.config.sources import load, variables
from rcfarm.daemon.readiness import PORTS
from store.kube.api.objects import Object
from store.schema.tasks import TaskSpec
from tests.support.kube.shipped_manifests import ROOT, documents

FOLDER = ROOT / "deploy" / "kubernetes-tasks"
KUBECTL = shutil.which("kubectl")


def shipped(kind: str) -> Object:
    [found] = [obj for path in FOLDER.glob("*.yaml") for obj in documents(path) if obj["kind"] == kind]
    return found


def template() -> dict[str, Any]:
    return dict(shipped("Deployment")["spec"]["template"])


def container() -> dict[str, Any]:
    [found] = template()["spec"]["containers"]
    return dict(found)


@pytest.mark.skipif(not KUBECTL, reason="kubectl is not there")
def test_kustomize_builds_it() -> None:
    assert KUBECTL
    built = subprocess.run([KUBECTL, "kustomize", FOLDER], capture_output=True, text=True, check=True)
    objects = list(yaml.safe_load_all(built.stdout))
    assert {obj["kind"] for obj in objects} == {
        "Namespace", "ServiceAccount", "ClusterRole", "RoleBinding", "ConfigMap", "Deployment", "PodDisruptionBudget",
        "NetworkPolicy",
    }  # fmt: skip
    [binding] = [obj for obj in objects if obj["kind"] == "RoleBinding"]
    spec = TaskSpec(id="a", type="pod")
    assert binding["metadata"]["namespace"] == f"{spec.project}-{spec.domain}", "where a task without a namespace runs"
    assert binding["roleRef"]["name"] == shipped("ClusterRole")["metadata"]["name"]
    [subject] = binding["subjects"]
    account = shipped("ServiceAccount")["metadata"]
    assert (subject["name"], subject["namespace"]) == (account["name"], account["namespace"])


def test_the_settings_used_there_exist(tmp_path: Path) -> None:
    """The file and the variables are valid together; each engine has a name of its own."""
    variable = {each["name"]: each.get("value", "engine-1") for each in container()["env"]}
    assert {name for name in variable if name.startswith("RCFARM_")} <= variables().keys()
    file = tmp_path / "tasks.toml"
    file.write_text(shipped("ConfigMap")["data"]["tasks.toml"])
    settings = load(file, environ=variable)
    assert settings.tasks.kubernetes
    assert settings.web.listen == f"0.0.0.0:{PORTS['tasks']}"
    assert container()["ports"] == [{"name": "web", "containerPort": PORTS["tasks"]}]
    mounts = {mount["name"]: mount["mountPath"] for mount in container()["volumeMounts"]}
    assert settings.tasks.data == mounts["data"]
    assert container()["args"] == ["tasks", "--config", f"{mounts['config']}/tasks.toml"]
    assert {mounts[name] + "/token" for name in ("web", "consul")} <= set(variable.values())


def test_the_pod_passes_the_restricted_standard() -> None:
    """No root, no privileges, nothing to write to but the data."""
    spec = template()["spec"]
    assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    writable = [mount["name"] for mount in container()["volumeMounts"] if not mount.get("readOnly")]
    assert writable == ["data"]


def test_the_deployment_survives_the_loss_of_a_node() -> None:
    deployment, budget = shipped("Deployment"), shipped("PodDisruptionBudget")
    labels = template()["metadata"]["labels"]
    assert deployment["spec"]["replicas"] == 2
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert budget["spec"] == {"maxUnavailable": 1, "selector": deployment["spec"]["selector"]}
    assert template()["spec"]["affinity"]["podAntiAffinity"]
    assert container()["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "web"}
    assert container()["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "web"}
    assert container()["image"] == f"rcfarm:{version('rcfarm')}"
    assert shipped("NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == labels
