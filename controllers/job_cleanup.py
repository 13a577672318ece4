"""What goes away when a job stops: at its end, while it is suspended, and when a pod's node never answers again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta

from controllers.job_end import broke_a_limit
from controllers.job_pods import deletion_time, has_ended, is_forced
from controllers.job_replicas import deletions, place_of, places_of, service_deletions
from controllers.job_status import JobStatus
from controllers.job_types import Action, CleanPodPolicy, DeleteGang, DeletePod, JobView
from store.kube.objects import Object, is_deleting, name_of, uid_of


def after_the_end(
    job: JobView, status: JobStatus, pods: Sequence[Object], services: Sequence[Object]
) -> Iterator[Action]:
    """What the clean-up policy removes of a finished job. A service goes with its pod, and when there is none."""
    yield from _delete_gang(job)
    policy = job.run_policy.clean_pod_policy
    if policy == "None" and broke_a_limit(status):
        policy = "Running"
    if policy == "None":
        return
    yield from deletions((pod for pod in pods if not _stays(pod, policy)), "clean-up")
    places = places_of(job, (pod for pod in pods if _stays(pod, policy)))
    yield from service_deletions((entry for entry in services if place_of(job, entry) not in places), "clean-up")


def while_suspended(job: JobView, pods: Iterable[Object], services: Iterable[Object]) -> Iterator[Action]:
    """Everything goes, whatever the clean-up policy says: the job starts over when it is resumed."""
    yield from _delete_gang(job)
    yield from deletions(pods, "suspended")
    yield from service_deletions(services, "suspended")


def lost_pods(job: JobView, pods: Iterable[Object], now: datetime) -> Iterator[DeletePod]:
    """Pods to remove by force: nobody has confirmed that they stopped, for as long as the job allows."""
    for pod, due in _forced(job, pods):
        if now >= due:
            yield DeletePod(name_of(pod), uid_of(pod), "node lost", force=True)


def next_lost(job: JobView, pods: Iterable[Object], now: datetime) -> datetime | None:
    """When the next pod will have to be removed by force."""
    return min((due for _, due in _forced(job, pods) if due > now), default=None)


def _forced(job: JobView, pods: Iterable[Object]) -> Iterator[tuple[Object, datetime]]:
    if job.force_delete_after is None:
        return
    for pod in pods:
        gone_by = deletion_time(pod)
        if gone_by is not None and not is_forced(pod):
            yield pod, gone_by + timedelta(seconds=job.force_delete_after)


def _stays(pod: Object, policy: CleanPodPolicy) -> bool:
    return policy == "Running" and has_ended(pod) and not is_deleting(pod)


def _delete_gang(job: JobView) -> Iterator[DeleteGang]:
    if job.gang is not None and job.gang.exists:
        yield DeleteGang()
