"""The definitions have what the operators read."""

from __future__ import annotations

import msgspec
import pytest

from controllers.jobs.api import ReplicaSpec, RunPolicy, SchedulingPolicy
from controllers.training.environment import ElasticPolicy, PyTorchSpec, RendezvousOption
from controllers.training.kinds import KINDS, definition
from controllers.training.pytorch import PyTorchJobs
from controllers.training.spec import RUN_POLICY_FIELDS
from controllers.training.tensorflow import TFJobs, TFSpec
from store.kube.api.objects import Object


def fields(kind: type[msgspec.Struct]) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(kind)}


def spec_schema(kind: type[TFJobs] | type[PyTorchJobs]) -> Object:
    (version,) = definition(kind)["spec"]["versions"]
    found: Object = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_no_field_that_an_operator_reads_is_pruned(kind: type[TFJobs] | type[PyTorchJobs]) -> None:
    """What the schema lacks, the API server drops."""
    spec = spec_schema(kind)
    policy = spec["runPolicy"]["properties"]
    assert policy.keys() == fields(RunPolicy) | {"managedBy"}
    assert policy["schedulingPolicy"]["properties"].keys() == fields(SchedulingPolicy)
    assert spec[kind.replica_specs_field]["additionalProperties"]["properties"].keys() == fields(ReplicaSpec)
    own = {PyTorchJobs: fields(PyTorchSpec), TFJobs: fields(TFSpec) | {"successPolicy"}}[kind]
    assert spec.keys() == {kind.replica_specs_field, "runPolicy", *RUN_POLICY_FIELDS, *own}


def test_the_elastic_policy_is_not_pruned() -> None:
    policy = spec_schema(PyTorchJobs)["elasticPolicy"]["properties"]
    assert policy.keys() == fields(ElasticPolicy)
    assert policy["rdzvConf"]["items"]["properties"].keys() == fields(RendezvousOption)
