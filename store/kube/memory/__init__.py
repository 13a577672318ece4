"""The shipped fake API server."""

from store.kube.memory.kube import MemoryKube

__all__ = ["MemoryKube"]
