"""One leader, and writes that only it can send."""

from store.kube.leaderelection.election import Election, FencedApi, LeadershipLost

__all__ = ["Election", "FencedApi", "LeadershipLost"]
