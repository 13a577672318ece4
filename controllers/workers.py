"""The workers of a control loop: they take keys from its queue and bring each into its desired state.

The model: `workers` tasks share one queue, which never gives a key to two of them. A key whose sync succeeds is
forgiven its failures. A key whose sync fails is tried again under the queue's rate limit, and harms no other: the API
refusing or being away is logged as such, and anything else, which is a defect of ours or of an operator's hook, with
its traceback.

What dies when: cancelling `run` stops the intake, gives the syncs in flight and the keys that are ready up to `drain`
seconds, then cancels the rest and awaits it. Delayed keys are discarded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog

from controllers.workqueue import ShutDown, WorkQueue
from store.kube.errors import KubeError

log = structlog.get_logger(__name__)


class Workers:
    """`count` workers that call `sync(key)`. `expected`: errors that need no traceback."""

    def __init__(
        self,
        queue: WorkQueue[str],
        sync: Callable[[str], Awaitable[None]],
        *,
        count: int = 4,
        drain: float = 5.0,
        expected: tuple[type[Exception], ...] = (KubeError,),
    ) -> None:
        self._queue, self._sync, self._count, self._drain = queue, sync, count, drain
        self._expected = expected

    async def run(self) -> None:
        """Work until cancelled, or until the queue is shut down and empty."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._work(), name=f"worker {number}") for number in range(self._count)]
            try:
                await asyncio.wait(tasks)
            finally:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._drain):
                        await self._queue.shut_down_with_drain()
                for task in tasks:
                    task.cancel()

    async def _work(self) -> None:
        while True:
            try:
                key = await self._queue.get()
            except ShutDown:
                return
            try:
                await self._attempt(key)
            finally:
                self._queue.done(key)

    async def _attempt(self, key: str) -> None:
        try:
            await self._sync(key)
        except Exception as error:  # whatever one key meets, the others go on
            if isinstance(error, self._expected):
                log.warning("Sync failed; it will be tried again", key=key, error=str(error))
            else:
                log.exception("Sync failed unexpectedly; it will be tried again", key=key)
            self._queue.add_rate_limited(key)
        else:
            self._queue.forget(key)
