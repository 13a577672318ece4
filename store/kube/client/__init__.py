"""The real client: credentials, transport, wire.

`KubeClient` and `Limits` are imported at first use: with them comes aiohttp, which takes 0.1 s, and who finds no
credentials needs neither.
"""

from typing import TYPE_CHECKING

from store.imports import at_first_use

if TYPE_CHECKING:
    from store.kube.client.client import KubeClient
    from store.kube.client.transport import Limits

__all__ = ["KubeClient", "Limits"]

__getattr__ = at_first_use(__name__, {"KubeClient": "client", "Limits": "transport"})
