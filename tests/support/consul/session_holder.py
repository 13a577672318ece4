"""A process that holds a session and a lock, for tests that stop, continue and kill it.

`python -m tests.support.consul.session_holder CONSUL_URL KEY` locks KEY whenever it holds a session and looks at its
session every 20 ms. It prints a JSON line for each change of what it sees: {"session": the id or null, "gap": seconds
since its previous look}.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import suppress

from store.consul.store import ConsulSettings, ConsulStore
from store.kv import ops
from store.kv.protocol import SessionSpec, StoreError
from store.kv.session import SessionKeeper


async def hold(url: str, key: str) -> None:
    """Run until killed."""
    store = ConsulStore(ConsulSettings.from_env(url))
    keeper = SessionKeeper(store, SessionSpec("holder"))
    async with asyncio.TaskGroup() as group:
        group.create_task(keeper.run())
        group.create_task(_look(keeper))
        group.create_task(_lock(store, keeper, key))


async def _look(keeper: SessionKeeper) -> None:
    shown: str | None = None
    looked = time.monotonic()
    while True:
        now, session = time.monotonic(), keeper.session_id
        if session != shown:
            print(json.dumps({"session": session, "gap": now - looked}), flush=True)
        shown, looked = session, now
        await asyncio.sleep(0.02)


async def _lock(store: ConsulStore, keeper: SessionKeeper, key: str) -> None:
    while True:
        session = await keeper.held()
        with suppress(StoreError):
            await store.txn([ops.lock(key, b"holder", session)])
        await asyncio.sleep(0.1)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(hold(*sys.argv[1:3]))
