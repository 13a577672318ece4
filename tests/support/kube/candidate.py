"""A process that stands for election and writes while it leads, for tests that stop, continue and kill it.

`python -m tests.support.kube.candidate KUBECONFIG NAMESPACE IDENTITY` competes for the Lease `operator` (3 s long,
given up after 2 s). While it leads, a few tasks create ConfigMaps `IDENTITY-…` through the fence, each after a short
pause: if the process was stopped in between, some of them wake before anything else does. It prints `sees NAME` when it
first sees the leader, and `leads` when it leads; it ends when it has lost the lease. At SIGUSR1 it stops as at SIGSTOP,
but at a moment when none of its writes is under way: a write that has passed the fence can't be withdrawn.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from itertools import count

from store.kube.api.errors import Unreachable
from store.kube.api.objects import CONFIG_MAPS
from store.kube.client.client import KubeClient
from store.kube.leaderelection.election import Election, FencedApi, LeadershipLost

LEASE, RENEW, RETRY = 3.0, 2.0, 0.5  # seconds
WRITERS, PAUSE = 5, 0.05  # seconds


async def compete(kubeconfig: str, namespace: str, identity: str) -> None:
    """Run until the lease is lost, or for ever."""
    loop = asyncio.get_running_loop()
    async with await KubeClient.connect(kubeconfig) as api:
        election = Election(
            api, namespace, "operator", identity, lease_duration=LEASE, renew_deadline=RENEW, retry_period=RETRY
        )
        fenced = FencedApi(api, election)

        on_their_way: set[str] = set()
        stopping = False

        async def write(writer: int) -> None:
            for number in count():
                await asyncio.sleep(PAUSE)
                if not stopping:
                    await create(f"{identity}-{writer}-{number}")

        async def create(name: str) -> None:
            on_their_way.add(name)
            with suppress(Unreachable, LeadershipLost):
                await fenced.create(CONFIG_MAPS, {"metadata": {"name": name}}, namespace)
            on_their_way.remove(name)

        def stop() -> None:
            nonlocal stopping
            stopping = bool(on_their_way)
            if stopping:
                loop.call_later(PAUSE / 10, stop)
            else:
                os.kill(os.getpid(), signal.SIGSTOP)

        async def lead() -> None:
            print("leads", flush=True)
            await asyncio.gather(*map(write, range(WRITERS)))

        async def look() -> None:
            while not election.leader:
                await asyncio.sleep(0.02)
            print(f"sees {election.leader}", flush=True)

        loop.add_signal_handler(signal.SIGUSR1, stop)
        looking = asyncio.create_task(look())
        with suppress(LeadershipLost):
            await election.run(lead)
        await looking


if __name__ == "__main__":
    asyncio.run(compete(*sys.argv[1:4]))
