"""Informer handlers: which jobs an event wakes, and which expectations it removes; and kubeflow's functions."""

from __future__ import annotations

from typing import Any

import pytest

from controllers.jobs.controller import Expectations, Expected, JobController, JobInformers
from store.kube.api.objects import Object, key_of, name_of, owner_reference, uid_of
from store.kube.informer.informer import DeletedFinalStateUnknown
from tests.support.jobs.train_jobs import INDEX, TYPE, Tally, TrainJobs, job_labels, memory_kube, train_job


class Cached(TrainJobs):
    """An operator whose cache has two jobs."""

    def get_job_from_informer_cache(self, namespace: str, name: str) -> Object | None:
        return {"default/train": with_uid("train"), "default/other": with_uid("other")}.get(f"{namespace}/{name}")


def with_uid(name: str, uid: str = "") -> Object:
    job = train_job(name)
    job["metadata"]["uid"] = uid or f"uid-{name}"
    return job


def child(
    name: str = "train-worker-0",
    *,
    owner: Object | None = None,
    labels: dict[str, str] | None = None,
    version: int = 1,
    uid: str = "uid-pod",
    deleting: bool = False,
    phase: str = "Running",
) -> Object:
    """Return a pod or service; without `owner`, an orphan."""
    metadata: Object = {"name": name, "namespace": "default", "uid": uid, "resourceVersion": str(version)}
    metadata["labels"] = job_labels(type="worker", index="0") if labels is None else labels
    if owner is not None:
        metadata["ownerReferences"] = [owner_reference(owner, api_version="example.dev/v1", kind="TrainJob")]
    if deleting:
        metadata["deletionTimestamp"] = "2024-05-01T12:00:00Z"
    return {"metadata": metadata, "status": {"phase": phase}}


class Watched:
    """A controller that only receives events."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.jobs: JobController = Cached(memory_kube(), metrics=self.tally).jobs

    async def queued(self) -> list[str]:
        """Take and return the keys that need work."""
        queue = self.jobs.work_queue
        keys = [await queue.get() for _ in range(len(queue))]
        for key in keys:
            queue.done(key)
        return keys

    def expect(self, *names: str, deletions: tuple[str, ...] = (), kind: str = "pods") -> None:
        key = f"uid-train/worker/{kind}"
        self.jobs.expectations.expect(Expected(key, "create", name) for name in names)
        self.jobs.expectations.expect(Expected(key, "delete", uid) for uid in deletions)

    @property
    def outstanding(self) -> list[str]:
        return [f"{entry.verb} {entry.what}" for entry in self.jobs.expectations.outstanding("uid-train")]


TRAIN_JOB, OTHER_JOB = with_uid("train"), with_uid("other")
verbs = pytest.mark.parametrize("kind", ["pod", "service"])


def call(watched: Watched, verb: str, kind: str, *objects: Any) -> None:
    """Call `add_pod`, `update_service` and so on."""
    getattr(watched.jobs, f"{verb}_{kind}")(*objects)


@verbs
@pytest.mark.parametrize(("deleting", "version"), [(False, "v1"), (True, "v1"), (False, "v1alpha1")])
async def test_a_new_child_wakes_its_job_and_is_expected_no_more(kind: str, deleting: bool, version: str) -> None:
    """With a deletionTimestamp it counts as a deletion; the creation is still expected. A reference keeps the version
    in which it was written: any version of our group is ours.
    """
    watched = Watched()
    watched.expect("train-worker-0", deletions=("uid-pod",), kind=f"{kind}s")
    pod = child(owner=TRAIN_JOB, deleting=deleting)
    pod["metadata"]["ownerReferences"][0]["apiVersion"] = f"example.dev/{version}"

    call(watched, "add", kind, pod)

    assert await watched.queued() == ["default/train"]
    assert watched.outstanding == (["create train-worker-0"] if deleting else ["delete uid-pod"])


@verbs
async def test_an_unchanged_version_changes_nothing(kind: str) -> None:
    """A resync shows the same state again: there is no work, and a deletion asked for since has not been seen."""
    watched = Watched()
    pod = child(owner=TRAIN_JOB, deleting=True)
    watched.expect(deletions=("uid-pod",), kind=f"{kind}s")

    call(watched, "update", kind, pod, pod)

    assert await watched.queued() == []
    assert watched.outstanding == ["delete uid-pod"]


@verbs
@pytest.mark.parametrize(
    ("former", "present", "woken"),
    [
        pytest.param({"owner": TRAIN_JOB}, {"owner": OTHER_JOB}, ["train", "other"], id="a change of hands"),
        pytest.param({"labels": {"a": "b"}}, {}, ["train"], id="an orphan gains our labels"),
        pytest.param({"labels": job_labels("other")}, {}, ["other", "train"], id="an orphan is relabelled"),
        pytest.param({"owner": OTHER_JOB}, {}, ["other", "train"], id="a released child keeps its labels"),
        pytest.param({}, {"phase": "Failed"}, [], id="the status of an orphan is irrelevant"),
    ],
)
async def test_an_update_wakes_former_and_present_owners_and_adopters(
    kind: str, former: dict[str, Any], present: dict[str, Any], woken: list[str]
) -> None:
    """The owner counts, and for an orphan the job that its labels name; as in kubeflow, before and after the change."""
    watched = Watched()

    call(watched, "update", kind, child(**former), child(version=2, **present))

    assert await watched.queued() == [f"default/{name}" for name in woken]


@verbs
async def test_a_new_orphan_wakes_the_job_that_its_labels_name(kind: str) -> None:
    """An orphan without a job, or one being deleted, queues no job."""
    watched = Watched()

    call(watched, "add", kind, child())
    call(watched, "add", kind, child(labels=job_labels("absent")))
    call(watched, "add", kind, child(labels=job_labels("other"), deleting=True))
    call(watched, "add", kind, child(labels={}))

    assert await watched.queued() == ["default/train"]


@verbs
async def test_a_tombstone_counts_as_a_deletion(kind: str) -> None:
    """Only the absence was seen, not the end: the deletion is observed, the job queued."""
    watched = Watched()
    watched.expect("train-worker-0", deletions=("uid-pod",), kind=f"{kind}s")
    pod = child(owner=TRAIN_JOB)

    call(watched, "delete", kind, DeletedFinalStateUnknown(key_of(pod), pod))

    assert watched.outstanding == []
    assert await watched.queued() == ["default/train"]


@verbs
async def test_a_deletion_is_observed_when_it_begins(kind: str) -> None:
    """The deletionTimestamp is enough."""
    watched = Watched()
    watched.expect(deletions=("uid-pod", "uid-2"), kind=f"{kind}s")

    call(watched, "update", kind, child(owner=TRAIN_JOB), child(owner=TRAIN_JOB, version=2, deleting=True))

    assert watched.outstanding == ["delete uid-2"]


@verbs
@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"uid": "uid-former"}, id="37: another UID"),
        pytest.param({"kind": "OtherJob"}, id="another kind"),
        pytest.param({"apiVersion": "other.dev/v1"}, id="another group"),
        pytest.param({"apiVersion": "v1"}, id="the core group"),
        pytest.param({"name": "unknown"}, id="an unknown job"),
    ],
)
async def test_a_reference_to_another_owner_wakes_no_job(kind: str, change: dict[str, str]) -> None:
    """Only the job that the reference names by UID is queued; labels do not matter."""
    watched = Watched()
    watched.expect("train-worker-0", kind=f"{kind}s")
    pod = child(owner=TRAIN_JOB)
    pod["metadata"]["ownerReferences"][0] |= change

    call(watched, "add", kind, pod)
    call(watched, "delete", kind, pod)

    assert await watched.queued() == []
    assert watched.outstanding == ["create train-worker-0"]


@pytest.mark.parametrize("labels", [{INDEX: "0"}, {**job_labels(), TYPE: "ps"}], ids=["no type", "another type"])
async def test_a_child_of_another_type_leaves_the_expectations(labels: dict[str, str]) -> None:
    """The job is synced, but no expectation about workers is affected, even under one name."""
    watched = Watched()
    watched.expect("train-worker-0")

    watched.jobs.add_pod(child(owner=TRAIN_JOB, labels=labels))

    assert await watched.queued() == ["default/train"]
    assert watched.outstanding == ["create train-worker-0"]


async def test_each_failed_pod_is_counted_once() -> None:
    """It is counted when it is seen to fail; later changes, and orphans, are not counted."""
    watched = Watched()
    running, failed, later = (
        child(owner=TRAIN_JOB, version=version, phase=phase)
        for version, phase in ((1, "Running"), (2, "Failed"), (3, "Failed"))
    )

    watched.jobs.add_pod(running)
    watched.jobs.update_pod(running, failed)
    watched.jobs.update_pod(failed, later)
    watched.jobs.update_service(running, failed)
    watched.jobs.update_pod(child(), child(version=2, phase="Failed"))

    assert watched.tally.figures == ["pod failed"]
    assert uid_of(failed) == "uid-pod"


def labelled(name: str, **labels: str) -> Object:
    keys = {"type": TYPE, "index": INDEX}
    return {"metadata": {"name": name, "namespace": "ns", "labels": {keys[key]: labels[key] for key in labels}}}


@pytest.mark.parametrize("kind", ["pod", "service"])
async def test_kubeflows_functions_for_slices(kind: str) -> None:
    """They filter by the exact type, in lower case, and group by index. Every index below the replicas has a slice; a
    huge index costs nothing.
    """
    jobs = Watched().jobs
    select, slices = getattr(jobs, f"filter_{kind}s_for_replica_type"), getattr(jobs, f"get_{kind}_slices")
    types = [labelled("a", type="ps"), labelled("b", type="psx"), labelled("c", type="PS"), labelled("d")]
    assert [name_of(obj) for obj in select(types, "PS")] == ["a"]

    found = slices([labelled("a", index="0"), labelled("b", index="0"), labelled("c", index="1000000000")], 3)
    assert {index: [name_of(obj) for obj in objects] for index, objects in found.items()} == {
        0: ["a", "b"],
        1: [],
        2: [],
        1_000_000_000: ["c"],
    }


@pytest.mark.parametrize("value", ["abc", "-1", "", "+1", " 1", "1.0", "1_0", "١", "9" * 5000])
async def test_an_unusable_index_is_ignored_safely(value: str) -> None:
    """It is in no slice, and the other pods are found; leading zeros are harmless."""
    objects = [
        labelled("bad", index=value),
        labelled("none"),
        {"metadata": {"name": "x"}},
        labelled("good", index="007"),
    ]
    assert [name_of(obj) for obj in Watched().jobs.get_pod_slices(objects, 0).pop(7)] == ["good"]
    assert Watched().jobs.get_pod_slices(objects[:3], 0) == {}


async def test_expectations_of_the_callers_own_are_used() -> None:
    """Also while nothing is expected."""
    operator, mine = Cached(memory_kube()), Expectations(ttl=1.0)
    informers = JobInformers(operator.api, operator)
    jobs = JobController(
        operator, 15.0, False, operator.api, informers, "jobs", recorder=operator.recorder, expectations=mine
    )
    assert jobs.expectations is mine
