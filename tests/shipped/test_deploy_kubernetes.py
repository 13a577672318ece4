"""The manifests for Kubernetes match the code, and are as strict as possible."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, get_args

import pytest
import yaml

from controllers.framework.api.wire import crd
from controllers.training.kind import TrainingJobs
from controllers.training.kinds import KINDS, definition
from rcfarm.config.sources import load, variables
from rcfarm.daemon.readiness import PORTS
from rcfarm.roles.jobs import NAME
from store.kube.api.objects import name_of
from tests.support.kube.shipped_manifests import FOLDERS, ROOT, Variant, documents, manifest, rights

VARIANTS = get_args(Variant)
CRDS = ROOT / "deploy" / "kubernetes" / "training" / "crds"
KUBECTL = shutil.which("kubectl")


def container() -> dict[str, Any]:
    (found,) = manifest("compatible", "Deployment")["spec"]["template"]["spec"]["containers"]
    return dict(found)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_crd_is_the_one_in_the_code(variant: Variant) -> None:
    """Applying the file installs exactly the CRD that the operator would create itself."""
    (shipped,) = documents(FOLDERS[variant] / "crd.yaml")
    assert shipped == crd(variant), (
        f"write {variant}'s crd.yaml again from controllers.framework.api.wire.crd({variant!r})"
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_kubectl_explains_each_field(variant: Variant) -> None:
    """Every field that users write has a description."""
    (version,) = crd(variant)["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert [path for path, schema in fields("spec", spec) if not schema.get("description")] == []


def fields(path: str, schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, inner in (schema.get("items") or schema).get("properties", {}).items():
        yield from fields(f"{path}.{name}", inner)


@pytest.mark.parametrize("kind", KINDS)
def test_the_definitions_of_training_jobs_are_those_in_the_code(kind: type[TrainingJobs]) -> None:
    """Each has fields with descriptions, and is small enough for `kubectl apply` to annotate."""
    path = CRDS / f"{kind.resource.plural}.yaml"
    (shipped,) = documents(path)
    assert shipped == definition(kind), f"write {path} again from controllers.training.kinds.definition"
    (version,) = shipped["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    inner = ("spec.elasticPolicy.rdzvConf.",)  # pairs
    assert [path for path, schema in fields("spec", spec) if not schema.get("description")] == [
        path for path, _ in fields("spec", spec) if path.startswith(inner)
    ]
    assert path.stat().st_size < 2**18 / 4


@pytest.mark.skipif(not KUBECTL, reason="kubectl is not there")
def test_kustomize_builds_the_installation_without_frameworks() -> None:
    """The definitions, a role for each kind, and a Deployment that runs these kinds; nothing of Frameworks."""
    assert KUBECTL
    folder = ROOT / "deploy" / "kubernetes-training"
    built = subprocess.run([KUBECTL, "kustomize", folder], capture_output=True, text=True, check=True).stdout
    objects = {(found["kind"], found["metadata"]["name"]): found for found in yaml.safe_load_all(built)}
    kinds = [kind.resource for kind in KINDS]
    assert {name for kind, name in objects if kind == "CustomResourceDefinition"} == {
        f"{kind.plural}.{kind.group}" for kind in kinds
    }
    assert {name for kind, name in objects if kind == "ClusterRole"} == {
        "rcfarm-jobs-autoscalers", *(f"rcfarm-jobs-{kind.kind.lower()}" for kind in kinds),
    }  # fmt: skip
    (one,) = objects["Deployment", "rcfarm-jobs"]["spec"]["template"]["spec"]["containers"]
    named = {each["name"]: each["value"] for each in one["env"]}["RCFARM_JOBS_KINDS"]
    assert named.split(",") == [kind.kind.lower() for kind in kinds]


def test_each_kind_has_the_same_few_rights() -> None:
    """No right on another kind, on Secrets, on whole API groups, or to change jobs."""
    roles = {name_of(found): found for found in documents(CRDS.parent / "rbac.yaml") if found["kind"] == "ClusterRole"}
    for kind in KINDS:
        resource = kind.resource
        of_job = {(resource.group, resource.plural, verb) for verb in ("get", "list", "watch", "delete")}
        of_job |= {(resource.group, f"{resource.plural}/status", "patch")}
        of_job |= {(resource.group, f"{resource.plural}/finalizers", "update")}
        verbs = ("get", "list", "watch", "create", "patch", "delete")
        of_children = {("", child, verb) for child in ("pods", "services") for verb in verbs}
        of_events = {("", "events", verb) for verb in ("create", "patch")}
        assert rights(roles[f"rcfarm-jobs-{resource.kind.lower()}"]) == of_job | of_children | of_events


@pytest.mark.skipif(not KUBECTL, reason="kubectl is not there")
@pytest.mark.parametrize("variant", VARIANTS)
def test_kustomize_builds_each_variant(variant: Variant) -> None:
    """Either folder gives one of each object, in our namespace, with the variant's CRD, rights and mode."""
    assert KUBECTL
    built = subprocess.run([KUBECTL, "kustomize", FOLDERS[variant]], capture_output=True, text=True, check=True)
    objects = {found["kind"]: found for found in yaml.safe_load_all(built.stdout)}
    assert objects.keys() == {
        "Namespace", "CustomResourceDefinition", "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role",
        "RoleBinding", "Deployment", "PodDisruptionBudget", "NetworkPolicy",
    }  # fmt: skip
    assert objects["CustomResourceDefinition"] == crd(variant)
    assert objects["ClusterRole"]["rules"] == manifest(variant, "ClusterRole")["rules"]
    assert objects["Deployment"]["metadata"]["namespace"] == "rcfarm-system"
    (one,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert {"name": "RCFARM_JOBS_MODE", "value": variant} in one["env"]


def test_only_the_listener_can_be_reached() -> None:
    """The network policy is for the operator's pods, and admits only its own namespace, at its listener."""
    (policy,) = documents(ROOT / "deploy" / "kubernetes" / "networkpolicy.yaml")
    template = manifest("compatible", "Deployment")["spec"]["template"]
    assert policy["spec"]["podSelector"]["matchLabels"] == template["metadata"]["labels"]
    assert policy["spec"]["ingress"] == [
        {"from": [{"podSelector": {}}], "ports": [{"port": container()["ports"][0]["name"], "protocol": "TCP"}]}
    ]


def test_the_settings_used_there_exist() -> None:
    """Each variable exists, and together they are valid."""
    environ = {each["name"]: each["value"] for each in container()["env"]}
    assert environ.keys() <= variables().keys()
    settings = load(environ=environ)
    assert settings.web.listen == f"0.0.0.0:{PORTS['jobs']}"
    assert container()["ports"] == [{"name": "web", "containerPort": PORTS["jobs"]}]


def test_the_lease_is_the_one_that_the_rights_name() -> None:
    """The operator's default Lease is the only one that it may touch."""
    rules = manifest("compatible", "Role")["rules"]
    assert [rule.get("resourceNames") for rule in rules] == [None, [load().jobs.lease]]
    assert load().jobs.lease == NAME


def test_the_pod_passes_the_restricted_standard() -> None:
    """Kubernetes' strictest Pod Security Standard: no root, no privileges, nothing to write to."""
    spec = manifest("compatible", "Deployment")["spec"]["template"]["spec"]
    assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert all(volume.keys() == {"name", "secret"} for volume in spec["volumes"])
    assert "USER 10001:10001" in (ROOT / "deploy" / "Dockerfile").read_text(), "runAsNonRoot needs a number"


def test_the_deployment_survives_the_loss_of_a_node() -> None:
    """Two replicas on different nodes if possible, both probed, with bounded resources; one at a time is disrupted."""
    deployment, budget = manifest("compatible", "Deployment"), manifest("compatible", "PodDisruptionBudget")
    spec = deployment["spec"]["template"]["spec"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["replicas"] == 2
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert budget["spec"] == {"maxUnavailable": 1, "selector": deployment["spec"]["selector"]}
    assert spec["affinity"]["podAntiAffinity"]
    assert container()["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "web"}
    assert container()["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "web"}
    assert {"cpu", "memory"} <= container()["resources"]["requests"].keys()
    assert "memory" in container()["resources"]["limits"]
    assert spec["terminationGracePeriodSeconds"] > 20, "stopping outlasts our own drain"
    assert container()["image"] == f"rcfarm:{version('rcfarm')}"
