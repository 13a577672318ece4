"""One leader, and writes that only it can send."""

from store.kube.leaderelection.election import Election, LeadershipLost
from store.kube.leaderelection.fenced_api import FencedApi

__all__ = ["Election", "FencedApi", "LeadershipLost"]
