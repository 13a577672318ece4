"""Frameworks that are created, run, end and are created again under the same names, each with an expected end."""

from __future__ import annotations

import asyncio
import random
from typing import NamedTuple

from controllers.framework.api.types import FRAMEWORKS
from store.kube.api.errors import KubeError, NotFound
from store.kube.api.objects import Object, name_of, uid_of
from store.kube.api.protocol import KubeApi
from tests.support.framework.cluster import framework, role

LOOK = 0.2  # seconds between two polls of a Framework
FAIL_ON_FIRST = {"minFailedTaskCount": 1, "minSucceededTaskCount": -1}


class Expected(NamedTuple):
    """The expected end of a Framework: the code and the id of its last attempt."""

    code: int
    attempt: int


class Planned(NamedTuple):
    body: Object
    expected: Expected


def planned(name: str, rng: random.Random) -> Planned:
    """Return a Framework of two roles whose tasks succeed, fail it twice, or are retried themselves."""
    what = rng.choice(("succeeds", "succeeds", "fails", "retries tasks"))
    code = {"succeeds": 0, "fails": 7, "retries tasks": 3}[what]

    def tasks(name: str, count: int, code: int, retries: int = 0) -> Object:
        plan = {"hollow/exit-code": str(code), "hollow/run-seconds": f"{rng.uniform(0.1, 1.5):.2f}"}
        retry = {"fancyRetryPolicy": False, "maxRetryCount": retries}
        return role(name, count, annotations=plan, retry=retry, policy=FAIL_ON_FIRST)

    roles = (
        tasks("server", 1, 0),
        tasks("worker", rng.randrange(1, 4), code, retries=2 if what == "retries tasks" else 0),
    )
    attempts = 1 if what == "fails" else 0
    body = framework(name, *roles, retryPolicy={"fancyRetryPolicy": False, "maxRetryCount": attempts})
    return Planned(body, Expected(code, attempts))


def outcome(obj: Object) -> Expected | None:
    """Return how the Framework ended; None while it has not."""
    status = obj.get("status")
    if not status or status["state"] != "Completed":
        return None
    return Expected(status["attemptStatus"]["completionStatus"]["code"], status["attemptStatus"]["id"])


class Load:
    """Keeps `slots` Frameworks going in a namespace. `ended` counts those that ended as expected; others fail `run`."""

    def __init__(self, api: KubeApi, namespace: str, rng: random.Random, *, slots: int = 4) -> None:
        self.ended = 0
        self._api, self._namespace, self._rng, self._slots = api, namespace, rng, slots
        self._is_last = asyncio.Event()

    async def run(self) -> None:
        """Run until `finish` was called and the last Frameworks have ended."""
        async with asyncio.TaskGroup() as group:
            for slot in range(self._slots):
                group.create_task(self._repeat(f"f{slot}"))

    def finish(self) -> None:
        """Start no more Frameworks."""
        self._is_last.set()

    async def _repeat(self, name: str) -> None:
        while not self._is_last.is_set():
            plan = planned(name, self._rng)
            await create(self._api, plan.body, self._namespace)
            obj = await until_completed(self._api, name, self._namespace)
            assert outcome(obj) == plan.expected, obj["status"]
            self.ended += 1
            if not self._is_last.is_set() and self._rng.random() < 0.7:
                await self._delete(obj)
            else:
                name += "x"

    async def _delete(self, obj: Object) -> None:
        name = name_of(obj)
        await self._api.delete(FRAMEWORKS, name, self._namespace, uid=uid_of(obj), propagation="Foreground")
        try:
            while True:
                await self._api.get(FRAMEWORKS, name, self._namespace)
                await asyncio.sleep(LOOK)
        except NotFound:
            return


async def create(api: KubeApi, body: Object, namespace: str) -> Object:
    """Create a Framework in a namespace."""
    body = body | {"metadata": {**body["metadata"], "namespace": namespace}}
    return await api.create(FRAMEWORKS, body, namespace)


async def until_completed(api: KubeApi, name: str, namespace: str, *, within: float = 150.0) -> Object:
    """Wait for the end of a Framework, also while the API server is down. Return the Framework."""
    obj: Object = {}
    try:
        async with asyncio.timeout(within):
            while True:
                try:
                    obj = await api.get(FRAMEWORKS, name, namespace)
                except NotFound:
                    raise
                except KubeError:
                    await asyncio.sleep(LOOK)
                    continue
                if outcome(obj) is not None:
                    return obj
                await asyncio.sleep(LOOK)
    except TimeoutError:
        raise AssertionError(f"{namespace}/{name} is stuck: {_brief(obj)}") from None


def _brief(obj: Object) -> Object:
    """Return the states of a Framework and its tasks."""
    status = obj.get("status") or {}
    roles = (status.get("attemptStatus") or {}).get("taskRoleStatuses") or ()
    tasks = {role["name"]: [task["state"] for task in role["taskStatuses"]] for role in roles}
    return {"state": status.get("state"), "tasks": tasks}
