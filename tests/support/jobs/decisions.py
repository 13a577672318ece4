"""Jobs, pods and services as the input of a decision, and a cluster that executes its actions at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, TypeVar

from controllers.jobs.api import (
    Companion,
    CreatePod,
    CreateService,
    Decision,
    DeleteCompanion,
    DeleteGang,
    DeleteJob,
    DeletePod,
    DeleteService,
    Gang,
    JobView,
    ReplicaSpec,
    RestartPolicy,
    RunPolicy,
    SyncCompanion,
    SyncGang,
)
from controllers.jobs.decision import (
    decide,
)
from controllers.jobs.status import (
    ConditionType,
    JobStatus,
)
from store.kube.api.objects import Object, has_ended, labels_of, name_of, uid_of

START = datetime(2024, 5, 1, 12, 0, 0, tzinfo=UTC)
TYPE, INDEX = "example.dev/replica-type", "example.dev/replica-index"
_uids = count(1)
_A = TypeVar("_A")


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def job(policy: RestartPolicy = "Never", /, **fields: Any) -> JobView:
    """Return a job named `train`; upper-case fields are its types with their replicas: `job(Worker=4, PS=2)`."""
    replicas = {name: fields.pop(name) for name in list(fields) if name[0].isupper()}
    specs = {name: ReplicaSpec(template={}, replicas=n, restart_policy=policy) for name, n in replicas.items()}
    return JobView("train", "TrainJob", specs, TYPE, INDEX, **fields)


def pod(
    kind: str,
    index: int | str,
    phase: str = "Running",
    *,
    code: int | None = None,
    restarts: int = 0,
    reason: str = "",
    deleting: datetime | None = None,
    uid: str = "",
) -> Object:
    """Return a pod of the job. `code`: how its container ended. `deleting`: when its grace period ends."""
    obj = _replica("train", kind, index, uid)
    terminated = {"terminated": {"exitCode": code}} if code is not None else {}
    container = {"name": "main", "restartCount": restarts, "state": terminated}
    obj["spec"] = {"containers": [{"name": "main"}]}
    obj["status"] = {"phase": phase, "containerStatuses": [container], **({"reason": reason} if reason else {})}
    if deleting is not None:
        obj["metadata"] |= {"deletionTimestamp": deleting.isoformat(), "deletionGracePeriodSeconds": 30}
    return obj


def service(kind: str, index: int | str, *, uid: str = "") -> Object:
    return _replica("train", kind, index, uid)


def pods(kind: str, indexes: Iterable[int], phase: str = "Running", **fields: Any) -> list[Object]:
    return [pod(kind, index, phase, **fields) for index in indexes]


def services(kind: str, indexes: Iterable[int]) -> list[Object]:
    return [service(kind, index) for index in indexes]


def _replica(job_name: str, kind: str, index: int | str, uid: str) -> Object:
    labels = {TYPE: kind.lower(), INDEX: str(index)}
    name = f"{job_name}-{kind.lower()}-{index}"
    return {"metadata": {"name": name, "uid": uid or f"uid-{next(_uids)}", "labels": labels}}


def actions(decision: Decision, kind: type[_A]) -> list[_A]:
    return [action for action in decision.actions if isinstance(action, kind)]


def tally(decision: Decision) -> dict[str, int]:
    """Return the number of actions of each kind."""
    return dict(Counter(type(action).__name__ for action in decision.actions))


def conditions(status: JobStatus) -> dict[str, str]:
    return {condition.type: condition.status for condition in status.conditions}


def finished(view: JobView, kind: ConditionType = "Succeeded") -> JobView:
    """Return the job with its end stored, written at the start of time."""
    ended = [pod(name, 0, "Succeeded" if kind == "Succeeded" else "Failed", code=1) for name in view.replica_specs]
    decision = decide(replace(view, run_policy=RunPolicy()), ended, [], START)
    assert decision.status.has(kind)
    return replace(view, status=decision.status)


class Cluster:
    """A job with its objects, and a clock. Deletions are immediate unless `graceful`, creations leave a pending pod.

    It refuses what an API server would refuse: a name in use, and a deletion of another UID.
    """

    def __init__(self, view: JobView, *, graceful: bool = False) -> None:
        self.job = view
        self.pods: dict[str, Object] = {}
        self.services: dict[str, Object] = {}
        self.now = START
        self.graceful = graceful

    def add(self, *objects: Object) -> None:
        self.pods |= {name_of(obj): obj for obj in objects}

    def sleep(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def decide(self) -> Decision:
        return decide(self.job, list(self.pods.values()), list(self.services.values()), self.now)

    def sync(self) -> Decision:
        """Decide once, write the status, then take the actions."""
        decision = self.decide()
        self.job = replace(self.job, status=decision.status)
        for action in decision.actions:
            self._take(action)
        return decision

    def settle(self) -> None:
        """Decide until nothing is left to do, without time passing."""
        for _ in range(5):
            before = self.job.status
            decision = self.sync()
            if not decision.actions and decision.status == before:
                return
        raise AssertionError("the decision never settles")

    def run(self, phase: str, **fields: Any) -> None:
        """Move every pod that has not ended to this phase."""
        for name, obj in list(self.pods.items()):
            if not has_ended(obj):
                labels = labels_of(obj)
                self.pods[name] = pod(labels[TYPE], labels[INDEX], phase, uid=uid_of(obj), **fields)

    def _take(self, action: object) -> None:
        match action:
            case CreatePod(kind, index):
                self._create(self.pods, pod(kind, index, "Pending"))
            case CreateService(kind, index):
                self._create(self.services, service(kind, index))
            case DeletePod(name, uid, _, force):
                assert uid_of(self.pods[name]) == uid
                self._delete_pod(name, force)
            case DeleteService(name, uid):
                assert uid_of(self.services.pop(name)) == uid
            case DeleteJob():
                self.job = replace(self.job, deleting=True)
            case SyncGang():
                self.job = replace(self.job, gang=Gang(exists=True, current=True))
            case DeleteGang():
                self.job = replace(self.job, gang=Gang(exists=False, current=False))
            case SyncCompanion():
                self.job = replace(self.job, companion=Companion(wanted=True, exists=True, current=True))
            case DeleteCompanion():
                self.job = replace(self.job, companion=Companion(wanted=True, exists=False, current=False))
            case _:
                raise AssertionError(f"unknown action {action}")

    def _create(self, objects: dict[str, Object], obj: Object) -> None:
        assert name_of(obj) not in objects, f"{name_of(obj)} is taken"
        objects[name_of(obj)] = obj

    def _delete_pod(self, name: str, force: bool) -> None:
        if self.graceful and not force and not has_ended(self.pods[name]):
            grace = (self.now + timedelta(seconds=30)).isoformat()
            obj = self.pods[name]
            metadata = obj["metadata"] | {"deletionTimestamp": grace, "deletionGracePeriodSeconds": 30}
            self.pods[name] = obj | {"metadata": metadata}
        else:
            del self.pods[name]
