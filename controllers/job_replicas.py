"""A job's pods and services, each at the place that its labels name: what is missing, what is too much."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from controllers.job_pods import best_of
from controllers.job_status import Retry
from controllers.job_types import (
    Action,
    CreateService,
    DeletePod,
    DeleteReason,
    DeleteService,
    JobView,
    ReplicaSpec,
)
from controllers.slices import replica_index
from store.kube.objects import Object, is_deleting, labels_of, name_of, uid_of

_Places = dict[tuple[str, int], list[Object]]  # (type in lower case, index) -> what is there


@dataclass(frozen=True, slots=True)
class Slot:
    """One replica that the spec wants. `pod`: the one to keep. `duplicates`: other pods that claim to be it.
    `retry`: what it has been through so far."""

    type: str
    index: int
    spec: ReplicaSpec
    retry: Retry
    pod: Object | None
    duplicates: tuple[Object, ...] = ()


def slots_of(job: JobView, pods: Iterable[Object]) -> list[Slot]:
    """The job's replicas, by type as the spec orders them, then by index."""
    places = _by_place(job, pods)
    return [
        _slot(job, replica_type, index, places.get((replica_type.lower(), index), []))
        for replica_type, spec in job.replica_specs.items()
        for index in range(spec.replicas)
    ]


def surplus(job: JobView, objects: Iterable[Object]) -> list[Object]:
    """Those at or above the number of replicas. Objects of types that the spec does not have are not judged."""
    wanted = {replica_type.lower(): spec.replicas for replica_type, spec in job.replica_specs.items()}
    return [
        obj
        for (replica_type, index), found in _by_place(job, objects).items()
        if index >= wanted.get(replica_type, index + 1)
        for obj in found
    ]


def deletions(pods: Iterable[Object], reason: DeleteReason) -> Iterator[DeletePod]:
    """A deletion for each pod that is not on its way out already."""
    return (DeletePod(name_of(pod), uid_of(pod), reason) for pod in pods if not is_deleting(pod))


def service_deletions(services: Iterable[Object], reason: DeleteReason) -> Iterator[DeleteService]:
    """A deletion for each service that is not on its way out already."""
    return (DeleteService(name_of(entry), uid_of(entry), reason) for entry in services if not is_deleting(entry))


def service_actions(job: JobView, services: Sequence[Object]) -> Iterator[Action]:
    """One service for each replica of the types that have them, whatever its pod does."""
    yield from service_deletions(surplus(job, services), "surplus")
    places = _by_place(job, services)
    for replica_type, spec in job.replica_specs.items():
        if not job.has_services(replica_type):
            continue
        for index in range(spec.replicas):
            found = places.get((replica_type.lower(), index), [])
            if found:
                yield from service_deletions(_duplicates(found), "duplicate")
            else:
                yield CreateService(replica_type, index)


def places_of(job: JobView, objects: Iterable[Object]) -> frozenset[tuple[str, int]]:
    """The places (type in lower case, index) that the objects take."""
    return frozenset(_by_place(job, objects))


def place_of(job: JobView, obj: Object) -> tuple[str, int] | None:
    """(type in lower case, index) as the labels say; None when they do not."""
    replica_type, index = labels_of(obj).get(job.type_label), replica_index(obj, job.index_label)
    return None if not replica_type or index is None else (replica_type, index)


def _slot(job: JobView, replica_type: str, index: int, found: Sequence[Object]) -> Slot:
    status = job.status.replica_statuses.get(replica_type)
    retry = status.retries.get(str(index)) if status is not None else None
    pod = best_of(found) if found else None
    return Slot(replica_type, index, job.replica_specs[replica_type], retry or Retry(), pod, _duplicates(found))


def _duplicates(found: Sequence[Object]) -> tuple[Object, ...]:
    if len(found) < 2:
        return ()
    keep = best_of(found)
    return tuple(obj for obj in found if obj is not keep)


def _by_place(job: JobView, objects: Iterable[Object]) -> _Places:
    places: _Places = {}
    for obj in objects:
        place = place_of(job, obj)
        if place is not None:
            places.setdefault(place, []).append(obj)
    return places
