"""Kubernetes quantities, as numbers and back; keys and controllers of objects."""

from __future__ import annotations

from decimal import Decimal

import pytest

from store.kube.api.objects import is_controlled_by, owner_reference, split_key
from store.quantity import format_quantity, parse_quantity


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2", "2"),
        ("500m", "0.5"),
        ("1.5Gi", "1610612736"),
        ("1k", "1000"),
        ("1Ki", "1024"),
        ("1e3", "1000"),
        ("1E3", "1000"),
        ("1E", "1000000000000000000"),
        (".5", "0.5"),
        ("5.", "5"),
        ("100n", "0.0000001"),
        ("-1", "-1"),
        (3, "3"),
        (0.5, "0.5"),
    ],
)
def test_parse(text: str | float, number: str) -> None:
    """All notations of the API, and numbers as YAML has them."""
    assert parse_quantity(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "x", "1.2.3", "1 Gi", "Gi", "1gi", "1e", "0x10", "１", True, None])
def test_what_is_no_quantity_is_refused(text: object) -> None:
    """And named, with an example of what would be one."""
    with pytest.raises(ValueError, match="is not a quantity; write it like 500m"):
        parse_quantity(text)  # type: ignore[arg-type]


def test_format() -> None:
    """Whole numbers as they are; smaller parts in thousandths, rounded up."""
    assert format_quantity(parse_quantity("1.5Gi")) == "1610612736"
    assert format_quantity(Decimal("0.5")) == "500m"
    assert format_quantity(Decimal("0.0001")) == "1m"
    assert format_quantity(Decimal("1e3")) == "1000"


@pytest.mark.parametrize(("key", "parts"), [("ns/name", ("ns", "name")), ("name", ("", "name"))])
def test_a_key_is_a_namespace_and_a_name(key: str, parts: tuple[str, str]) -> None:
    """An object of the whole cluster has no namespace."""
    assert split_key(key) == parts


def test_a_key_of_three_parts_is_an_error() -> None:
    """Taking a part of it for the namespace would look for another object."""
    with pytest.raises(ValueError, match="'a/b/c' is not a key"):
        split_key("a/b/c")


def test_an_object_of_an_earlier_owner_of_the_name_is_not_controlled_by_the_present_one() -> None:
    """The UID decides, not the name; an orphan is controlled by none."""
    owner, successor = ({"metadata": {"name": "train", "uid": uid}} for uid in ("one", "two"))
    pod = {"metadata": {"ownerReferences": [owner_reference(owner, api_version="v1", kind="Job")]}}
    assert is_controlled_by(pod, owner)
    assert not is_controlled_by(pod, successor)
    assert not is_controlled_by({"metadata": {}}, owner)
