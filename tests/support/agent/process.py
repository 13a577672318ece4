"""A node agent as a process of its own, to be killed.

`python -m tests.support.agent.process URL STATE_DIR NODE [LEASE]`: LEASE in seconds, by default the usual one.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from rcfarm.agent.agent import Agent
from store.open import open_store
from store.schema.keys import Keys
from tests.support.agent.agents import fast_settings


async def main(url: str, state_dir: str, node: str, *lease: str) -> None:
    store = open_store(url)
    session = dict.fromkeys(("session_ttl", "session_check_ttl"), float(lease[0])) if lease else {}
    try:
        await Agent(store, Keys(), fast_settings(node, Path(state_dir), **session)).run()
    finally:
        await store.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
