"""The executions as an engine sees them: one `TaskShard` per watched shard, one `TaskItem` per execution in it.

The model: a shard is a TreeView of `tasks/<shard>/`, whose changes are folded into items between two awaits, so that a
reader never sees half a change. `on_change(item, what, origin)` notifies the engine; an execution's own rounds pass its
id as the origin of their writes. A record that can't be decoded is kept apart: the execution with such a record is left
as it is, and its neighbours go on.

An engine holds a hundred thousand executions, so an item has three references and no collections, and what is
empty in a spec is kept once.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from store.kv.protocol import BadRecord, Store
from store.kv.view import Change, Record, RefreshBudget, TreeView, Watched
from store.schema.keys import BadKey, Keys
from store.schema.records import Labels, decode
from store.schema.tasks import TaskOwner, TaskSpec, TaskState


class Facet(enum.IntFlag):
    """The part of an execution that has changed."""

    SPEC = 1
    OWNER = 2
    STATE = 4


TaskRecord = TaskSpec | TaskOwner | TaskState
_LEAVES: dict[str, tuple[Facet, type[TaskSpec] | type[TaskOwner] | type[TaskState]]] = {
    "spec": (Facet.SPEC, TaskSpec),
    "owner": (Facet.OWNER, TaskOwner),
    "state": (Facet.STATE, TaskState),
}


_EMPTY: dict[str, Any] = {}  # one for all specs; what plugins get is a copy
_DICTS = tuple(name for name in TaskSpec.__struct_fields__ if getattr(TaskSpec(id="", type=""), name) == {})


class TaskItem:
    """One execution: the records of its folder, joined. `bad`: the record that is undecodable, if there is one."""

    __slots__ = ("bad", "id", "owner", "record", "shard", "spec")

    def __init__(self, task_id: str, shard: TaskShard) -> None:
        self.id = task_id
        self.shard = shard
        self.spec: Record[TaskSpec] | None = None
        self.owner: Record[TaskOwner] | None = None
        self.record: Record[TaskState] | None = None
        self.bad: BadRecord | None = None

    @property
    def bad_spec(self) -> BadRecord | None:
        """The undecodable record for which nothing may be decided."""
        return self.bad

    @property
    def session(self) -> str | None:
        """The session of the engine that owns the execution."""
        return self.owner.session if self.owner else None

    @property
    def token(self) -> int:
        """The fencing token: how often the execution was claimed."""
        return self.owner.lock_index if self.owner else 0

    @property
    def labels(self) -> Labels:
        """The labels that selectors match; read only while there is a spec."""
        assert self.spec is not None
        return self.spec.value.labels

    @property
    def state(self) -> TaskState | None:
        """The stored state; None for an execution that no engine has begun."""
        return self.record.value if self.record else None

    @property
    def is_husk(self) -> bool:
        """Return whether the spec was removed, and nothing of the execution can be alive."""
        if self.spec or self.bad or not (self.owner or self.record):
            return False
        return self.record is None or self.record.value.step == "done"

    @property
    def is_settled(self) -> bool:
        """Return whether the execution has ended, and its owner has nothing left to do."""
        return self.spec is not None and self.record is not None and is_settled(self.spec.value, self.record.value)


def is_settled(spec: TaskSpec, state: TaskState) -> bool:
    """Return whether an execution has ended, no rerun is asked for, and its events have left."""
    return state.step == "done" and state.rerun >= spec.rerun and state.sent >= state.next_event


class TaskShard:
    """One watched shard. `run()` keeps it current; iterate over its items, or find one in `items` by id.

    `claiming` is held while its executions are being claimed, or the shard is being handed over. `busy()`: see
    `TreeView`.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        keys: Keys,
        on_change: Callable[[TaskItem, Facet, str], None],
        budget: RefreshBudget,
        clock: Callable[[], float] = time.monotonic,
        busy: Callable[[], bool] | None = None,
    ) -> None:
        self.name = name
        self.items: dict[str, TaskItem] = {}
        self.claiming = asyncio.Lock()
        self._keys, self._on_change = keys, on_change
        self._prefix = keys.task_shard(name)
        self.view: TreeView[TaskRecord] = TreeView(
            store,
            self._prefix,
            self._decode,
            on_change=self._fold,
            on_bad=self._note_bad,
            budget=budget,
            watched=Watched.INDEX,
            busy=busy,
            name=f"tasks {name}",
            clock=clock,
        )
        self._shared: dict[bytes, TaskOwner] = {}

    async def run(self) -> None:
        """Keep the shard current until cancelled."""
        await self.view.run()

    def close(self) -> None:
        """Drop every record when the engine no longer watches the shard: reference cycles may be exempt from garbage
        collection."""
        self.items.clear()
        self.view.records.clear()

    def __iter__(self) -> Iterator[TaskItem]:
        return iter(self.items.values())

    def _decode(self, key: str, value: bytes) -> TaskRecord:
        try:
            place = self._keys.parse_task(key)
        except BadKey as error:
            raise BadRecord(key, str(error).removeprefix(f"{key}: ")) from error
        if place.kind == "owner":  # equal for all executions that an engine claimed at once
            owner = self._shared.get(value)
            if owner is None:
                if len(self._shared) > 64:
                    self._shared.clear()
                owner = self._shared[value] = decode(TaskOwner, key, value)
            return owner
        record: TaskSpec | TaskState = decode(_LEAVES[place.kind][1], key, value)  # type: ignore[assignment]  # by the table
        if isinstance(record, TaskSpec) and record.id != place.task:
            raise BadRecord(key, f"id: {record.id!r} is another task's; write it as {place.task!r}")
        if isinstance(record, TaskSpec):
            for name in _DICTS:
                if not getattr(record, name):
                    msgspec.structs.force_setattr(record, name, _EMPTY)
        return record

    def _split(self, key: str) -> tuple[str, str]:
        """Return the execution's id and the leaf of a key in this shard that may not be one of an execution."""
        task_id, _, leaf = key[len(self._prefix) :].partition("/")
        return task_id, leaf

    def _item(self, task_id: str) -> TaskItem:
        item = self.items.get(task_id)
        if item is None:
            item = self.items[task_id] = TaskItem(task_id, self)
        return item

    def _note_bad(self, error: BadRecord) -> None:
        task_id, leaf = self._split(error.key)
        if leaf not in ("spec", "state") or error.key != self._keys.task(task_id) + leaf:
            return  # no record of an execution, or one that no decision needs
        item = self._item(task_id)
        item.bad = error
        self._on_change(item, _LEAVES[leaf][0], "")

    def _fold(self, changes: list[Change[TaskRecord]]) -> None:
        touched: dict[str, Facet] = {}
        for key, _, new, _ in changes:
            task_id, leaf = self._split(key)
            if leaf not in _LEAVES:
                continue
            item = self._item(task_id)
            if leaf == "spec":
                item.spec = new  # type: ignore[assignment]  # the leaf determines the type
            elif leaf == "owner":
                item.owner = new  # type: ignore[assignment]
            else:
                item.record = new  # type: ignore[assignment]
            if item.bad is not None and item.bad.key not in self.view.bad:
                folder, bad = self._keys.task(task_id), self.view.bad
                item.bad = bad.get(folder + "spec") or bad.get(folder + "state")
            facet = _LEAVES[leaf][0]
            before = touched.get(task_id)
            touched[task_id] = facet if before is None else before | facet
        origin = changes[0].origin if changes else ""
        for task_id, facets in touched.items():
            item = self.items[task_id]
            if not (item.spec or item.owner or item.record or item.bad):
                del self.items[task_id]
            self._on_change(item, facets, origin)
