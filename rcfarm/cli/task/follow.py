"""Follow an execution to its end, by watching its records. Read-only: interrupting it leaves the execution as it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rcfarm.cli.kit.command import Cli
from rcfarm.cli.kit.tasks import TaskInfo, summary, task_info, tasks_of
from rcfarm.cli.rc.follow import watched
from rcfarm.operations.errors import NotFound
from rcfarm.operations.tasks import TaskView, reasons, views_of

NOTE_AFTER = 2.0  # seconds without an owner before a note says so
FOREVER = 1e8  # seconds


async def until_ended(cli: Cli, task_id: str, *, timeout: float, say: Callable[[str], None]) -> TaskInfo:
    """Return the execution when it has ended, or after `timeout` seconds (0: no limit). `say` is called with each line
    of progress. Raises `NotFound` if it is deleted."""
    clock = asyncio.get_running_loop().time
    began = clock()
    end, noted = began + (timeout or FOREVER), False
    async with watched(cli.store, cli.keys.task(task_id)) as tree:
        while True:
            tree.event.clear()
            views = views_of(cli.keys, await tree.entries(end))
            if not views:
                raise NotFound(f"task {task_id} was deleted")
            info = task_info(views[0])
            if views[0].is_held or views[0].is_ended:
                say(summary(info))
            if views[0].is_ended or info.state == "unreadable" or clock() >= end:
                return info
            lonely = not views[0].is_held and not noted
            if lonely and clock() >= began + NOTE_AFTER:
                noted = True
                cli.out.note(await _why_unowned(cli, views[0]))
            await tree.changed(min(end, began + NOTE_AFTER) if lonely and not noted else end)


async def _why_unowned(cli: Cli, view: TaskView) -> str:
    waits = reasons(view, await tasks_of(cli).engines())
    return f"task {view.id} waits: {waits[0].message if waits else 'no engine owns it'}"
