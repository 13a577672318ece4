"""Hollow nodes as a separate process, for benchmarks: python -m benchmarks.hollow_nodes KUBECONFIG COUNT"""

from __future__ import annotations

import asyncio
import sys

from store.kube.client.client import KubeClient
from tests.support.kube.hollow.kubelet import HollowKubelet


async def main(kubeconfig: str, count: int) -> None:
    """Play nodes until killed; says "ready" once they are registered."""
    async with await KubeClient.connect(kubeconfig) as api:
        kubelet = HollowKubelet(api)
        await kubelet.add_nodes(count)
        print("ready", flush=True)
        await kubelet.run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
