"""Whatever a job's spec holds, the operator refuses it by name or builds its pods; nothing else happens."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controllers.jobs.api import BadSpec
from controllers.jobs.control import build_service
from controllers.training.kind import TrainingJobs
from controllers.training.pytorch import PyTorchJobs
from controllers.training.tensorflow import TFJobs
from store.kube.api.objects import Object
from store.kube.memory.kube import MemoryKube
from tests.support.training.manifests import built_pod, pytorch_job, template, tf_job

_PORTS = {"pytorchjob-port": 1, "tfjob-port": 2}
_POLICY: Object = {
    "cleanPodPolicy": "All",
    "backoffLimit": 3,
    "ttlSecondsAfterFinished": 5,
    "suspend": False,
    "schedulingPolicy": {"minAvailable": 1, "queue": "q", "minResources": {"cpu": "1"}},
}
_ELASTIC: Object = {
    "minReplicas": 1,
    "maxReplicas": 2,
    "rdzvBackend": "c10d",
    "rdzvHost": "h",
    "rdzvPort": 1,
    "rdzvConf": [{"key": "a", "value": "b"}],
    "metrics": [{"type": "Resource"}],
    "standalone": True,
    "maxRestarts": 1,
}


def _full(container: str) -> Object:
    env, labels = [{"name": "A", "value": "b"}], {"a": "b"}
    found = template(container, ports=_PORTS, env=env)
    found["spec"]["initContainers"] = [{"name": "i", "image": "i"}]
    return {
        "replicas": 1,
        "restartPolicy": "OnFailure",
        "template": {"metadata": {"labels": labels, "annotations": labels}, **found},
    }


JOBS: dict[type[TrainingJobs], Object] = {
    PyTorchJobs: pytorch_job(
        Master=_full("pytorch"),
        Worker=_full("pytorch"),
        spec={"nprocPerNode": "2", "elasticPolicy": _ELASTIC, "runPolicy": _POLICY},
    ),
    TFJobs: tf_job(
        Chief=_full("tensorflow"),
        PS=_full("tensorflow"),
        Worker=_full("tensorflow"),
        spec={"successPolicy": "AllWorkers", "enableDynamicWorker": True, "runPolicy": _POLICY},
    ),
}
values: st.SearchStrategy[Any] = st.sampled_from(
    [None, "", "x", 0, -1, 1, 2**70, 1.5, True, [], [None], ["x"], [{}], {}, {"x": None}, {"x": {}}, [[1]]]
)


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value within this one."""
    if path:
        yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from paths(inner, (*path, key))


def put(job: Object, path: tuple[Any, ...], value: Any) -> None:
    """Set the value at a path, unless an earlier change took the way there."""
    *way, last = path
    found: Any = job
    for step in way:
        usable = (isinstance(found, dict) and step in found) or (isinstance(found, list) and step in range(len(found)))
        if not usable:
            return
        found = found[step]
    if isinstance(found, dict) or (isinstance(found, list) and last in range(len(found))):
        found[last] = value


@pytest.mark.parametrize("kind", JOBS)
@given(data=st.data())
@settings(max_examples=150)
def test_a_spec_is_refused_by_name_or_used(kind: type[TrainingJobs], data: st.DataObject) -> None:
    """Up to three of its values are replaced; an error of any other type would fail here."""
    job = copy.deepcopy(JOBS[kind])
    places = [path for path in paths(job["spec"]) if path[0] != "metadata"]
    for path in data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=3)):
        put(job["spec"], path, data.draw(values))
    operator = OPERATORS[kind]
    with suppress(BadSpec):
        view = operator.view(job)
        for replica_type, spec in view.replica_specs.items():
            for index in range(min(spec.replicas, 2)):
                built_pod(operator, job, replica_type, index)
                container = operator.default_container
                build_service(operator.jobs.identity(job), replica_type, index, spec, default_container=container)


OPERATORS: dict[type[TrainingJobs], TrainingJobs] = {kind: kind(MemoryKube()) for kind in JOBS}
