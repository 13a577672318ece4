"""The real client: credentials, transport, wire.

`KubeClient` and `Limits` are imported at first use: with them comes aiohttp, which takes 0.1 s, and who finds no
credentials needs neither.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from store.kube.client.client import KubeClient
    from store.kube.client.transport import Limits

__all__ = ["KubeClient", "Limits"]

_MODULES = {"KubeClient": "client", "Limits": "transport"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
