"""Cached results of whole executions: the catalog, as the engine asks it before and after an attempt."""

from __future__ import annotations

from controllers.tasks.api.data import Literals, OutputError
from controllers.tasks.api.errors import TaskError
from controllers.tasks.api.phase import CacheStatus
from controllers.tasks.io.catalog import Catalog, key_of
from controllers.tasks.io.data import DataStore
from controllers.tasks.io.files import FileOutputReader, InputFile, MemoryOutputReader, OutputFiles
from controllers.tasks.outcomes import CacheAnswered
from store.schema.tasks import TaskSpec


class ResultCache:
    """Looks results up, reserves the computation of missing ones, and stores them. Raises what the catalog raises.

    `owner`: the attempt that reserves. `heartbeat`: seconds within which `extend` is called for a reservation.
    """

    def __init__(self, catalog: Catalog, data: DataStore) -> None:
        self.catalog, self.heartbeat = catalog, catalog.heartbeat
        self._data = data

    async def look_up(self, spec: TaskSpec, outputs: OutputFiles, *, reserve: bool, owner: str) -> CacheAnswered:
        """Copy a cached result to the attempt's outputs. `reserve`: on a miss, get or extend the reservation."""
        key = key_of(spec, await self._inputs(spec))
        answer = await self.catalog.look_up(key)
        if answer.status is CacheStatus.HIT and answer.outputs is not None:
            await outputs.put(MemoryOutputReader(answer.outputs))
            copied = await outputs.collect()
            return CacheAnswered("LOOKUP_FAILURE" if isinstance(copied, OutputError) else "HIT")
        if answer.status is CacheStatus.LOOKUP_FAILURE:
            return CacheAnswered("LOOKUP_FAILURE")
        if reserve:
            reservation = await self.catalog.reserve(key, owner)
            if not reservation.held:
                return CacheAnswered("MISS", held_by=reservation.owner)
        return CacheAnswered("MISS")

    async def put(self, spec: TaskSpec, outputs: OutputFiles, *, owner: str) -> None:
        """Store the attempt's result, and end its reservation. Raises `TaskError` if that failed."""
        reader = FileOutputReader(self._data, outputs)
        found = await reader.read() if await reader.exists() else {}
        if isinstance(found, OutputError):
            raise TaskError(f"the outputs can't be read for the cache: {found.error}")
        metadata = {"execution": spec.id, "attempt": owner}
        answer = await self.catalog.put(key_of(spec, await self._inputs(spec)), found, owner=owner, metadata=metadata)
        if answer.status is not CacheStatus.POPULATED:
            raise TaskError(f"the result was not cached: {answer.reason}")

    async def extend(self, spec: TaskSpec, *, owner: str) -> None:
        """Extend a reservation."""
        await self.catalog.reserve(key_of(spec, await self._inputs(spec)), owner)

    async def release(self, spec: TaskSpec, *, owner: str) -> None:
        """Release the reservation of `owner`."""
        await self.catalog.release(key_of(spec, await self._inputs(spec)), owner)

    async def _inputs(self, spec: TaskSpec) -> Literals:
        return await InputFile(self._data, spec.id, spec.inputs).get()
