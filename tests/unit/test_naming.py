"""Names of pods and services, and label values: readable, valid, and never shared by truncation."""

from __future__ import annotations

import re

import pytest

from controllers.naming import (
    MAX_LABEL,
    gen_expectation_pods_key,
    gen_expectation_services_key,
    gen_general_name,
    label_value,
)
from store.selectors import check_label_value

DNS_1035 = r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$"


def test_a_name_is_job_type_and_index_in_lower_case() -> None:
    """What everybody expects who knows the seed; a slash, as in a job's key, becomes a dash."""
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
    """Whoever lists pods still sees which replica it is."""
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
    """The API server takes it, whatever it was made from."""
    value = label_value(text)

    check_label_value(value)
    assert len(value) <= MAX_LABEL


def test_label_values_stay_as_they_are_when_they_may() -> None:
    """Selectors that people write by hand find the job."""
    assert label_value("My.Job_1") == "My.Job_1"
    assert label_value("team/mnist") == "team-mnist"
    assert label_value("a" * 70 + "x") != label_value("a" * 70 + "y")


def test_expectation_keys_are_as_in_the_seed() -> None:
    """Job key, type in lower case, and what is counted."""
    assert gen_expectation_pods_key("uid-1", "PS") == "uid-1/ps/pods"
    assert gen_expectation_services_key("uid-1", "Worker") == "uid-1/worker/services"
