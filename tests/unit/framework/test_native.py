"""What surrounds a native Framework's pods, as data. Their life is in tests/simulation/test_native_frameworks.py."""

from __future__ import annotations

from typing import Any

import pytest

from controllers.framework.native import name_in_dns, service_name
from store.kube.objects import Object


def pod(name: str, **spec: Any) -> Object:
    return {"metadata": {"name": name}, "spec": {"containers": [], **spec}}


def test_a_pod_is_named_under_its_service() -> None:
    """Its own name, under that of its role's Service."""
    named = pod("mnist-worker-0")
    name_in_dns(named, "mnist-worker")
    assert named == pod("mnist-worker-0", hostname="mnist-worker-0", subdomain="mnist-worker")


def test_the_template_has_the_last_word() -> None:
    """Who writes a host name or a subdomain means it."""
    named = pod("mnist-worker-0", hostname="mine", subdomain="ours")
    name_in_dns(named, "mnist-worker")
    assert named == pod("mnist-worker-0", hostname="mine", subdomain="ours")


@pytest.mark.parametrize(
    ("name", "service"),
    [("mnist-worker-0", ""), (f"{'a' * 40}-{'b' * 30}-0", "b")],
    ids=["no Service", "a name longer than host names are"],
)
def test_a_pod_that_can_not_be_named(name: str, service: str) -> None:
    """It stays as it is: the API server would refuse it otherwise, and the task would have failed."""
    unnamed = pod(name)
    name_in_dns(unnamed, service)
    assert unnamed == pod(name)


@pytest.mark.parametrize(
    ("framework", "role", "expected"),
    [
        ("mnist", "worker", "mnist-worker"),
        ("1mnist", "worker", ""),
        ("a" * 31, "b" * 31, f"{'a' * 31}-{'b' * 31}"),
        ("a" * 32, "b" * 31, ""),
    ],
)
def test_the_names_of_services(framework: str, role: str, expected: str) -> None:
    """They begin with a letter and have at most 63 characters; others make no Service."""
    assert service_name(framework, role) == expected
