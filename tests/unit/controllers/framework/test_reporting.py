"""Snapshots in the log: their contents, and the values that are left out."""

from __future__ import annotations

import json

from structlog.testing import capture_logs

from controllers.framework.config import FrameworkConfig
from controllers.framework.reporting import HIDDEN, History
from store.kube.api.objects import Object

APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def test_values_of_environment_variables_are_not_logged() -> None:
    """Not in any kind of container, nor in the annotation that repeats them; `valueFrom` is shown."""
    source = {"secretKeyRef": {"name": "s", "key": "k"}}
    env = [{"name": "PASSWORD", "value": "hunter2"}, {"name": "REF", "valueFrom": source}, {"name": "EMPTY"}]
    containers = [{"name": "main", "image": "a", "env": env}]
    metadata = {"name": "p", "namespace": "ns", "annotations": {APPLIED: '{"value":"hunter2"}', "b": "c"}}
    pod: Object = {"metadata": metadata, "spec": {"containers": containers, "initContainers": containers}}
    with capture_logs() as logs:
        History(FrameworkConfig()).pod_deleted(pod)
    (line,) = logs
    assert "hunter2" not in line["event"]
    shown = json.loads(line["event"].partition(": ObjectSnapshot: ")[2])
    assert shown["metadata"]["annotations"] == {"b": "c"}
    for kind in ("containers", "initContainers"):
        assert shown["spec"][kind][0]["env"] == [{"name": "PASSWORD", "value": HIDDEN}, *env[1:]]
    assert pod["spec"]["containers"][0]["env"][0]["value"] == "hunter2"
