"""The barrier on an in-memory API server, in virtual time: when it exits, and with which code; and its settings."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from controllers.framework.api.types import FRAMEWORKS
from controllers.framework.barrier.barrier import FIRST_PAUSE, REFUSAL_GRACE, BadConfig, Config, Exit, FrameworkBarrier
from controllers.framework.barrier.gang import AttemptInstance, Identity
from store.kube.api.errors import Expired, Forbidden, KubeError, ServerError, TooManyRequests, Unauthorized, Unreachable
from store.kube.api.objects import Object, uid_of
from store.kube.api.protocol import WatchEvent
from store.kube.memory.kube import Call, MemoryKube
from tests.support.framework.gangs import compressed, gang, task

pytestmark = pytest.mark.looptime

TIMEOUT = 600
FAILURE = ServerError("broken", status=500)
REFUSAL = Forbidden("frameworks is forbidden", status=403)


class Trial:
    """One barrier, its server and its log lines."""

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
        """Create the Framework."""
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
    """Return a gang that lacks one address."""
    return gang(worker=[task("worker", 0), task("worker", 1, ip=None)])


async def test_a_gang_that_is_whole(trial: Trial) -> None:
    """It takes one read, does not wait, and writes all files."""
    await trial.put(gang(ps=1, worker=2))
    trial.calls.clear()
    assert await trial.run() == Exit.PASSED
    assert now() < 0.1
    assert trial.calls == ["list"]
    assert trial.written == {"framework.json", "injector.sh", "membership.json", "hostfile.ps", "hostfile.worker"}
    assert trial.said[-1].startswith("exit 0 (passed): 3 tasks are ready")


async def test_a_gang_that_is_never_whole(trial: Trial) -> None:
    """At the deadline it exits with 201 and names the missing tasks; no file is written."""
    await trial.put(waiting())
    assert await trial.run() == Exit.TRANSIENT
    assert TIMEOUT - 2.5 < now() <= TIMEOUT
    assert trial.said[-1].endswith("after 600 s 1/2 ready; missing: worker-1 (no address yet)")
    assert not trial.written


@pytest.mark.parametrize(
    ("states", "code", "said"),
    [
        ([gang(worker=2)], Exit.PASSED, "2 tasks are ready"),
        ([gang(wanted={"worker": 3}, worker=2), gang(worker=2)], Exit.PASSED, "2 tasks are ready"),
        (
            [gang(worker=[task("worker", 0), task("worker", 1, state="Completed", outcome="Failed")])],
            Exit.TRANSIENT,
            "worker-1 failed and is not tried again",
        ),
        ([None], Exit.PERMANENT, "the Framework does not exist"),
    ],
    ids=["the last address comes", "the target moves", "a member failed finally", "it is deleted"],
)
async def test_changes_during_the_wait(trial: Trial, states: list[Object | None], code: Exit, said: str) -> None:
    """The barrier acts upon the change, not at the next interval; until then it names the missing tasks."""
    await trial.put(waiting())
    async with asyncio.TaskGroup() as group:
        run = group.create_task(trial.run())
        await asyncio.sleep(33.0)
        assert trial.said[-1] == "1/2 ready; missing: worker-1 (no address yet)"
        for state in states:
            await asyncio.sleep(5.0)
            if state is None:
                await trial.kube.delete(FRAMEWORKS, "gang", "ns")
            else:
                await trial.change(state)
        changed = now()
    assert run.result() == code
    assert now() - changed < 0.1
    assert said in trial.said[-1]


async def test_no_such_framework(trial: Trial) -> None:
    """A quorum read without the Framework ends the barrier at once."""
    assert await trial.run() == Exit.PERMANENT
    assert now() < 0.1
    assert trial.calls == ["list", "get"]
    assert 'frameworks.frameworkcontroller.microsoft.com "gang" not found' in trial.said[-1]


async def test_nothing_but_errors(trial: Trial) -> None:
    """The state is unknown at the deadline."""
    trial.faults = lambda call: FAILURE
    assert await trial.run() == Exit.FAILED
    assert TIMEOUT - 2.5 < now() <= TIMEOUT
    assert trial.said[-1].endswith("after 600 s the state of the gang is unknown: broken")
    assert len(trial.calls) < 150  # the back-off ends at the interval


async def test_an_error_at_the_deadline(trial: Trial) -> None:
    """The last state that was read decides, not the last error."""
    await trial.put(waiting())
    async with asyncio.TaskGroup() as group:
        run = group.create_task(trial.run())
        await asyncio.sleep(300.0)
        trial.faults = lambda call: FAILURE
        trial.kube.break_watches()
    assert run.result() == Exit.TRANSIENT


@pytest.mark.parametrize("refusal", [REFUSAL, Unauthorized("who?", status=401)])
async def test_a_refusal(trial: Trial, refusal: KubeError) -> None:
    """After a short grace it exits, and says what the server must allow."""
    trial.faults = lambda call: refusal
    assert await trial.run() == Exit.FAILED
    assert REFUSAL_GRACE <= now() < REFUSAL_GRACE + 15
    assert str(refusal) in trial.said[-1]
    assert "the server must" in trial.said[-1]


async def test_a_permission_that_comes_late(trial: Trial) -> None:
    """A refusal within the grace has no consequence."""
    await trial.put(gang(worker=1))
    trial.faults = lambda call: REFUSAL if now() < REFUSAL_GRACE - 5 else None
    assert await trial.run() == Exit.PASSED


async def test_a_refusal_between_other_errors(trial: Trial) -> None:
    """The grace only counts consecutive refusals."""
    await trial.put(waiting())
    trial.faults = lambda call: REFUSAL if now() % 20 < 10 else FAILURE
    assert await trial.run() == Exit.FAILED
    assert now() > TIMEOUT - 2.5


async def test_only_gets_are_allowed(trial: Trial) -> None:
    """Without the permission to list and watch, it polls once per interval, not in step with the other pods."""
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
    """The Retry-After of a 429 overrides a shorter back-off, as thousands of barriers may use one server."""
    await trial.put(waiting())
    trial.faults = lambda call: TooManyRequests("later", status=429, retry_after=50.0)
    assert await trial.run() == Exit.FAILED
    assert len(trial.calls) <= TIMEOUT / 50 + 2


async def test_a_server_that_hangs(trial: Trial) -> None:
    """No await lasts beyond the deadline."""
    await trial.put(waiting())

    async def hang(call: Call) -> None:
        await asyncio.Event().wait()

    trial.kube.before_call = hang
    assert await trial.run() == Exit.FAILED
    assert now() == TIMEOUT


class DeafKube(MemoryKube):
    """Its watches deliver no events."""

    @asynccontextmanager
    async def watch(self, *_: Any, **__: Any) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        yield _nothing()


async def _nothing() -> AsyncIterator[WatchEvent]:
    await asyncio.Event().wait()
    yield WatchEvent("", {})


async def test_a_watch_without_events(trial: Trial) -> None:
    """The last read finds what a dead connection did not deliver."""
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
    """The watch is resumed, or replaced by a new list when the server has forgotten the resource version."""
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


async def test_a_server_that_restarts(trial: Trial) -> None:
    """A server that was away refuses at first, until it has loaded its permissions; the barrier soon asks again."""
    await trial.put(waiting())
    refused: list[float] = []

    def refuse_first(_: Call) -> KubeError | None:
        refused.append(now())
        return REFUSAL if now() == refused[0] else None

    async with asyncio.TaskGroup() as group:
        run = group.create_task(trial.run())
        await asyncio.sleep(10.0)
        trial.faults = lambda call: Unreachable("down")
        trial.kube.break_watches(Unreachable("down"))
        await asyncio.sleep(60.0)
        trial.faults = lambda call: None
        await trial.change(gang(worker=2))
        trial.faults = refuse_first
    assert run.result() == Exit.PASSED
    assert now() - refused[0] <= 2 * FIRST_PAUSE


async def test_a_watch_that_ends_in_time(trial: Trial) -> None:
    """The server ends watches regularly: that is no error, and no reason to list again."""
    await trial.put(waiting())
    assert await trial.run() == Exit.TRANSIENT
    assert trial.calls.count("watch") >= 2
    assert trial.calls.count("list") == 1
    assert len(trial.said) == 3  # what it waits for, how far the gang is, the end


async def test_many_barriers_do_not_come_in_step(trial: Trial) -> None:
    """After an outage of the server the barriers of a gang retry at different times."""
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


async def test_a_status_that_can_not_be_read(trial: Trial) -> None:
    """The state is unknown at the deadline, and the reason was logged once."""
    await trial.put(compressed(gang(worker=1), raw=b"nonsense"))
    assert await trial.run() == Exit.FAILED
    assert now() > TIMEOUT - 2.5
    assert sum("taskRoleStatusesCompressed: not valid gzip" in line for line in trial.said[:-1]) == 1
    assert "taskRoleStatusesCompressed" in trial.said[-1]


async def test_a_pod_of_an_earlier_attempt(trial: Trial) -> None:
    """It is refused at once, though the gang is complete."""
    await trial.put(gang(worker=2))
    trial.identity = Identity(framework_attempt=AttemptInstance(0, "older"))
    assert await trial.run() == Exit.PERMANENT
    assert now() < 0.1
    assert "this pod belongs to an earlier one" in trial.said[-1]
    assert not trial.written


async def test_a_framework_of_the_same_name(trial: Trial) -> None:
    """The Framework was deleted and created again during an outage: the pod does not belong to the new one."""
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


async def test_the_list_of_missing_tasks_is_short(trial: Trial) -> None:
    """A line names a few and counts the rest."""
    await trial.put(gang(wanted={"worker": 1000}, worker=1))
    await trial.run()
    assert "1/1000 ready; missing: worker-1 (not created yet), " in trial.said[1]
    assert trial.said[1].endswith("worker-5 (not created yet) and 994 more")


async def test_a_directory_that_is_not_there(trial: Trial) -> None:
    """It is checked before the wait."""
    trial.directory /= "missing"
    assert await trial.run() == Exit.FAILED
    assert now() < 0.1
    assert "cannot write to" in trial.said[-1]


async def test_files_that_can_not_be_written(trial: Trial) -> None:
    """The gang is complete, but its addresses can't be written: the pod fails."""
    await trial.put(gang(worker=1))
    (trial.directory / "injector.sh").mkdir()
    assert await trial.run() == Exit.FAILED
    assert "cannot write to" in trial.said[-1]


async def test_stopping(trial: Trial) -> None:
    """A cancelled barrier ends at once and leaves no files."""
    await trial.put(waiting())
    run = asyncio.create_task(trial.run())
    await asyncio.sleep(5.0)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert now() == 5.0
    assert not trial.written
    assert trial.kube.watch_count == 0


NAMES = {"FC_FRAMEWORK_NAMESPACE": "ns", "FC_FRAMEWORK_NAME": "gang"}


def test_defaults() -> None:
    """Only the names are required; the pod's identity stays unknown."""
    assert Config.from_environ(NAMES) == Config("ns", "gang")
    assert Config.from_environ({**NAMES, "BARRIER_CHECK_INTERVAL_SEC": ""}).barrier_check_interval_sec == 10
    assert Config("ns", "gang").barrier_check_timeout_sec == 600


def test_everything() -> None:
    """All variables that the operator sets in a container are read."""
    environ = {
        **NAMES,
        "KUBE_APISERVER_ADDRESS": "http://127.0.0.1:8080",
        "KUBECONFIG": "/config",
        "BARRIER_CHECK_INTERVAL_SEC": "+5",
        "BARRIER_CHECK_TIMEOUT_SEC": "1200",
        "FC_FRAMEWORK_UID": "f",
        "FC_FRAMEWORK_ATTEMPT_INSTANCE_UID": "2_c",
        "FC_TASKROLE_NAME": "worker",
        "FC_TASK_INDEX": "3",
        "FC_TASK_ATTEMPT_INSTANCE_UID": "4_p",
    }
    identity = Identity("f", AttemptInstance(2, "c"), "worker", 3, AttemptInstance(4, "p"))
    assert Config.from_environ(environ) == Config("ns", "gang", "http://127.0.0.1:8080", "/config", 5, 1200, identity)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("FC_FRAMEWORK_NAMESPACE", [""], "FC_FRAMEWORK_NAMESPACE is not set"),
        ("FC_FRAMEWORK_NAME", [""], "FC_FRAMEWORK_NAME is not set"),
        (
            "BARRIER_CHECK_INTERVAL_SEC",
            ["4", "5s", " 10", "1_0", "0x10", "٥", "-5", "9" * 30, "5.0"],
            "BARRIER_CHECK_INTERVAL_SEC is .*; set it to",
        ),
        ("BARRIER_CHECK_TIMEOUT_SEC", ["59", "1201", "10m"], "BARRIER_CHECK_TIMEOUT_SEC is .*; set it"),
    ],
)
def test_bad_settings(name: str, values: list[str], message: str) -> None:
    """The names are required; an interval is five seconds or more, and a timeout one to twenty minutes, in digits."""
    for value in values:
        with pytest.raises(BadConfig, match=message):
            Config.from_environ({**NAMES, name: value})
