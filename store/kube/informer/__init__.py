"""List and watch into a cache, and handlers."""

from store.kube.informer.informer import Informer

__all__ = ["Informer"]
