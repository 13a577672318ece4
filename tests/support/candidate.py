"""A process that stands for election and writes while it leads, for tests that stop, continue and kill it.

`python -m tests.support.candidate KUBECONFIG NAMESPACE IDENTITY` competes for the Lease `operator` (3 s long, given up
after 2 s). While it leads, a few tasks create ConfigMaps `IDENTITY-…` through the fence, each after a short pause: was
the process stopped meanwhile, some of them wake before anything else does. It prints `sees NAME` when it first sees who
leads, and `leads` when it does; it ends when it has lost the lease.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from itertools import count

from store.kube.client import KubeClient
from store.kube.errors import Unreachable
from store.kube.fence import FencedApi
from store.kube.lease import Election, LeadershipLost
from store.kube.resources import CONFIG_MAPS

LEASE, RENEW, RETRY = 3.0, 2.0, 0.5  # seconds
WRITERS, PAUSE = 5, 0.05  # seconds


async def compete(kubeconfig: str, namespace: str, identity: str) -> None:
    """Run until the lease is lost, or for ever."""
    async with await KubeClient.connect(kubeconfig) as api:
        election = Election(
            api, namespace, "operator", identity, lease_duration=LEASE, renew_deadline=RENEW, retry_period=RETRY
        )
        fenced = FencedApi(api, election)

        async def write(writer: int) -> None:
            for number in count():
                await asyncio.sleep(PAUSE)
                body = {"metadata": {"name": f"{identity}-{writer}-{number}"}}
                with suppress(Unreachable, LeadershipLost):
                    await fenced.create(CONFIG_MAPS, body, namespace)

        async def lead() -> None:
            print("leads", flush=True)
            await asyncio.gather(*map(write, range(WRITERS)))

        async def look() -> None:
            while not election.leader:
                await asyncio.sleep(0.02)
            print(f"sees {election.leader}", flush=True)

        looking = asyncio.create_task(look())
        with suppress(LeadershipLost):
            await election.run(lead)
        await looking


if __name__ == "__main__":
    asyncio.run(compete(*sys.argv[1:4]))
