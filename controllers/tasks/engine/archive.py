"""The ended executions of all shards, as the engine knows them that removes them.

The model: the shards that the engine watches are in its memory already. Of each other shard it lists the names of the
executions, and reads those that it does not know as ended: live ones, and those that are new. An ended execution is one
tuple here, so that a hundred thousand of them are few bytes; it may have been asked to run again since, which
`Retention` finds out before it removes anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from controllers.tasks.engine.shard import TaskShard, is_settled
from controllers.tasks.retention import Ended, Group
from store.kv.protocol import BadRecord, Entry, Store
from store.schema.keys import Keys, all_shards, shard_of
from store.schema.records import decode
from store.schema.tasks import TaskSpec, TaskState
from store.timing import give_way

FEW = 32  # executions of a shard that are read one by one


class Archive:
    """`ended`: the ended executions, by id. `awaited`: those that others wait for. `successes`: when the newest of each
    schedule ended that succeeded and was seen. `read` brings them up to date."""

    def __init__(self, store: Store, keys: Keys) -> None:
        self.ended: dict[str, Ended] = {}
        self.awaited: set[str] = set()
        self.successes: dict[str, float] = {}
        self._store, self._keys = store, keys
        self._groups: dict[Group, Group] = {}
        self._foreign: dict[str, dict[str, Ended]] = {}

    async def read(self, watched: Mapping[str, TaskShard]) -> None:
        """Read what is not known. `watched`: the shards in memory. Raises `StoreError`."""
        shards: list[dict[str, Ended]] = []
        awaited = set[str]()
        for name in all_shards(self._keys.shards):
            await give_way()
            shard = watched.get(name)
            if shard is None or not shard.view.is_synced:
                shards.append(await self._of_foreign(name, awaited))
                continue
            self._foreign.pop(name, None)
            found: dict[str, Ended] = {}
            for item in shard:
                if item.spec is None:
                    continue
                if item.record is not None and item.is_settled and item.session is None:
                    found[item.id] = self._ended(item.spec.value, item.record.value)
                else:
                    awaited.update(item.spec.value.depends_on)
            shards.append(found)
        self.ended = {task: ended for shard in shards for task, ended in shard.items()}
        self.awaited = awaited

    def doubt(self, tasks: Collection[str]) -> bool:
        """Forget executions of other engines' shards that have waited for one of `tasks`: each may run again. Return
        whether there are any; then `read` reads them."""
        found, doubted = False, frozenset(tasks)
        for shard in self._foreign.values():
            for dependent in [task for task, ended in shard.items() if not doubted.isdisjoint(ended.depends_on)]:
                del shard[dependent]
                found = True
        return found

    def forget(self, task: str) -> None:
        """Forget an execution that was removed, or may have changed."""
        self.ended.pop(task, None)
        if (shard := self._foreign.get(shard_of(task, self._keys.shards))) is not None:
            shard.pop(task, None)

    async def _of_foreign(self, name: str, awaited: set[str]) -> dict[str, Ended]:
        prefix = self._keys.task_shard(name)
        folders = await self._store.keys(prefix, separator="/")
        ids = {folder[len(prefix) : -1] for folder in folders if folder.endswith("/")}
        before = self._foreign.get(name, {})
        known = self._foreign[name] = {task: ended for task, ended in before.items() if task in ids}
        unknown = ids - known.keys()
        for each in [prefix] if len(unknown) > FEW else [self._keys.task(task) for task in unknown]:
            for stored in stored_in(self._keys, (await self._store.list(each)).entries, unknown):
                if stored.state is not None and stored.is_settled:
                    known[stored.spec.id] = self._ended(stored.spec, stored.state)
                else:
                    awaited.update(stored.spec.depends_on)
        return known

    def _ended(self, spec: TaskSpec, state: TaskState) -> Ended:
        group = Group(spec.project, spec.type, spec.schedule, state.outcome == "success")
        if group.schedule and group.succeeded:
            self.successes[group.schedule] = max(state.ended_at, self.successes.get(group.schedule, 0.0))
        return Ended(state.ended_at, self._groups.setdefault(group, group), spec.depends_on)


class Stored(NamedTuple):
    """An execution's records, with the indexes at which they were read; 0: there is no state. `is_held`: an engine has
    it."""

    spec: TaskSpec
    state: TaskState | None
    spec_index: int
    state_index: int
    is_held: bool

    @property
    def is_settled(self) -> bool:
        """Return whether it has ended, and nobody has anything left to do for it."""
        return self.state is not None and is_settled(self.spec, self.state) and not self.is_held


def stored_in(keys: Keys, entries: Iterable[Entry], wanted: Collection[str]) -> Iterator[Stored]:
    """Yield the wanted executions of which these are entries, without those that can't be read."""
    folders: dict[str, dict[str, Entry]] = {}
    for entry in entries:
        task, _, leaf = entry.key[len(keys.tasks) :].partition("/")[2].partition("/")
        if task in wanted:
            folders.setdefault(task, {})[leaf] = entry
    for task, folder in folders.items():
        spec, state, owner = folder.get("spec"), folder.get("state"), folder.get("owner")
        with contextlib.suppress(BadRecord):
            known = decode(TaskSpec, spec.key, spec.value) if spec else None
            if spec is None or known is None or known.id != task:
                continue
            yield Stored(
                known,
                decode(TaskState, state.key, state.value) if state else None,
                spec.modify_index,
                state.modify_index if state else 0,
                owner is not None and owner.session is not None,
            )
