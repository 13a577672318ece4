"""The shipped manifests of HiveD, and its examples."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import yaml

from controllers.framework.api.wire import decode_framework
from scheduler.hived.config.file import HivedConfig, read_config
from store.kube.api.objects import Object, name_of
from tests.support.framework.world import World
from tests.support.kube.shipped_manifests import ROOT, documents

EXTENDER = ROOT / "deploy" / "kubernetes" / "extender"
COMPLETE = ROOT / "deploy" / "kubernetes" / "hived"
EXAMPLES = ROOT / "examples" / "hived"


def configuration(path: Path) -> HivedConfig:
    """Return a shipped hived.yaml, read on a machine without other settings."""
    return read_config(path.read_text(), environ={}, home=Path("/nonexistent"))


def scheduler_configurations() -> dict[str, Object]:
    """Return the KubeSchedulerConfiguration of each tenant that has a folder."""
    return {path.parent.name: documents(path)[0] for path in sorted(COMPLETE.glob("*/scheduler.yaml"))}


def extender_object(kind: str) -> Object:
    """Return the extender's object of that kind."""
    (found,) = (each for path in EXTENDER.glob("*.yaml") for each in documents(path) if each.get("kind") == kind)
    return found


def example_pods(name: str) -> list[Object]:
    """Return the pods of an example, in their order."""
    (document,) = documents(EXAMPLES / name)
    return document["items"] if document["kind"] == "List" else [document]


def framework_pods() -> list[Object]:
    """Return the pods that the operator of Frameworks creates for its example."""
    (framework,) = documents(EXAMPLES / "framework.yaml")
    assert not decode_framework(framework).problems
    framework["metadata"] |= {"namespace": "default", "uid": "u", "generation": 1, "resourceVersion": "1"}
    world = World(framework)
    world.settle()
    return [pod for pod in world.live.values() if pod["kind"] == "Pod"]


@cache
def built(folder: Path) -> dict[tuple[str, str], Object]:
    """Return the objects that `kubectl apply -k` would apply, by kind and name. Skip the test without kubectl."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not there")
    done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {(found["kind"], name_of(found)): found for found in yaml.safe_load_all(done.stdout)}
