"""MemoryKube behaves as a real API server does: the suite that `test_kube_conformance` runs against one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from store.kube.api.objects import POD_DISRUPTION_BUDGETS
from store.kube.memory.kube import MemoryKube
from tests.support.kube.conformance.pods import PodConformance
from tests.support.kube.conformance.reads import UNSERVED, ReadConformance
from tests.support.kube.conformance.writes import WriteConformance

pytestmark = pytest.mark.looptime


@pytest.fixture
def api() -> MemoryKube:
    return MemoryKube(namespaces=["default", "ns"], unserved=[UNSERVED, POD_DISRUPTION_BUDGETS])


@pytest.fixture
def namespace() -> str:
    return "ns"


@pytest.fixture
def forget(api: MemoryKube) -> Callable[[], None]:
    return api.compact


class TestWrites(WriteConformance):
    """In memory."""


class TestPods(PodConformance):
    """In memory."""


class TestReads(ReadConformance):
    """In memory."""
