"""Training jobs that are created, run, end and are deleted under load, and a witness of all that happened to them.

At every moment of a namespace's history
- a replica of a job has one pod at most,
- a job that has ended stays as it ended, and gets no more pods,
- counted failures only grow.

In the end each job ended as planned, and each failed pod was counted exactly once.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from controllers.jobs.status import JobStatus, decode_status
from controllers.training.kinds import KINDS
from store.kube.api.objects import Object, controller_of, labels_of, name_of, uid_of
from tests.support.kube.control_plane import ControlPlane
from tests.support.kube.etcd_history import changes, current_revision
from tests.support.training.real import TrainingCluster, example, played_as

_PATHS = {f"{kind.resource.group}/{kind.resource.plural}" for kind in KINDS}
_LABEL = "training.kubeflow.org/replica-"
FAILS = (3, 137)  # codes with which pods fail by plan


class Planned(NamedTuple):
    body: Object
    end: str


def planned(name: str, rng: random.Random) -> Planned:
    """Return a job whose pods succeed, after a restart in place or without one, or fail for good or beyond a limit."""
    job = example(rng.choice(("pytorch", "tensorflow")))
    job["metadata"]["name"] = name
    (specs,) = (value for field, value in job["spec"].items() if field.endswith("ReplicaSpecs"))
    what = rng.choice(("succeeds", "succeeds", "restarts in place", "fails for good", "fails too often"))
    chief = next(iter(specs))
    worker = {"succeeds": 0, "restarts in place": "1,0", "fails for good": 3, "fails too often": 137}[what]
    for spec in specs.values():
        spec["restartPolicy"] = "OnFailure" if what == "restarts in place" else "ExitCode"
    specs["Worker"]["replicas"] = rng.randrange(1, 4) if what in ("succeeds", "restarts in place") else 1
    job["spec"]["runPolicy"]["backoffLimit"] = 1 if what == "fails too often" else None  # restarts in place count
    ends = "Failed" if what.startswith("fails") else "Succeeded"
    seconds = "inf" if ends == "Failed" else f"{rng.uniform(0.5, 2):.2f}"
    plays: dict[str, dict[str, object]] = {name: {"run_seconds": "inf"} for name in specs}
    plays[chief] = {"run_seconds": seconds, "exit_code": 0}
    plays["Worker"] = {"run_seconds": f"{rng.uniform(0.1, 1):.2f}", "exit_code": worker}
    return Planned(played_as(job, **plays), ends)


class Load:
    """Keeps `slots` jobs going. `ended` counts those that ended as planned; others fail `run`."""

    def __init__(self, cluster: TrainingCluster, rng: random.Random, *, slots: int = 4) -> None:
        self.ended = 0
        self._cluster, self._rng, self._slots = cluster, rng, slots
        self._is_last = asyncio.Event()

    async def run(self) -> None:
        """Run until `finish` was called and the last jobs have ended."""
        async with asyncio.TaskGroup() as group:
            for slot in range(self._slots):
                group.create_task(self._repeat(f"j{slot}"))

    def finish(self) -> None:
        """Start no more jobs."""
        self._is_last.set()

    async def _repeat(self, name: str) -> None:
        while not self._is_last.is_set():
            plan = planned(name, self._rng)
            job = await self._cluster.create(plan.body)
            status = await self._cluster.until_finished(job)
            assert status.has("Succeeded") == (plan.end == "Succeeded"), f"{name}, {plan.end}: {status}"
            self.ended += 1
            if not self._is_last.is_set() and self._rng.random() < 0.5:
                await self._cluster.delete(job)
            else:
                name += "x"


@dataclass
class Seen:
    """The recorded history. `failed`: by job (UID), type and index, the pods (UIDs) that failed by plan. `status`: the
    last one of each job, and `names`, by UID."""

    pods: dict[str, Object] = field(default_factory=dict)
    failed: defaultdict[tuple[str, str, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    status: dict[str, JobStatus] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)


class Witness:
    """Records a namespace, from now on until `check` is called."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self._etcd, self._namespace = plane.etcd_url, namespace
        self._since = current_revision(plane.etcd_url)
        self._alive: dict[str, Object] = {}  # by name
        self.seen = Seen()

    def check(self) -> Seen:
        """Fail at the first moment that breaks an invariant. Return the recorded history."""
        for change in changes(self._etcd, self._since):
            kind, _, name = change.path.partition(f"/{self._namespace}/")
            if kind == "pods":
                self._see_pod(name, change.obj)
            elif kind in _PATHS and change.obj is not None:
                self._see_job(change.obj)
        for uid, status in self.seen.status.items():
            if status.finished:
                self._check_counts(uid, status)
        return self.seen

    def _see_pod(self, name: str, pod: Object | None) -> None:
        if pod is None:
            self._alive.pop(name, None)
            return
        owner, labels = controller_of(pod), labels_of(pod)
        assert owner is not None
        if uid_of(pod) not in self.seen.pods:
            status = self.seen.status.get(owner["uid"])
            assert status is None or not status.finished, f"{name} was created after the end of its job"
        self.seen.pods[uid_of(pod)] = pod
        self._alive[name] = pod
        of_job = [each for each in self._alive.values() if (controller_of(each) or {}).get("uid") == owner["uid"]]
        places = Counter((labels_of(each)[f"{_LABEL}type"], labels_of(each)[f"{_LABEL}index"]) for each in of_job)
        assert max(places.values()) == 1, f"two pods of one replica: {sorted(map(name_of, of_job))}"
        if _code(pod) in FAILS:
            place = (owner["uid"], labels[f"{_LABEL}type"], labels[f"{_LABEL}index"])
            self.seen.failed[place].add(uid_of(pod))

    def _see_job(self, job: Object) -> None:
        status = decode_status(job.get("status"))
        before = self.seen.status.get(uid_of(job), JobStatus())
        assert not (status.has("Succeeded") and status.has("Failed")), f"{name_of(job)} both succeeded and failed"
        for end in ("Succeeded", "Failed"):
            assert status.has(end) or not before.has(end), f"{name_of(job)} went on after it had {end}"
        counted, known = _failures(status), _failures(before)
        assert all(counted[place] >= count for place, count in known.items()), f"{name_of(job)}: {known} -> {counted}"
        self.seen.status[uid_of(job)], self.seen.names[uid_of(job)] = status, name_of(job)

    def _check_counts(self, uid: str, status: JobStatus) -> None:
        """Compare the record of an ended job with its failed pods. A pod that fails after the end is not counted."""
        for (replica_type, index), count in _failures(status).items():
            failed = len(self.seen.failed[uid, replica_type.lower(), index])
            assert count == failed, f"{self.seen.names[uid]}: {count} failures of {replica_type} {index}, {failed} pods"


def _failures(status: JobStatus) -> Counter[tuple[str, str]]:
    return Counter(
        {
            (replica_type, index): retry.failures
            for replica_type, each in status.replica_statuses.items()
            for index, retry in each.retries.items()
        }
    )


def _code(pod: Object) -> int | None:
    """Return the exit code of a pod that failed; None for any other."""
    status = pod.get("status") or {}
    ended = (each.get("state", {}).get("terminated") for each in status.get("containerStatuses") or ())
    return next((each["exitCode"] for each in ended if each), None) if status.get("phase") == "Failed" else None
