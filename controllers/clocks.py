"""The clock of waits: it never jumps, and under a virtual loop it is virtual, too."""

from __future__ import annotations

import asyncio


def loop_time() -> float:
    """Monotonic seconds of the running event loop."""
    return asyncio.get_running_loop().time()
