"""The barrier on an API server in memory, in virtual time: when it ends, and how."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from controllers.barrier import REFUSAL_GRACE, FrameworkBarrier
from controllers.barrier_config import AttemptInstance, Config, Identity
from controllers.barrier_exit import Exit
from controllers.framework.constants import FRAMEWORKS
from store.kube.api import WatchEvent
from store.kube.errors import Expired, Forbidden, KubeError, ServerError, TooManyRequests, Unauthorized, Unreachable
from store.kube.memory import Call, MemoryKube
from store.kube.objects import Object, uid_of
from tests.support.gangs import compressed, gang, task

pytestmark = pytest.mark.looptime

TIMEOUT = 600
FAILURE = ServerError("broken", status=500)
REFUSAL = Forbidden("frameworks is forbidden", status=403)


class Trial:
    """One barrier, its server and what it said."""

    def __init__(self, directory: Path) -> None:
        self.kube = MemoryKube(namespaces=["ns"])
        self.directory = directory
        self.said: list[str] = []
        self.identity = Identity()
        self.calls: list[str] = []
        self.faults: Callable[[Call], KubeError | None] = lambda call: None
        self.kube.before_call = self._before

    async def _before(self, call: Call) -> None:
        self.calls.append(call.verb)
        if error := self.faults(call):
            raise error

    async def put(self, framework: Object) -> Object:
        """Create it."""
        return await self.kube.create(FRAMEWORKS, framework, "ns")

    async def change(self, framework: Object) -> None:
        """Write another state of the Framework."""
        old = await self.kube.get(FRAMEWORKS, "gang", "ns")
        await self.kube.replace(FRAMEWORKS, {**framework, "metadata": old["metadata"]})

    async def run(self) -> Exit:
        config = Config("ns", "gang", barrier_check_timeout_sec=TIMEOUT, identity=self.identity)
        barrier = FrameworkBarrier(
            config, api=self.kube, output_dir=self.directory, rng=random.Random(1), say=self.said.append
        )
        return await barrier.run()

    @property
    def written(self) -> set[str]:
        return {path.name for path in self.directory.iterdir()}


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path)


def now() -> float:
    return asyncio.get_running_loop().time()


def waiting() -> Object:
    """A gang that lacks one address."""
    return gang(worker=[task("worker", 0), task("worker", 1, ip=None)])


async def test_a_gang_that_is_whole(trial: Trial) -> None:
    """Scenario 1 (framework): one read, no waiting, all files."""
    await trial.put(gang(ps=1, worker=2))
    trial.calls.clear()
    assert await trial.run() == Exit.PASSED
    assert now() < 0.1
    assert trial.calls == ["list"]
    assert trial.written == {"framework.json", "injector.sh", "membership.json", "hostfile.ps", "hostfile.worker"}
    assert trial.said[-1].startswith("exit 0 (passed): 3 tasks are ready")


async def test_the_last_address_comes(trial: Trial) -> None:
    """Scenario 2 (framework): the barrier passes with the change, not with the next interval; and it says who is
    missing as long as somebody is."""
    await trial.put(waiting())
    async with asyncio.TaskGroup() as group:
        run = group.create_task(trial.run())
        await asyncio.sleep(33.0)
        assert trial.said[-1] == "1/2 ready; missing: worker-1 (no address yet)"
        await trial.change(gang(worker=2))
        changed = now()
    assert run.result() == Exit.PASSED
    assert now() - changed < 0.1


@pytest.mark.parametrize("ip", [None, ""])
async def test_a_gang_that_is_never_whole(trial: Trial, ip: str | None) -> None:
    """Scenario 3 (framework): at the deadline, 201 with who was missing; nothing is written."""
    await trial.put(gang(worker=[task("worker", 0), task("worker", 1, ip=ip)]))
    assert await trial.run() == Exit.TRANSIENT
    assert TIMEOUT - 2.5 < now() <= TIMEOUT
    assert trial.said[-1].endswith("after 600 s 1/2 ready; missing: worker-1 (no address yet)")
    assert not trial.written


async def test_no_such_framework(trial: Trial) -> None:
    """Scenario 4 (framework): believed to a read with quorum, at once."""
    assert await trial.run() == Exit.PERMANENT
    assert now() < 0.1
    assert trial.calls == ["list", "get"]
    assert 'frameworks.frameworkcontroller.microsoft.com "gang" not found' in trial.said[-1]


async def test_a_framework_that_is_deleted(trial: Trial) -> None:
    """While it is waited for."""
    await trial.put(waiting())
    async with asyncio.TaskGroup() as group:
        run = group.create_task(trial.run())
        await asyncio.sleep(5.0)
        await trial.kube.delete(FRAMEWORKS, "gang", "ns")
        deleted = now()
    assert run.result() == Exit.PERMANENT
    assert now() - deleted < 0.1


async def test_nothing_but_errors(trial: Trial) -> None:
    """Scenario 5 (framework): nothing is known at the deadline."""
    trial.faults = lambda call: FAILURE
    assert await trial.run() == Exit.FAILED
    assert TIMEOUT - 2.5 < now() <= TIMEOUT
    assert trial.said[-1].endswith("after 600 s nothing is known of the gang: broken")
    assert len(trial.calls) < 150  # the back-off ends at the interval


async def test_an_error_at_the_deadline(trial: Trial) -> None:
    """Scenario 6 (framework): the last state that was read decides, not the last error."""
    await trial.put(waiting())
    async with asyncio.TaskGroup() as group:
        run = group.create_task(trial.run())
        await asyncio.sleep(300.0)
        trial.faults = lambda call: FAILURE
        trial.kube.break_watches()
    assert run.result() == Exit.TRANSIENT


@pytest.mark.parametrize("refusal", [REFUSAL, Unauthorized("who?", status=401)])
async def test_a_refusal(trial: Trial, refusal: KubeError) -> None:
    """Scenario 7 (framework): after a short grace, with what the server must do."""
    trial.faults = lambda call: refusal
    assert await trial.run() == Exit.FAILED
    assert REFUSAL_GRACE <= now() < REFUSAL_GRACE + 15
    assert str(refusal) in trial.said[-1]
    assert "the server must" in trial.said[-1]


async def test_a_permission_that_comes_late(trial: Trial) -> None:
    """A refusal within the grace is forgotten."""
    await trial.put(gang(worker=1))
    trial.faults = lambda call: REFUSAL if now() < REFUSAL_GRACE - 5 else None
    assert await trial.run() == Exit.PASSED


async def test_a_refusal_between_other_errors(trial: Trial) -> None:
    """The grace is for refusals without anything else between them."""
    await trial.put(waiting())
    trial.faults = lambda call: REFUSAL if now() % 20 < 10 else FAILURE
    assert await trial.run() == Exit.FAILED
    assert now() > TIMEOUT - 2.5


async def test_only_gets_are_allowed(trial: Trial) -> None:
    """Without the right to list and watch, it looks once an interval, not in step with the other pods."""
    await trial.put(waiting())
    trial.faults = lambda call: REFUSAL if call.verb in ("list", "watch") else None
    async with asyncio.TaskGroup() as group:
        run = group.create_task(trial.run())
        await asyncio.sleep(200.0)
        assert 200 / 16 < trial.calls.count("get") < 200 / 6
        assert trial.calls.count("list") == 1
        await trial.change(gang(worker=2))
        changed = now()
    assert run.result() == Exit.PASSED
    assert now() - changed <= 15


async def test_a_server_that_asks_for_a_pause_gets_it(trial: Trial) -> None:
    """Thousands of barriers may ask one server: what it says with a 429 counts, not how soon we would like to know."""
    await trial.put(waiting())
    trial.faults = lambda call: TooManyRequests("later", status=429, retry_after=50.0)
    assert await trial.run() == Exit.FAILED
    assert len(trial.calls) <= TIMEOUT / 50 + 2


async def test_a_server_that_hangs(trial: Trial) -> None:
    """Scenario 8 (framework): no await lasts beyond the deadline."""
    await trial.put(waiting())

    async def hang(call: Call) -> None:
        await asyncio.Event().wait()

    trial.kube.before_call = hang
    assert await trial.run() == Exit.FAILED
    assert now() == TIMEOUT


class DeafKube(MemoryKube):
    """Its watches tell nothing."""

    @asynccontextmanager
    async def watch(self, *_: Any, **__: Any) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        yield _nothing()


async def _nothing() -> AsyncIterator[WatchEvent]:
    await asyncio.Event().wait()
    yield WatchEvent("", {})


async def test_a_watch_that_tells_nothing(trial: Trial) -> None:
    """What a dead connection kept from us, the last look finds."""
    trial.kube = DeafKube(namespaces=["ns"])
    await trial.put(waiting())
    async with asyncio.TaskGroup() as group:
        run = group.create_task(trial.run())
        await asyncio.sleep(10.0)
        await trial.change(gang(worker=2))
    assert run.result() == Exit.PASSED
    assert TIMEOUT - 2.5 < now() < TIMEOUT


@pytest.mark.parametrize("error", [Unreachable("cut"), Expired("too old", status=410), FAILURE])
async def test_a_watch_that_breaks(trial: Trial, error: KubeError) -> None:
    """Scenario 25 (framework): it goes on where it was, or with a new list when the server has forgotten that."""
    await trial.put(waiting())
    async with asyncio.TaskGroup() as group:
        run = group.create_task(trial.run())
        await asyncio.sleep(10.0)
        await trial.change({**waiting(), "spec": gang(worker=3)["spec"]})
        await asyncio.sleep(10.0)
        trial.kube.break_watches(error)
        await trial.change(gang(worker=3))
        changed = now()
    assert run.result() == Exit.PASSED
    assert now() - changed < 3.0
    assert trial.calls.count("list") == (2 if isinstance(error, Expired) else 1)


async def test_a_watch_that_ends_in_time(trial: Trial) -> None:
    """The server ends watches now and then: that is no error, and no reason to list again."""
    await trial.put(waiting())
    assert await trial.run() == Exit.TRANSIENT
    assert trial.calls.count("watch") >= 2
    assert trial.calls.count("list") == 1
    assert len(trial.said) == 3  # what it waits for, how far the gang is, the end


async def test_many_barriers_do_not_come_in_step(trial: Trial) -> None:
    """After an outage of the server the barriers of a gang ask again at different times."""
    await trial.put(waiting())
    times: list[float] = []
    trial.faults = lambda call: times.append(now())
    config = Config("ns", "gang", barrier_check_timeout_sec=60)
    async with asyncio.TaskGroup() as group:
        for seed in range(20):
            barrier = FrameworkBarrier(
                config, api=trial.kube, output_dir=trial.directory, rng=random.Random(seed), say=lambda line: None
            )
            group.create_task(barrier.run())
        await asyncio.sleep(10.0)
        times.clear()
        trial.kube.break_watches()
        await asyncio.sleep(5.0)
        assert len({round(time, 3) for time in times}) > 15


async def test_the_target_moves(trial: Trial) -> None:
    """Scenarios 16 and 17 (framework): the gang is scaled while it is waited for."""
    await trial.put(waiting())
    async with asyncio.TaskGroup() as group:
        run = group.create_task(trial.run())
        await asyncio.sleep(5.0)
        await trial.change(gang(wanted={"worker": 3}, worker=2))
        await asyncio.sleep(5.0)
        assert trial.said[-1] == "2/3 ready; missing: worker-2 (not created yet)"
        await trial.change(gang(wanted={"worker": 2}, worker=[*waiting_tasks(2), task("worker", 2, ip="")]))
    assert run.result() == Exit.PASSED
    assert b'FB_WORKER_IPS="10.1.6.1,10.1.6.2"' in (trial.directory / "injector.sh").read_bytes()


def waiting_tasks(count: int) -> list[Object]:
    return [task("worker", index) for index in range(count)]


async def test_a_status_that_can_not_be_read(trial: Trial) -> None:
    """Scenario 15 (framework): nothing is known at the deadline, and it was said once why."""
    await trial.put(compressed(gang(worker=1), raw=b"nonsense"))
    assert await trial.run() == Exit.FAILED
    assert now() > TIMEOUT - 2.5
    assert sum("taskRoleStatusesCompressed: not valid gzip" in line for line in trial.said[:-1]) == 1
    assert "taskRoleStatusesCompressed" in trial.said[-1]


async def test_a_pod_of_an_earlier_attempt(trial: Trial) -> None:
    """Scenario 24 (framework): refused at once, though the gang is whole."""
    await trial.put(gang(worker=2))
    trial.identity = Identity(framework_attempt=AttemptInstance(0, "older"))
    assert await trial.run() == Exit.PERMANENT
    assert now() < 0.1
    assert "this pod belongs to an earlier one" in trial.said[-1]
    assert not trial.written


async def test_a_framework_of_the_same_name(trial: Trial) -> None:
    """Deleted and created again while the connection was away: the new one is none of this pod's."""
    trial.identity = Identity(framework_uid=uid_of(await trial.put(waiting())))
    async with asyncio.TaskGroup() as group:
        run = group.create_task(trial.run())
        await asyncio.sleep(5.0)
        trial.kube.break_watches()
        await asyncio.sleep(0.1)
        await trial.kube.delete(FRAMEWORKS, "gang", "ns")
        await trial.put(gang(worker=2))
    assert run.result() == Exit.PERMANENT
    assert "another Framework has the name now" in trial.said[-1]


async def test_a_gang_that_can_not_become_whole(trial: Trial) -> None:
    """A member failed for good: the others give up at once, with the code that the deadline would give."""
    await trial.put(waiting())
    async with asyncio.TaskGroup() as group:
        run = group.create_task(trial.run())
        await asyncio.sleep(5.0)
        await trial.change(gang(worker=[task("worker", 0), task("worker", 1, state="Completed", outcome="Failed")]))
    assert run.result() == Exit.TRANSIENT
    assert now() < 6
    assert "worker-1 failed and is not tried again" in trial.said[-1]


async def test_who_is_missing_is_said_in_short(trial: Trial) -> None:
    """A line names a few and counts the rest."""
    await trial.put(gang(wanted={"worker": 1000}, worker=1))
    await trial.run()
    assert "1/1000 ready; missing: worker-1 (not created yet), " in trial.said[1]
    assert trial.said[1].endswith("worker-5 (not created yet) and 994 more")


async def test_a_directory_that_is_not_there(trial: Trial) -> None:
    """It is found out before the gang is waited for."""
    trial.directory /= "missing"
    assert await trial.run() == Exit.FAILED
    assert now() < 0.1
    assert "can't write into" in trial.said[-1]


async def test_files_that_can_not_be_written(trial: Trial) -> None:
    """The gang is whole, but its addresses can't be handed over: that is this pod's failure."""
    await trial.put(gang(worker=1))
    (trial.directory / "injector.sh").mkdir()
    assert await trial.run() == Exit.FAILED
    assert "can't write into" in trial.said[-1]


async def test_stopping(trial: Trial) -> None:
    """Scenario 26 (framework): a cancelled barrier ends at once and leaves no files."""
    await trial.put(waiting())
    run = asyncio.create_task(trial.run())
    await asyncio.sleep(5.0)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert now() == 5.0
    assert not trial.written
    assert trial.kube.watch_count == 0
