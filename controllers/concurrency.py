"""Many calls at once, within bounds.

Both functions return when everything that they started has ended. Cancelling them cancels what is in flight and awaits
it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
E = TypeVar("E", bound=Exception)

MAX_AT_ONCE = 16  # calls in flight of one job and kind of call


async def attempt_all(
    items: Sequence[T],
    work: Callable[[T], Awaitable[R]],
    *,
    errors: tuple[type[E], ...],
    limit: int = MAX_AT_ONCE,
) -> list[R | E]:
    """`work` on each item, `limit` at once; results in the order of the items.

    An error of the listed types is the result of its item and disturbs no other; any other error cancels the rest.
    """
    slots = asyncio.Semaphore(limit)

    async def attempt(item: T) -> R | E:
        async with slots:
            try:
                return await work(item)
            except errors as error:
                return error

    if len(items) == 1:
        return [await attempt(items[0])]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(attempt(item)) for item in items]
    return [task.result() for task in tasks]


async def slow_start(
    items: Sequence[T], work: Callable[[T], Awaitable[bool]], *, limit: int = MAX_AT_ONCE
) -> Sequence[T]:
    """`work` on the items in batches of 1, 2, 4, ...; after a batch in which any `work` returned False, stop.

    Returns the items that were not tried. What the first of them meets (a quota, a rejected template) the others would
    meet too, so a job that can't be created costs few requests however large it is. Source: client-go's
    `slowStartBatch`.
    """
    start, size = 0, 1
    while start < len(items):
        batch = items[start : start + size]
        start, size = start + size, size * 2
        if not all(await attempt_all(batch, work, errors=(), limit=limit)):
            break
    return items[start:]
