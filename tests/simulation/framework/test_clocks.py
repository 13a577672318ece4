"""Frameworks under an unreliable wall clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from controllers.framework.operator import FrameworkOperator
from store.kube.events import EventRecorder
from tests.support.framework.cluster import EPOCH, Cluster, framework, now, role

pytestmark = pytest.mark.looptime


def backwards() -> float:
    """Return Unix seconds of a clock that is set back again and again."""
    return 2 * EPOCH - now()


@asynccontextmanager
async def operating(cluster: Cluster) -> AsyncIterator[None]:
    """Run an operator whose wall clock runs backwards."""
    recorder = EventRecorder(cluster.api, "rcfarm", clock=backwards)
    operator = FrameworkOperator(cluster.api, cluster.config, recorder, clock=backwards)
    running = asyncio.create_task(operator.run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_a_clock_that_is_set_back_delays_no_status() -> None:
    """A status that is stored with the next change waits for a second or two, not until the clock has caught up."""
    never = {"hollow/start-seconds": "inf"}
    async with Cluster().running(operator=False) as cluster, operating(cluster):
        await cluster.create(framework("job", role("worker", 1, annotations={}), role("late", 1, annotations=never)))
        async with asyncio.timeout(10):
            await cluster.until_state("job", "AttemptRunning")
        (worker,) = await cluster.tasks("job", "worker")
        assert worker["attemptStatus"]["podIP"]
