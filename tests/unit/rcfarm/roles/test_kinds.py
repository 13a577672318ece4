"""The kinds of one process: which are run, and that one kind's failure concerns no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from controllers.jobs.api import NotServed
from controllers.loop.workqueue import WorkQueue
from controllers.training.pytorch import PYTORCH_JOBS
from rcfarm.roles.kinds import CHECK, RESTART, Kind, KindRunner, Operator
from rcfarm.telemetry.kube import RestClientMetrics
from store.kube.api.objects import Resource
from store.kube.informer.informer import Informer
from store.kube.memory.kube import MemoryKube
from tests.support.waiting import background, until

pytestmark = pytest.mark.looptime


class Cluster(MemoryKube):
    """`absent`: the kinds that are not served at present."""

    def __init__(self) -> None:
        super().__init__()
        self.absent: set[Resource] = set()

    async def served(self, resource: Resource, *, fresh: bool = False) -> bool:
        await super().served(resource, fresh=fresh)
        return resource not in self.absent


class FakeInformer(Informer):
    """A cache whose problem a test sets."""

    problem = ""


class FakeOperator:
    """Works for ever, or ends with `failure`."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.queue: WorkQueue[str] = WorkQueue("fake")
        self.informers = [FakeInformer(MemoryKube(), PYTORCH_JOBS)]
        self.is_running, self._failure = False, failure

    def problems(self) -> Mapping[str, str]:
        return {"operator": "" if self.is_running else "starting"}

    async def run(self) -> None:
        self.is_running = True
        try:
            if self._failure:
                raise self._failure
            await asyncio.Event().wait()
        finally:
            self.is_running = False


@asynccontextmanager
async def runner(
    server: MemoryKube, make: Callable[[], Sequence[Operator]], *, is_named: bool = False
) -> AsyncIterator[KindRunner]:
    async def make_them() -> Sequence[Operator]:
        return make()

    kind = Kind("pytorchjob", PYTORCH_JOBS, "apply it", make_them)
    runner = KindRunner(server, kind, RestClientMetrics(CollectorRegistry(), "http://x"), is_named=is_named)
    async with background(runner.run()):
        yield runner


def problem(runner: KindRunner) -> str:
    return "; ".join(f"{each.name}: {each.reason}" for each in runner.conditions() if not each.holds)


async def test_a_kind_that_appears_later_is_picked_up() -> None:
    """Nobody misses it before; it is run a few seconds after its definition was applied."""
    server, operator = Cluster(), FakeOperator()
    server.absent = {PYTORCH_JOBS}
    async with runner(server, lambda: [operator]) as found:
        await until(lambda: found.is_absent)
        assert problem(found) == ""
        server.absent.clear()
        await asyncio.sleep(CHECK)
        await until(lambda: operator.is_running)
        assert not found.is_absent
        assert problem(found) == ""


@pytest.mark.parametrize(("is_named", "why"), [(True, "jobs.kinds names it"), (False, "the API server serves it")])
async def test_the_log_says_which_kinds_run_and_why(is_named: bool, why: str) -> None:
    """An operator that was not meant to run a kind shows it at its start."""
    operator = FakeOperator()
    with capture_logs() as logs:
        async with runner(Cluster(), lambda: [operator], is_named=is_named):
            await until(lambda: operator.is_running)
    (entry,) = (each for each in logs if each["event"] == "Running the jobs of a kind")
    assert entry["kind"] == "pytorchjob"
    assert entry["reason"].startswith(why)


async def test_a_named_kind_that_is_not_served_is_an_error_until_it_is() -> None:
    """Readiness says which definition is missing and what to do."""
    server, operator = Cluster(), FakeOperator()
    server.absent = {PYTORCH_JOBS}
    async with runner(server, lambda: [operator], is_named=True) as found:
        missing = "pytorchjob: the API server does not serve pytorchjobs.kubeflow.org; apply it"
        await until(lambda: problem(found) == missing)
        assert not found.is_absent
        server.absent.clear()
        await until(lambda: operator.is_running)
        assert problem(found) == ""


async def test_a_kind_whose_definition_goes_is_stopped() -> None:
    """The server is asked only when a cache can't be kept current. The kind is run again when it is back."""
    server = Cluster()
    operators = [FakeOperator(), FakeOperator()]
    cache = operators[0].informers[0]
    made = iter(operators)
    async with runner(server, lambda: [next(made)]) as found:
        await until(lambda: operators[0].is_running)
        server.absent = {PYTORCH_JOBS}
        await asyncio.sleep(3 * CHECK)
        assert operators[0].is_running
        cache.problem = "404"
        await until(lambda: found.is_absent)
        assert not any(each.is_running for each in operators)
        server.absent.clear()
        await until(lambda: operators[1].is_running)


@pytest.mark.parametrize("failure", [NotServed("the API server does not serve podgroups"), ValueError("a defect")])
async def test_an_error_ends_only_this_kind(failure: Exception) -> None:
    """Readiness shows the error until new operators run, after a while."""
    operators = [FakeOperator(failure), FakeOperator()]
    other = FakeOperator()
    made = iter(operators)
    async with runner(Cluster(), lambda: [next(made)]) as found, runner(Cluster(), lambda: [other]):
        await until(lambda: problem(found) == f"pytorchjob: {failure}")
        began = asyncio.get_running_loop().time()
        await until(lambda: operators[1].is_running)
        assert asyncio.get_running_loop().time() - began == pytest.approx(RESTART, abs=0.5)
        assert problem(found) == ""
        assert other.is_running
