"""Names of pods and services, and label values: readable, valid, and never shared by truncation. Pods by type and
index, from labels that any client may have written.
"""

from __future__ import annotations

import re

import pytest

from controllers.jobs.api.names import (
    MAX_LABEL,
    filter_for_replica_type,
    gen_expectation_pods_key,
    gen_expectation_services_key,
    gen_general_name,
    label_value,
    replica_index,
    slices,
)
from store.kube.api.objects import Object, name_of
from store.schema.selectors import check_label_value

DNS_1035 = r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$"


def test_a_name_is_job_type_and_index_in_lower_case() -> None:
    """As in kubeflow; a slash, as in a job's key, becomes a dash."""
    assert gen_general_name("mnist", "Worker", "0") == "mnist-worker-0"
    assert gen_general_name("team/mnist", "PS", 11) == "team-mnist-ps-11"


@pytest.mark.parametrize("job", ["9lives", "a" * 70, "My.Job", "-", "ü", "a" * 61, "job."])
@pytest.mark.parametrize("replica_type", ["Worker", "Parameter_Server", "W" * 60])
def test_a_name_is_always_a_dns_1035_label(job: str, replica_type: str) -> None:
    """A service can be created under it, whatever the job is called."""
    name = gen_general_name(job, replica_type, 3)

    assert re.fullmatch(DNS_1035, name)
    assert name == gen_general_name(job, replica_type, 3)


def test_a_long_name_keeps_the_type_and_the_index() -> None:
    """A list of pods still shows which replica each is."""
    name = gen_general_name("a" * 70, "Worker", 12)

    assert name.endswith("-worker-12")
    assert len(name) == MAX_LABEL


def test_long_names_that_begin_alike_stay_different() -> None:
    """A hash of the whole name is part of it, so two jobs never fight for one pod name by truncation."""
    names = {gen_general_name("a" * 70 + end, "worker", index) for end in ("x", "y") for index in (0, 1)}
    names |= {gen_general_name("a" * 70, "w" * 60 + end, 0) for end in ("x", "y")}

    assert len(names) == 6


@pytest.mark.parametrize("text", ["a" * 80, "a b", "-", "", "x/", "ü" * 70])
def test_a_label_value_is_always_valid(text: str) -> None:
    """The API server accepts it, whatever text it was made from."""
    value = label_value(text)

    check_label_value(value)
    assert len(value) <= MAX_LABEL


def test_label_values_stay_as_they_are_when_they_may() -> None:
    """Hand-written selectors find the job."""
    assert label_value("My.Job_1") == "My.Job_1"
    assert label_value("team/mnist") == "team-mnist"
    assert label_value("a" * 70 + "x") != label_value("a" * 70 + "y")


def test_expectation_keys_are_as_in_kubeflow() -> None:
    """They consist of the job key, the type in lower case, and the resource."""
    assert gen_expectation_pods_key("uid-1", "PS") == "uid-1/ps/pods"
    assert gen_expectation_services_key("uid-1", "Worker") == "uid-1/worker/services"


def labelled(name: str, **labels: str) -> Object:
    return {"metadata": {"name": name, "namespace": "ns", "labels": labels}}


def test_every_index_below_the_replicas_has_a_slice() -> None:
    """An empty slice is a replica to create; several pods in one are duplicates; those above are surplus."""
    found = slices([labelled("a", i="0"), labelled("b", i="0"), labelled("c", i="4")], 3, "i")

    assert {index: [name_of(obj) for obj in objects] for index, objects in found.items()} == {
        0: ["a", "b"],
        1: [],
        2: [],
        4: ["c"],
    }


@pytest.mark.parametrize("value", ["abc", "-1", "", "+1", " 1", "1.0", "1_0", "١", "9" * 5000])
def test_an_unusable_index_is_ignored_safely(value: str) -> None:
    """It is in no slice, and the other pods are found."""
    found = slices([labelled("bad", i=value), labelled("none"), labelled("good", i="1")], 0, "i")

    assert [name_of(obj) for obj in found[1]] == ["good"]
    assert len(found) == 1


def test_a_huge_index_costs_nothing() -> None:
    """There is no list of a thousand million slices."""
    found = slices([labelled("far", i="1000000000")], 2, "i")

    assert sorted(found) == [0, 1, 1_000_000_000]


def test_replica_index_reads_decimal_numbers() -> None:
    """Leading zeros are harmless; an object without labels has no index."""
    assert replica_index(labelled("a", i="007"), "i") == 7
    assert replica_index({"metadata": {"name": "a"}}, "i") is None


def test_filter_takes_the_exact_type_in_lower_case() -> None:
    """`PS` in a spec is `ps` in labels; a type with the same prefix is another type."""
    pods = [labelled("a", t="ps"), labelled("b", t="psx"), labelled("c", t="PS"), labelled("d")]

    assert [name_of(pod) for pod in filter_for_replica_type(pods, "PS", "t")] == ["a"]
