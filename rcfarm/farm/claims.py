"""Claim and release the ownership of RCs, many at a time.

Ownership is a lock: the `owner` key carries the farm's session. Up to 63 RCs of a shard are claimed in one transaction,
together with the check that this farm is still a member. The store refuses a transaction as a whole, so the RCs that
conflict are dropped and the others are sent again. A dropped RC was claimed by another farm, has only just been
released, or is gone; the view shows which.

A lock creates its key. So a farm with a stale view could own a deleted RC, and add pods for it. Therefore the lock of
an RC that never had an owner comes with a read of its spec, which fails if the spec is gone. For an RC that had an
owner, the fencing token must rise; if it does not, the key is new, and the shard is read before anything is done.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType

from rcfarm.farm.shard import RC, Shard
from store.kv import ops
from store.kv.protocol import MAX_TXN_OPS, Op, OwnershipLost, Store, TxnConflict
from store.schema.keys import Keys
from store.schema.records import Owner, encode, utc_now
from store.schema.selectors import Selector


class Claims:
    """Claims and releases for one farm. `claimed`, `conflicts` count since the start."""

    def __init__(self, store: Store, keys: Keys, farm: str, selector: Selector) -> None:
        self.claimed = self.conflicts = 0
        self._store, self._keys, self._farm, self._selector = store, keys, farm, selector
        self._everything = selector == Selector.everything()

    def wants(self, rc: RC) -> bool:
        """Return whether the RC is free and this farm's selector matches it.

        An RC with an undecodable spec has no labels that a selector could match: a farm without a selector claims it,
        and reports the error in its status. A husk (the claim of a farm that then died came after the deletion) is
        claimed, for removal, by any farm that finds it.
        """
        if rc.session is not None:
            return False
        if rc.bad_spec is not None:
            return self._everything
        return rc.is_husk if rc.spec is None else self._selector.matches(rc.spec.value.rc_labels)

    async def claim(self, shard: Shard, rcs: Sequence[RC], member_key: str, session: str) -> int:
        """Claim these RCs of one shard. Return how many were refused; the view shows which are ours now.

        Raises `OwnershipLost` when this farm is not a member under `session` any more, and the store's errors.
        """
        value = encode(Owner(self._farm, utc_now()))
        wanted = [[*self._presence(rc), ops.lock(self._keys.owner(rc.id), value, session)] for rc in rcs]
        tokens = {self._keys.owner(rc.id): rc.owner.lock_index for rc in rcs if rc.owner}
        refused = 0
        for batch in _batches(wanted, MAX_TXN_OPS - 1):
            refused += await self._apply(shard, batch, [ops.check_session(member_key, session)], tokens)
        self.claimed += len(rcs) - refused
        self.conflicts += refused
        return refused

    async def release(self, shard: Shard, rcs: Sequence[RC], session: str) -> None:
        """Release these RCs, except those that are not ours any more. Raises the store's errors."""
        giving = []
        for rc in rcs:
            owner = rc.owner
            value = encode(owner.value) if owner else b"{}"
            giving.append([ops.unlock(self._keys.owner(rc.id), value, session)])
        for batch in _batches(giving, MAX_TXN_OPS):
            await self._apply(shard, batch, [])

    def _presence(self, rc: RC) -> list[Op]:
        """Return the check that the RC exists; nothing for a husk, or where the token shows it."""
        had_owner = rc.owner is not None and rc.owner.lock_index > 0
        return [ops.get(self._keys.spec(rc.id))] if (rc.spec or rc.bad_spec) and not had_owner else []

    async def _apply(
        self, shard: Shard, wanted: list[list[Op]], fence: list[Op], tokens: Mapping[str, int] = MappingProxyType({})
    ) -> int:
        """Apply the operations, each RC's together, without the RCs that conflict. Return how many were dropped.

        `tokens`: the fencing tokens of the locks to take, as the view shows them.
        """
        refused = 0
        while wanted:
            writing = [*fence, *chain.from_iterable(wanted)]
            try:
                result = await self._store.txn(writing)
                if any(0 < entry.lock_index <= tokens.get(entry.key, 0) for entry in result.entries):
                    await shard.view.refresh()
                shard.view.apply(result, writing)
            except OwnershipLost:
                raise
            except TxnConflict as conflict:
                kept = _without(wanted, {failure.op_index - len(fence) for failure in conflict.failures})
                refused += len(wanted) - len(kept)
                wanted = kept
                continue
            break
        return refused


def _without(units: Sequence[list[Op]], failed: Collection[int]) -> list[list[Op]]:
    """Return the units without those that have a failed operation. `failed` counts operations over all units."""
    kept, start = [], 0
    for unit in units:
        if not any(start + number in failed for number in range(len(unit))):
            kept.append(unit)
        start += len(unit)
    return kept


def _batches(units: Iterable[list[Op]], size: int) -> Iterator[list[list[Op]]]:
    """Pack units, in order, into batches of at most `size` operations."""
    batch: list[list[Op]] = []
    for unit in units:
        if sum(map(len, batch)) + len(unit) > size:
            yield batch
            batch = []
        batch.append(unit)
    if batch:
        yield batch
