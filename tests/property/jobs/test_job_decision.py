"""Safety of the job decision under any behaviour of pods, users and time.

A random cluster: pods start, end, restart in place, are evicted, drained, lost and duplicated; the job has random
limits, is scaled and suspended; between any two events the controller may decide. The properties are checked at each
decision.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from controllers.jobs.api import (
    Backoff,
    Companion,
    CreatePod,
    CreateService,
    Decision,
    DeleteJob,
    DeletePod,
    Gang,
    RunPolicy,
)
from controllers.jobs.status import (
    ConditionType,
    JobStatus,
    decode_status,
    status_patch,
)
from store.kube.api.objects import Object, has_ended, is_deleting, labels_of, name_of, uid_of
from store.kube.api.patches import apply_merge_patch
from tests.support.jobs.decisions import INDEX, TYPE, Cluster, at, job, pod

Place = tuple[str, int]  # (type in lower case, index)

TYPES = ("Chief", "Worker", "PS")
ENDS: tuple[ConditionType, ...] = ("Succeeded", "Failed")
LIMITS = ("BackoffLimitExceeded", "DeadlineExceeded")
CODES = st.sampled_from([0, 1, 126, 130, 137, 139, 143])
counts = st.integers(0, 3)
optional_seconds = st.none() | st.integers(0, 40)


def place_of(found: Object) -> Place:
    return labels_of(found)[TYPE], int(labels_of(found)[INDEX])


def _has_pods(life: JobLife) -> bool:
    return bool(life.cluster.pods)


class JobLife(RuleBasedStateMachine):
    """One job, from creation to deletion."""

    cluster: Cluster

    @initialize(
        replicas=st.fixed_dictionaries({"Chief": st.integers(0, 1), "Worker": counts, "PS": st.integers(0, 1)}),
        policy=st.sampled_from(["Always", "OnFailure", "Never", "ExitCode"]),
        run_policy=st.builds(
            RunPolicy,
            clean_pod_policy=st.sampled_from(["All", "Running", "None"]),
            backoff_limit=st.none() | st.integers(0, 3),
            active_deadline_seconds=optional_seconds,
            ttl_seconds_after_finished=optional_seconds,
        ),
        success_rule=st.sampled_from(["FirstWorker", "AnyWorker", "AllWorkers"]),
        gang=st.none() | st.just(Gang(exists=False, current=False)),
        companion=st.none() | st.just(Companion(wanted=True, exists=False, current=False)),
        restart_whole=st.booleans(),
        leaders_only=st.booleans(),
        ignored_types=st.sampled_from([(), ("Worker",)]),
        create_after=st.sampled_from([{}, {"Worker": "Chief"}]),
        force_delete_after=st.none() | st.just(20.0),
        graceful=st.booleans(),
    )
    def begin(self, replicas: dict[str, int], policy: Any, graceful: bool, **fields: Any) -> None:
        view = job(policy, **replicas, **fields, backoff=Backoff(base=4, cap=16))
        self.cluster = Cluster(view, graceful=graceful)
        self.failed: dict[Place, set[str]] = defaultdict(set)

    def some_pod(self, data: st.DataObject) -> Object:
        return self.cluster.pods[data.draw(st.sampled_from(sorted(self.cluster.pods)))]

    def change(self, found: Object, phase: str, **fields: Any) -> None:
        """Change the pod's status, but not its identity or deletion."""
        labels = labels_of(found)
        changed = pod(labels[TYPE], labels[INDEX], phase, uid=uid_of(found), **fields)
        self.cluster.pods[name_of(found)] = found | {"status": changed["status"]}
        if phase == "Failed":
            self.failed[place_of(found)].add(uid_of(found))

    @precondition(_has_pods)
    @rule(data=st.data(), restarts=counts)
    def a_pod_runs(self, data: st.DataObject, restarts: int) -> None:
        found = self.some_pod(data)
        if not has_ended(found):
            self.change(found, "Running", restarts=restarts)

    @precondition(_has_pods)
    @rule(data=st.data(), code=CODES, restarts=counts, reason=st.sampled_from(["", "", "Evicted"]))
    def a_pod_ends(self, data: st.DataObject, code: int, restarts: int, reason: str) -> None:
        found = self.some_pod(data)
        if not has_ended(found):
            phase = "Failed" if code or reason else "Succeeded"
            self.change(found, phase, code=code, restarts=restarts, reason=reason)

    @precondition(_has_pods)
    @rule(data=st.data())
    def a_user_deletes_a_pod(self, data: st.DataObject) -> None:
        found = self.some_pod(data)
        found["metadata"] |= {"deletionTimestamp": at(0).isoformat(), "deletionGracePeriodSeconds": 30}

    @precondition(_has_pods)
    @rule(data=st.data())
    def a_pod_is_gone(self, data: st.DataObject) -> None:
        found = self.some_pod(data)
        if is_deleting(found):
            del self.cluster.pods[name_of(found)]

    @rule(kind=st.sampled_from(TYPES), index=st.integers(0, 4), phase=st.sampled_from(["Pending", "Running", "Failed"]))
    def a_pod_is_adopted(self, kind: str, index: int, phase: str) -> None:
        found = pod(kind, index, phase)
        found["metadata"]["name"] += "-adopted"
        if name_of(found) not in self.cluster.pods:
            self.cluster.pods[name_of(found)] = found
            self.change(found, phase, code=137)

    @precondition(lambda life: bool(life.cluster.services))
    @rule(data=st.data())
    def a_service_is_lost(self, data: st.DataObject) -> None:
        del self.cluster.services[data.draw(st.sampled_from(sorted(self.cluster.services)))]

    @rule(kind=st.sampled_from(TYPES), replicas=counts)
    def the_job_is_scaled(self, kind: str, replicas: int) -> None:
        specs = dict(self.cluster.job.replica_specs)
        specs[kind] = msgspec.structs.replace(specs[kind], replicas=replicas)
        self.cluster.job = replace(self.cluster.job, replica_specs=specs)

    @rule(suspend=st.booleans())
    def the_job_is_suspended_or_resumed(self, suspend: bool) -> None:
        run_policy = msgspec.structs.replace(self.cluster.job.run_policy, suspend=suspend)
        self.cluster.job = replace(self.cluster.job, run_policy=run_policy)

    @rule(seconds=st.integers(1, 20))
    def time_passes(self, seconds: int) -> None:
        self.cluster.sleep(seconds)

    @rule()
    def time_passes_until_the_decision_changes(self) -> None:
        """The wake-up is exact: nothing is to be done before it, and something is afterwards."""
        self.cluster.settle()
        wake = self.cluster.decide().next_wake
        if wake is None:
            return
        if wake > 1:
            self.cluster.sleep(wake - 1)
            self.nothing_is_left_to_do()
            self.cluster.sleep(1)
        else:
            self.cluster.sleep(wake)
        late = self.cluster.decide()
        assert late.actions or late.status != self.cluster.job.status

    @rule()
    def the_controller_dies_before_it_acts(self) -> None:
        """The status is written first, so the next controller finds the fact, and the pod that it was taken from."""
        self.cluster.job = replace(self.cluster.job, status=self.cluster.decide().status)

    @rule()
    def reconcile(self) -> None:
        before = self.cluster.job.status
        old_pods = dict(self.cluster.pods)
        decision = self.cluster.sync()
        self.running_and_restarting_exclude_each_other(decision.status)
        self.the_end_is_final(before, decision.status)
        self.nothing_is_created_at_or_above_the_replicas(decision)
        self.nothing_is_left_at_or_above_the_replicas(decision)
        self.no_place_gets_a_second_pod(decision, old_pods)
        self.each_failure_counts_once(decision.status)
        self.the_status_survives_the_wire(before, decision.status)
        self.a_limit_leaves_no_active_pod()
        self.a_restart_of_all_mixes_no_old_pod_with_a_new_one(decision, old_pods)
        self.deciding_again_does_nothing_more(decision, old_pods)

    def running_and_restarting_exclude_each_other(self, status: JobStatus) -> None:
        assert not (status.has("Running") and status.has("Restarting"))
        assert max(Counter(condition.type for condition in status.conditions).values(), default=1) == 1
        if status.finished or status.has("Suspended"):
            assert not status.has("Running")
            assert not status.has("Restarting")

    def the_end_is_final(self, before: JobStatus, after: JobStatus) -> None:
        assert not all(map(after.has, ENDS))
        if before.finished:
            assert after == before

    def nothing_is_created_at_or_above_the_replicas(self, decision: Decision) -> None:
        for action in decision.actions:
            if isinstance(action, CreatePod | CreateService):
                assert 0 <= action.index < self.cluster.job.replica_specs[action.type].replicas
                assert not decision.status.finished

    def no_place_gets_a_second_pod(self, decision: Decision, old_pods: dict[str, Object]) -> None:
        """No second pod is created even while the present one is terminating; of duplicates, one is left."""
        taken = set(map(place_of, old_pods.values()))
        for action in decision.actions:
            if isinstance(action, CreatePod):
                assert (action.type.lower(), action.index) not in taken
        if not decision.status.finished:
            left = [found for found in self.cluster.pods.values() if not is_deleting(found)]
            assert max(Counter(map(place_of, left)).values(), default=1) == 1

    def nothing_is_left_at_or_above_the_replicas(self, decision: Decision) -> None:
        replicas = {kind.lower(): spec.replicas for kind, spec in self.cluster.job.replica_specs.items()}
        if not decision.status.finished:
            left = [place_of(found) for found in self.cluster.pods.values() if not is_deleting(found)]
            assert all(index < replicas[kind] for kind, index in left)

    def each_failure_counts_once(self, status: JobStatus) -> None:
        retries = {
            (kind.lower(), int(index)): retry
            for kind, replica in status.replica_statuses.items()
            for index, retry in replica.retries.items()
        }
        for place, retry in retries.items():
            assert retry.failures + retry.disruptions <= len(self.failed[place])
        limit = self.cluster.job.run_policy.backoff_limit
        if limit is not None and not status.finished and not status.has("Suspended"):
            assert sum(retry.failures for retry in retries.values()) <= limit

    def the_status_survives_the_wire(self, before: JobStatus, after: JobStatus) -> None:
        assert decode_status(msgspec.to_builtins(after)) == after
        merged = apply_merge_patch(msgspec.to_builtins(before), status_patch(before, after))
        assert decode_status(merged) == after

    def a_limit_leaves_no_active_pod(self) -> None:
        failed = self.cluster.job.status.condition("Failed")
        if failed is not None and failed.reason in LIMITS and not self.cluster.job.deleting:
            assert all(has_ended(pod) or is_deleting(pod) for pod in self.cluster.pods.values())

    def a_restart_of_all_mixes_no_old_pod_with_a_new_one(self, decision: Decision, old_pods: dict[str, Object]) -> None:
        if decision.status.restarting_all:
            assert not any(isinstance(action, CreatePod) for action in decision.actions)
            assert all(is_deleting(found) for found in self.cluster.pods.values())
            assert old_pods

    def deciding_again_does_nothing_more(self, decision: Decision, old_pods: dict[str, Object]) -> None:
        """A second decision does nothing unless the actions changed the input: a free place, the last pod of a whole
        job that restarts, or a stored end that allows deletion. After the counts are adjusted, the decision is stable.
        """
        again = self.cluster.sync()
        assert DeleteJob() not in again.actions or decision.status.finished
        freed = {place_of(old_pods[action.name]) for action in decision.actions if isinstance(action, DeletePod)}
        for action in again.actions:
            if isinstance(action, CreatePod):
                assert decision.status.restarting_all or (action.type.lower(), action.index) in freed
            else:
                assert action == DeleteJob()
        self.cluster.settle()
        self.nothing_is_left_to_do()

    def nothing_is_left_to_do(self) -> None:
        decision = self.cluster.decide()
        assert (decision.actions, decision.status, decision.events) == ((), self.cluster.job.status, ())


JobLife.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestJobLife = JobLife.TestCase
