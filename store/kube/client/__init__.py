"""The real client: credentials, transport, wire."""

from store.kube.client.client import KubeClient
from store.kube.client.transport import Limits

__all__ = ["KubeClient", "Limits"]
