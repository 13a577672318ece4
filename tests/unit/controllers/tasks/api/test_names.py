"""Generated names: ours, and Flyte's with the vectors of its own tests."""

from __future__ import annotations

import pytest

from controllers.tasks.api.names import (
    BadName,
    TaskExecutionID,
    TaskExecutionIdentifier,
    flyte_digest,
    flyte_name,
    generated_name,
)


@pytest.mark.parametrize(
    ("text", "digest"),
    [
        ("x" * 24, "fuaa3aji"),
        ("x-y", "fz2jizji"),
        ("name-n1-1", "fpmmhh6q"),
        ("x-y-z-m-n-y-z-m-n-y-z-m-n", "fe63sz6y"),
    ],
)
def test_the_digests_are_those_of_flyte(text: str, digest: str) -> None:
    assert flyte_digest(text) == digest


def test_the_wider_digests_are_those_of_flyte() -> None:
    assert flyte_digest("x-y-z-m-n-y-z-m-n-y-z-m-n", 64) == "fwp4bky2kucex5"
    assert len(flyte_digest("x", 128)) == 27


def test_names_of_flyte_are_joined_digested_or_padded() -> None:
    assert flyte_name("name", "n1", 1) == "name-n1-1"
    assert flyte_name("name", "n1", 1, max_length=8) == "fpmmhh6q"
    assert flyte_name("e", "n", 0, min_length=10) == "e-n-000000"
    assert flyte_name("name", "n1", 1, min_length=9, max_length=9) == "name-n1-1"
    with pytest.raises(BadName, match="8 characters, above the maximum of 5"):
        flyte_name("name", "n1", 1, max_length=5)


def test_a_short_name_stays_readable() -> None:
    assert generated_name("etl", "n0", 2) == "etl-n0-2"


def test_a_long_or_ambiguous_name_has_a_readable_prefix_and_a_digest() -> None:
    long = generated_name("daily-report", "n0", 0)
    assert long.startswith("daily-report-n0-0-f")
    assert len(long) <= 50
    assert generated_name("a-b", "c", 0) != generated_name("a", "b-c", 0)
    assert generated_name("Etl", "n0", 2) != generated_name("etl", "n0", 2)
    assert generated_name("01J", "n0", 0).startswith("t01j-n0-0-f")
    assert len(generated_name("daily-report", "n0", 0, max_length=8)) == 8


def test_a_minimum_is_met_by_more_digest() -> None:
    first, second = (generated_name("x", "n", attempt, min_length=40) for attempt in (1, 10))
    assert len(first) >= 40
    assert first != second
    assert not first.endswith("00")


@pytest.mark.parametrize(("least", "most"), [(0, 7), (10, 9)])
def test_bounds_that_no_name_fits_are_refused(least: int, most: int) -> None:
    with pytest.raises(BadName, match=f"{least} to {most} characters"):
        generated_name("etl", "n0", 0, min_length=least, max_length=most)


def test_a_plugin_gets_its_names_in_either_way() -> None:
    identifier = TaskExecutionIdentifier("p", "d", "exec", "n1", "t", 1)
    name = TaskExecutionID(identifier, max_length=8)
    assert len(name.get_generated_name()) == 8
    assert name.get_generated_name_with(0, 50) == "exec-n1-1"
    assert TaskExecutionID(identifier, max_length=8, compatible=True).get_generated_name() == flyte_digest("exec-n1-1")
    assert TaskExecutionID(identifier, compatible=True).get_generated_name_with(10, 50) == "exec-n1-10"
    assert (name.get_id(), name.get_unique_node_id()) == (identifier, "n1")
