"""A world for one Framework: an API server, a garbage collector, a kubelet and a cache, as far as steps depend on them.

`World.sync` is the loop that `controllers.framework.step.context` describes: persist, act, pass the result to the next
step. It can crash at any point (`crash_before`), forgetting everything but what is stored. Each persisted status passes
through its wire form, and `World.written` keeps all of them.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from controllers.framework.api.types import Framework, FrameworkStatus, TaskStatus
from controllers.framework.api.wire import decode_framework, decode_status, encode_status
from controllers.framework.config import FrameworkConfig
from controllers.framework.executor import build_config_map, build_pod
from controllers.framework.step.context import (
    Action,
    Confirm,
    Create,
    Created,
    CreateFailed,
    Delete,
    DeleteAccepted,
    DeleteFramework,
    Failed,
    Gone,
    NameTaken,
    Note,
    Outcome,
    Present,
    Snapshot,
    Step,
    Target,
    lasting,
)
from controllers.framework.step.step import step
from store.kube.api.objects import Object, is_deleting, name_of, uid_of
from tests.support import require

START = datetime(2024, 5, 1, 12, 0, 0, tzinfo=UTC)
CONFIG = FrameworkConfig()


class Crash(Exception):
    """The operator dies here."""


def role(name: str = "worker", number: int = 1, **fields: Any) -> Object:
    """Return a task role. `policy`: (minFailed, minSucceeded); `retry`: (fancy, max); `timeout`; `pod`: template."""
    task: Object = {"pod": fields.pop("pod", template())}
    if "retry" in fields:
        fancy, limit = fields.pop("retry")
        task["retryPolicy"] = {"fancyRetryPolicy": fancy, "maxRetryCount": limit}
    if "timeout" in fields:
        task["podGracefulDeletionTimeoutSec"] = fields.pop("timeout")
    found: Object = {"name": name, "taskNumber": number, "task": task}
    if "policy" in fields:
        failed, succeeded = fields.pop("policy")
        found["frameworkAttemptCompletionPolicy"] = {"minFailedTaskCount": failed, "minSucceededTaskCount": succeeded}
    assert not fields, fields
    return found


def template(**spec: Any) -> Object:
    return {"spec": {"restartPolicy": "Never", "containers": [{"name": "main", "image": "example.org/work:1"}], **spec}}


def manifest(*roles: Object, kind: str = "Start", retry: tuple[bool, int] = (False, 0), name: str = "job") -> Object:
    """Return a Framework as a user creates it."""
    policy = {"fancyRetryPolicy": retry[0], "maxRetryCount": retry[1]}
    return {
        "metadata": {"name": name, "namespace": "default", "uid": "fw-uid", "generation": 1, "resourceVersion": "1"},
        "spec": {"executionType": kind, "retryPolicy": policy, "taskRoles": list(roles)},
    }


@dataclass
class World:
    """`live` pods and ConfigMap by name; `unseen`: UIDs that the cache does not show although they are there.
    `refuse`: what the API server answers to creations, instead of creating. `is_away`: it answers nothing but the
    status. `acts`: each action, with the status that was stored when it was performed."""

    raw: Object
    config: FrameworkConfig = CONFIG
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    now: datetime = START
    stored: Object | None = None
    expected: FrameworkStatus | None = None
    live: dict[str, Object] = field(default_factory=dict)
    unseen: set[str] = field(default_factory=set)
    refuse: Callable[[Target], CreateFailed | None] = lambda target: None
    crash_before: Callable[[Action | None], bool] = lambda action: False
    written: list[FrameworkStatus] = field(default_factory=list)
    acts: list[tuple[Action, FrameworkStatus]] = field(default_factory=list)
    is_away: bool = False
    notes: list[Note] = field(default_factory=list)
    history: list[Snapshot] = field(default_factory=list)
    pending: list[Outcome] = field(default_factory=list)
    created: list[tuple[str, str]] = field(default_factory=list)
    is_deleted: bool = False
    uids: Any = field(default_factory=lambda: itertools.count(1))
    last: Step | None = None

    @property
    def actions(self) -> list[Action]:
        return [action for action, _ in self.acts]

    # the loop

    def framework(self) -> Framework:
        return decode_framework({**self.raw, "status": self.stored}, status=self.expected)

    @property
    def status(self) -> FrameworkStatus:
        return require(self.framework().status)

    def sync(self) -> Step:
        """Take steps until nothing is to be done any more, as the loop does."""
        known: list[Outcome] = []
        for _ in range(1000):
            known = lasting(known) + self.pending
            asked = self.step_once(known)
            if not asked.actions or asked.back_off:
                return asked
        raise AssertionError(f"it never settles: {asked.actions}")

    def step_once(self, outcomes: Sequence[Outcome] | None = None) -> Step:
        """Take a step and perform its actions. `outcomes`: by default those of the last step's actions only."""
        framework = self.framework()
        outcomes, self.pending = self.pending if outcomes is None else outcomes, []
        pods = {name: pod for name, pod in self.seen().items() if pod["kind"] == "Pod"}
        before = copy.deepcopy((self.raw, pods))
        asked = step(
            framework,
            self.seen().get(f"{framework.name}-attempt"),
            pods,
            now=self.now,
            rng=self.rng,
            config=self.config,
            outcomes=outcomes,
        )
        assert before == (self.raw, pods), "a step changes nothing that it is given"
        self.last = asked
        self.history += asked.history
        self.notes += asked.events
        self._persist(framework, asked)
        for action in asked.actions:
            if self.crash_before(action):
                raise Crash
            assert asked.status is not None
            self.acts.append((action, asked.status))
            self.pending.append(self._perform(replace(framework, status=asked.status), action))
        return asked

    def _persist(self, framework: Framework, asked: Step) -> None:
        if asked.status is None:
            return
        if asked.status is not framework.status:
            assert asked.status != framework.status, "a status that says nothing new is not written"
        self.expected = asked.status
        if asked.status is framework.status and self.stored is not None and not asked.actions:
            return
        if self.crash_before(None):
            raise Crash
        wire = encode_status(asked.status)
        raw = msgspec.json.encode(wire)
        self.stored = msgspec.json.decode(raw)
        decoded = decode_status(self.stored)
        assert decoded == asked.status, "the wire form loses nothing"
        if not self.written or self.written[-1] != asked.status:
            self.written.append(asked.status)

    def crash(self) -> None:
        """Restart the operator, with nothing but what is stored."""
        self.expected, self.pending = None, []

    # the API server

    def seen(self) -> dict[str, Object]:
        return {name: obj for name, obj in self.live.items() if uid_of(obj) not in self.unseen}

    def _perform(self, framework: Framework, action: Action) -> Outcome:
        if self.is_away:
            return CreateFailed(action.target, 0, "away") if isinstance(action, Create) else Failed(action.uid, "away")
        match action:
            case Create(target):
                return self._create(framework, target)
            case Delete(_, name, uid, grace, confirm):
                return self._delete(name, uid, grace, confirm)
            case Confirm(_, name, uid):
                found = self.live.get(name)
                return Present(found) if found is not None and uid_of(found) == uid else Gone(uid)
            case DeleteFramework(uid):
                self.is_deleted = True
                return DeleteAccepted(uid)

    def _create(self, framework: Framework, target: Target) -> Outcome:
        refusal = self.refuse(target)
        if refusal is not None:
            return refusal
        body = build_config_map(framework) if target is None else build_pod(framework, target)
        name = name_of(body)
        if name in self.live:
            return NameTaken(target, self.live[name])
        body["metadata"]["uid"] = uid = f"uid-{next(self.uids)}"
        if target is not None:
            body["status"] = {"phase": "Pending"}
        self.live[name] = body
        self.created.append((name, uid))
        return Created(target, uid)

    def _delete(self, name: str, uid: str, grace: int | None, confirm: bool) -> Outcome:
        found = self.live.get(name)
        if found is None or uid_of(found) != uid:
            return Gone(uid)
        if grace == 0:
            del self.live[name]
        else:
            self.mark_deleting(name)
        return Gone(uid) if confirm and name not in self.live else DeleteAccepted(uid)

    def mark_deleting(self, name: str, grace: int = 30) -> None:
        """Delete an object as a user does: it is marked, and goes when the kubelet or the collector is done."""
        if not is_deleting(self.live[name]):
            self._update(name, deletionTimestamp=_text(self.now + timedelta(seconds=grace)), grace=grace)

    def _update(self, name: str, *, deletionTimestamp: str, grace: int) -> None:
        obj = self.live[name]
        metadata = {**obj["metadata"], "deletionTimestamp": deletionTimestamp, "deletionGracePeriodSeconds": grace}
        self.live[name] = {**obj, "metadata": metadata}

    # the garbage collector and the kubelet

    def collect(self) -> None:
        """Delete the pods whose ConfigMap is being deleted or gone, and the ConfigMap after them."""
        for name, pod in list(self.live.items()):
            owner = next((ref["uid"] for ref in pod["metadata"].get("ownerReferences", ())), None)
            owners = [obj for obj in self.live.values() if uid_of(obj) == owner]
            if owner is not None and pod["kind"] == "Pod" and (not owners or is_deleting(owners[0])):
                self.mark_deleting(name)
        for name, obj in list(self.live.items()):
            held = any(
                ref["uid"] == uid_of(obj)
                for other in self.live.values()
                for ref in other["metadata"].get("ownerReferences", ())
            )
            if obj["kind"] == "ConfigMap" and is_deleting(obj) and not held:
                del self.live[name]

    def set_pod(self, name: str, phase: str, **status: Any) -> None:
        """Write the kubelet's report."""
        pod = self.live[name]
        self.live[name] = {**pod, "status": {**pod.get("status", {}), "phase": phase, **status}}

    def run(self, name: str, ip: str = "10.0.0.1") -> None:
        pod = self.live[name]
        self.live[name] = {**pod, "spec": {**pod["spec"], "nodeName": "node1"}}
        self.set_pod(name, "Running", podIP=ip, hostIP="192.0.2.1")

    def finish(self, name: str, code: int = 0, *, init: bool = False, **terminated: Any) -> None:
        """End the pod's only container with this exit code."""
        ended = {"exitCode": code, "finishedAt": _text(self.now), **terminated}
        statuses = [{"name": "init" if init else "main", "state": {"terminated": ended}}]
        field_name = "initContainerStatuses" if init else "containerStatuses"
        self.set_pod(name, "Failed" if code else "Succeeded", **{field_name: statuses})

    def reap(self) -> None:
        """End and remove every pod that is being deleted."""
        for name, obj in list(self.live.items()):
            if obj["kind"] == "Pod" and is_deleting(obj):
                del self.live[name]

    def settle(self) -> Step:
        """Let every component act until nothing changes; no time passes."""
        before: object = None
        while before != (before := copy.deepcopy((self.stored, self.live))):
            asked = self.sync()
            self.collect()
            self.reap()
            self.collect()
        return asked

    def later(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    # what users do and see

    def edit(self, **spec: Any) -> None:
        metadata = {**self.raw["metadata"], "generation": self.raw["metadata"]["generation"] + 1}
        self.raw = {**self.raw, "metadata": metadata, "spec": {**self.raw["spec"], **spec}}

    def task(self, name: str = "worker", index: int = 0) -> TaskStatus:
        found = self.status.role(name)
        return require(found.task(index) if found else None)

    def pods(self) -> list[str]:
        return sorted(name for name, obj in self.live.items() if obj["kind"] == "Pod")

    def run_all(self) -> None:
        for number, name in enumerate(self.pods()):
            self.run(name, f"10.0.0.{number + 1}")


def started(*roles: Object, **fields: Any) -> World:
    """Return a world with a Framework all of whose pods run; `fields` as of `manifest`."""
    world = World(manifest(*roles, **fields))
    world.settle()
    world.run_all()
    world.settle()
    return world


def _text(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
