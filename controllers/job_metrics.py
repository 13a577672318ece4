"""What a job controller reports as it happens; whoever starts it gives the figures their names and a place."""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias

ChildVerb: TypeAlias = Literal["create", "delete"]
JobOutcome: TypeAlias = Literal["created", "restarted", "successful", "failed", "deleted"]
ReconcileResult: TypeAlias = Literal["ok", "waiting", "retry", "error"]


class JobMetrics(Protocol):
    """Durations in seconds. `job_kind`: the kind of the custom resource."""

    def child(self, job_kind: str, verb: ChildVerb, kind: str, namespace: str, *, ok: bool) -> None:
        """A pod, service, PodGroup or PodDisruptionBudget (`kind`) was created or deleted, or could not be."""

    def pod_failed(self, job_kind: str, namespace: str) -> None:
        """A pod of a job was seen to have failed: once for each pod."""

    def job(self, job_kind: str, outcome: JobOutcome, namespace: str) -> None:
        """A job became this."""

    def reconciled(self, job_kind: str, result: ReconcileResult, seconds: float) -> None:
        """One run of a job's key. `waiting`: for what it asked for earlier. `retry`: the API refused or was away."""

    def acted(self, job_kind: str, lag: float) -> None:
        """From the first event that woke a job until the first request that it led to."""


class NoJobMetrics:
    """Measures nothing."""

    def child(self, job_kind: str, verb: ChildVerb, kind: str, namespace: str, *, ok: bool) -> None:
        pass

    def pod_failed(self, job_kind: str, namespace: str) -> None:
        pass

    def job(self, job_kind: str, outcome: JobOutcome, namespace: str) -> None:
        pass

    def reconciled(self, job_kind: str, result: ReconcileResult, seconds: float) -> None:
        pass

    def acted(self, job_kind: str, lag: float) -> None:
        pass
