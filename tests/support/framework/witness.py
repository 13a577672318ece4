"""A witness of Framework operators: reads etcd's history afterwards and checks it against the invariants.

At every moment of the history of a namespace
- a (Framework, role, index) has one pod at most; all pods of a Framework's name belong to one attempt of one object,
- in the statuses a pod belongs to one attempt of one task, for ever, and is one that was made for that Framework,
- attempts only count up, and an outcome that was stored is never replaced.

And in the end each pod that ended while a status named it has its outcome there, unless the attempt of the whole
Framework had ended before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from controllers.framework.api.types import (
    CONFIG_MAP_UID,
    FRAMEWORK_ATTEMPT_COMPLETION,
    FRAMEWORK_NAME,
    FRAMEWORK_UID,
    TASK_INDEX,
    TASK_ROLE_NAME,
)
from store.kube.api.objects import Object, annotations_of, controller_of, labels_of, name_of, uid_of
from tests.support.kube.control_plane import ControlPlane
from tests.support.kube.etcd_history import Change, changes, current_revision

_FRAMEWORKS = "frameworkcontroller.microsoft.com/frameworks"
_FINISHED = ("Succeeded", "Failed")


class Attempt(NamedTuple):
    """One attempt of one task."""

    framework_uid: str
    framework_attempt: int
    role: str
    task_index: int
    task_uid: str
    attempt: int


@dataclass
class Seen:
    """The recorded history. `pods`: by UID. `attempts` and `owners`: the pod (UID) that statuses named for each
    attempt. `outcomes`: the codes in them. `ended`: exit codes of pods that ended while a status named them.
    `completed`: UIDs of Frameworks that were Completed; `vanished`: of those that were deleted before."""

    pods: dict[str, Object] = field(default_factory=dict)
    attempts: dict[Attempt, str] = field(default_factory=dict)
    owners: dict[str, Attempt] = field(default_factory=dict)
    outcomes: dict[Attempt, int] = field(default_factory=dict)
    ended: dict[Attempt, int] = field(default_factory=dict)
    completed: set[str] = field(default_factory=set)
    vanished: set[str] = field(default_factory=set)


class Witness:
    """Records a namespace, from now on until `check` is called."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self._etcd, self._namespace = plane.etcd_url, namespace
        self._since = current_revision(plane.etcd_url)

    def check(self) -> Seen:
        """Fail at the first moment that breaks an invariant. Return the recorded history."""
        view = _View()
        for change in changes(self._etcd, self._since):
            kind, _, rest = change.path.partition(f"/{self._namespace}/")
            if rest:
                view.see(kind, rest, change)
        view.finish()
        return view.seen


class _View:
    """The namespace at one revision, and what has been seen before."""

    def __init__(self) -> None:
        self.seen = Seen()
        self._alive: defaultdict[str, dict[str, Object]] = defaultdict(dict)  # by Framework, by pod name
        self._frameworks: dict[str, Object] = {}
        self._progress: dict[tuple[Any, ...], int] = {}

    def see(self, kind: str, name: str, change: Change) -> None:
        match kind:
            case "pods":
                self._see_pod(name, change.obj)
            case str() if kind == _FRAMEWORKS:
                self._see_framework(name, change.obj)

    def finish(self) -> None:
        """Check the ends of pods against the last statuses."""
        for attempt, code in self.seen.ended.items():
            if attempt.framework_uid not in self.seen.vanished:
                stored = self.seen.outcomes.get(attempt)
                assert stored in (code, FRAMEWORK_ATTEMPT_COMPLETION), f"{attempt} ended with {code}, stored: {stored}"

    def _see_pod(self, name: str, pod: Object | None) -> None:
        if pod is None:
            for pods in self._alive.values():
                pods.pop(name, None)
            return
        owner = controller_of(pod)
        if owner is None or owner["kind"] != "ConfigMap":
            return  # a stranger
        self.seen.pods[uid_of(pod)] = pod
        alive = self._alive[labels_of(pod)[FRAMEWORK_NAME]]
        alive[name] = pod
        slots = [(labels_of(each)[TASK_ROLE_NAME], labels_of(each)[TASK_INDEX]) for each in alive.values()]
        assert len(slots) == len(set(slots)), f"two pods of one task: {sorted(alive)}"
        attempts = {annotations_of(each)[CONFIG_MAP_UID] for each in alive.values()}
        assert len(attempts) == 1, f"pods of several attempts at the same time: {sorted(alive)}"
        if (pod.get("status") or {}).get("phase") in _FINISHED:
            self._see_end(pod)

    def _see_end(self, pod: Object) -> None:
        framework = self._frameworks.get(labels_of(pod)[FRAMEWORK_NAME])
        attempt = self.seen.owners.get(uid_of(pod))
        if framework is None or attempt is None or attempt.framework_uid != uid_of(framework):
            return
        if attempt not in self.seen.outcomes:
            self.seen.ended[attempt] = _exit_code(pod)

    def _see_framework(self, name: str, framework: Object | None) -> None:
        if framework is None:
            gone = self._frameworks.pop(name)
            if uid_of(gone) not in self.seen.completed:
                self.seen.vanished.add(uid_of(gone))
            return
        assert name not in self._frameworks or uid_of(self._frameworks[name]) == uid_of(framework)
        self._frameworks[name] = framework
        status = framework.get("status")
        if not status:
            return
        uid, number = uid_of(framework), status["attemptStatus"]["id"]
        self._counts_up((uid,), number)
        if status["state"] == "Completed":
            self.seen.completed.add(uid)
        assert (status["state"] == "Completed") == (uid in self.seen.completed), f"{name} continued after its end"
        for role, task in _tasks(status):
            self._see_task(uid, number, role, task)

    def _see_task(self, uid: str, number: int, role: str, task: Object) -> None:
        now = task["attemptStatus"]
        attempt = Attempt(uid, number, role, task["index"], task["instanceUID"], now["id"])
        self._counts_up(attempt[:-1], attempt.attempt)
        before = self.seen.attempts.get(attempt)
        assert before in (None, now["podUID"]), f"{attempt}: pod {before} became {now['podUID']}"
        if now["podUID"] is not None:
            self._see_record(attempt, now["podUID"])
        if now["completionStatus"] is not None:
            code = now["completionStatus"]["code"]
            first = self.seen.outcomes.setdefault(attempt, code)
            assert first == code, f"{attempt}: the outcome {first} became {code}"

    def _see_record(self, attempt: Attempt, pod_uid: str) -> None:
        self.seen.attempts[attempt] = pod_uid
        pod = self.seen.pods.get(pod_uid)
        assert pod is not None, f"{attempt}: there never was a pod {pod_uid}"
        made_for = annotations_of(pod)[FRAMEWORK_UID]
        assert made_for == attempt.framework_uid, f"{attempt} counts {name_of(pod)}, made for {made_for}"
        owner = self.seen.owners.setdefault(pod_uid, attempt)
        assert owner == attempt, f"{name_of(pod)} is of {owner} and of {attempt}"

    def _counts_up(self, what: tuple[Any, ...], number: int) -> None:
        assert number >= self._progress.get(what, 0), f"{what} went back to attempt {number}"
        self._progress[what] = number


def _tasks(status: Object) -> Iterator[tuple[str, Object]]:
    for role in status["attemptStatus"]["taskRoleStatuses"] or ():
        for task in role["taskStatuses"] or ():
            yield role["name"], task


def _exit_code(pod: Object) -> int:
    ended = (each.get("state", {}).get("terminated") for each in pod["status"].get("containerStatuses") or ())
    return next((each["exitCode"] for each in ended if each and each["exitCode"]), 0)
