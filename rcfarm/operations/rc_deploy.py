"""Entries of RC files that tasks apply: the `Deployer` of the plugin `rc`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from controllers.tasks.api.errors import BadConfig, TaskError
from rcfarm.operations import rc_apply
from rcfarm.operations.errors import BadInput, NoSuchRC, RCError
from rcfarm.operations.rcs import ReplicationControllers
from store.kv.protocol import Op, Store
from store.schema.keys import Keys
from store.schema.records import RCSpec

AT = "config.rc"  # stands for the file's name in errors


class RCDeployer:
    """Applies entries to the RCs of one store."""

    def __init__(self, store: Store, keys: Keys, *, rng: random.Random | None = None) -> None:
        self._store, self._keys, self._rng = store, keys, rng

    def rc_id(self, entry: Mapping[str, Any]) -> str:
        """Return the id of the entry's RC. Raises `BadConfig`."""
        return _document(entry).rc_id

    def changed(self, entry: Mapping[str, Any], spec: RCSpec) -> RCSpec:
        """Return the spec with what the entry asks for. Raises `BadConfig`."""
        with _errors_of_tasks():
            return rc_apply.changed(_document(entry), spec)

    async def apply(self, entry: Mapping[str, Any], *, by: str, fence: Op) -> None:
        """Write the entry in one transaction with `fence`, unless the RC has what it asks for. Raises `BadConfig`, or
        another `TaskError` if the RC can't be changed now."""
        rcs = ReplicationControllers(self._store, self._keys, actor=by, conditions=(fence,), rng=self._rng)
        with _errors_of_tasks():
            await rc_apply.carry_out(rcs, await rc_apply.plan(rcs, _document(entry)))

    async def disable(self, rc_id: str, *, by: str) -> None:
        """Disable the RC, if it exists. Raises `TaskError`."""
        with _errors_of_tasks():
            try:
                await ReplicationControllers(self._store, self._keys, actor=by, rng=self._rng).disable(rc_id)
            except NoSuchRC:
                return


def _document(entry: Mapping[str, Any]) -> rc_apply.RCDocument:
    with _errors_of_tasks():
        [document] = rc_apply.load(AT, msgspec.json.encode(entry))
        return document


@contextmanager
def _errors_of_tasks() -> Iterator[None]:
    """Raise the errors of operations as those that the task engine knows."""
    try:
        yield
    except BadInput as error:
        raise BadConfig(str(error)) from error
    except RCError as error:
        raise TaskError(str(error)) from error
