"""Decisions about training jobs beside an independent model of the original's rules and our differences.

The model keeps a few sets about a job's replicas, and knows no pods, no status and no code of ours. A random history of
pods moves both. The status passes through the original's definition, which prunes it, after each decision.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from controllers.jobs.api import CreatePod, DeletePod
from controllers.jobs.status import JobStatus, decode_status, status_patch
from controllers.training import PyTorchJobs, TFJobs
from store.kube.api.objects import has_ended, uid_of
from store.kube.api.patches import apply_merge_patch
from store.kube.memory.kube import MemoryKube
from tests.support.jobs.decisions import INDEX, TYPE, Cluster, pod
from tests.support.training.manifests import pytorch_job, tf_job

Replica = tuple[str, int]
State = Literal["pending", "running", "succeeded", "failed"]
POLICIES = st.sampled_from(["Always", "OnFailure", "Never", "ExitCode"])
CODES = st.sampled_from([1, 2, 127, 128, 130, 137, 139, 143, 255])


@dataclass
class Model:
    """The rules about one job. `types`: replicas and policy. `state`: of the replicas that have a pod."""

    types: dict[str, tuple[int, str]]
    leaders: set[str]
    workers_rule: Literal["first", "any", "all"]
    ignores_workers: bool
    limit: int | None
    state: dict[Replica, State] = field(default_factory=dict)
    ends: dict[Replica, tuple[int, bool]] = field(default_factory=dict)  # exit code and eviction, of failed pods
    done: set[Replica] = field(default_factory=set)
    failed: set[Replica] = field(default_factory=set)  # since the job was last running
    given_up: set[Replica] = field(default_factory=set)
    failures: Counter[Replica] = field(default_factory=Counter)
    former_restarts: int = 0
    restarts: Counter[Replica] = field(default_factory=Counter)  # in the present pods, where the policy counts them
    phase: str = "Created"

    def replicas(self, *types: str) -> list[Replica]:
        return [(name, index) for name, (count, _) in self.types.items() if name in types for index in range(count)]

    def deciding(self) -> list[Replica]:
        return self.replicas(*self.leaders) or self.replicas("Worker")

    def decide(self) -> None:
        """Bring `phase` up to date, and judge what has failed since the last decision."""
        if self.phase in ("Succeeded", "Failed"):
            return
        for replica, state in self.state.items():
            if state == "succeeded":
                self.done.add(replica)
        permanent = False
        for replica, (code, evicted) in self.ends.items():
            if replica in self.given_up:
                continue
            policy = self.types[replica[0]][1]
            final = not evicted and (policy == "Never" or (policy == "ExitCode" and code < 128))
            if final and self.ignores_workers and replica[0] == "Worker":
                self.given_up.add(replica)
                continue
            permanent |= final
            if not final:
                self.failures[replica] += not evicted
                self.failed.add(replica)
        restarts = self.former_restarts + self.restarts.total()
        spent = self.failures.total() + restarts
        if self.succeeds():
            self.phase = "Succeeded"
        elif permanent or (self.limit is not None and (spent > self.limit or 0 < self.limit <= restarts)):
            self.phase = "Failed"
        elif any(self.state.get(replica) != "running" for replica in self.failed - self.done):
            self.phase = "Restarting"
        elif any(self.state.get(replica) == "running" for replica in self.deciding()):
            self.phase = "Running"
            self.failed.clear()

    def succeeds(self) -> bool:
        deciding = self.deciding()
        if not deciding:
            return False
        if not self.replicas(*self.leaders):
            if self.workers_rule == "any" and self.done & set(deciding):
                return True
            if self.workers_rule == "first" and deciding[0] in self.done:
                return True
        return set(deciding) <= self.done

    def gone(self, replica: Replica) -> None:
        """The replica's pod is gone; its restarts stay."""
        self.state.pop(replica)
        self.ends.pop(replica, None)
        self.given_up.discard(replica)
        self.former_restarts += self.restarts.pop(replica, 0)


def name_of_pod(replica: Replica) -> str:
    return f"train-{replica[0].lower()}-{replica[1]}"


def stored(status: JobStatus) -> JobStatus:
    """Return the status as the next operator reads it, from a server that prunes unknown fields."""
    written = apply_merge_patch({}, status_patch(JobStatus(), status, pruned=True))
    known = {"active", "succeeded", "failed", "selector"}
    assert all(entry.keys() <= known for entry in written.get("replicaStatuses", {}).values())
    return decode_status(written)


class TrainingLife(RuleBasedStateMachine):
    """One job, until its end."""

    cluster: Cluster
    model: Model

    def begin(self, view: Any, model: Model) -> None:
        self.cluster = Cluster(replace(view, type_label=TYPE, index_label=INDEX))
        self.model = model

    @initialize(
        kind=st.sampled_from(["pytorch", "elastic", "tensorflow", "dynamic", "all workers"]),
        chief=st.booleans(),
        counts=st.tuples(st.integers(1, 3), st.integers(0, 1)),
        policies=st.tuples(POLICIES, POLICIES, POLICIES),
        limit=st.none() | st.integers(0, 4),
    )
    def a_job(
        self, kind: str, chief: bool, counts: tuple[int, int], policies: tuple[str, str, str], limit: int | None
    ) -> None:
        torch = kind in ("pytorch", "elastic")
        leader = "Master" if torch else "Chief"
        types = {leader: (int(chief and kind != "elastic"), policies[0]), "Worker": (counts[0], policies[1])}
        if not torch:
            types["PS"] = (counts[1], policies[2])
        types = {name: given for name, given in types.items() if given[0]}
        replicas = {name: {"replicas": n, "restartPolicy": policy} for name, (n, policy) in types.items()}
        spec: dict[str, Any] = {"runPolicy": {"cleanPodPolicy": "None"}}
        if limit is not None:
            spec["runPolicy"]["backoffLimit"] = limit
        if kind == "elastic":
            spec["elasticPolicy"] = {"minReplicas": 1, "maxReplicas": 3}
        if kind == "dynamic":
            spec["enableDynamicWorker"] = True
        if kind == "all workers":
            spec["successPolicy"] = "AllWorkers"
        manifest = (pytorch_job if torch else tf_job)("m", spec=spec, **replicas)
        operator = (PyTorchJobs if torch else TFJobs)(MemoryKube())
        rules: dict[str, Literal["first", "any", "all"]] = {"pytorch": "all", "elastic": "any", "all workers": "all"}
        model = Model(types, {"Master", "Chief"}, rules.get(kind, "first"), kind == "dynamic", limit)
        self.begin(operator.view(manifest), model)
        self.the_operator_decides()

    def some(self, data: st.DataObject, *states: State) -> Replica | None:
        found = sorted(replica for replica, state in self.model.state.items() if state in states)
        return data.draw(st.sampled_from(found)) if found else None

    def move(self, replica: Replica, phase: str, **fields: Any) -> None:
        (kind, index), name = replica, name_of_pod(replica)
        uid = uid_of(self.cluster.pods[name])
        restarts = self.model.restarts[replica] if self.counts_restarts(replica) else 0
        self.cluster.pods[name] = pod(kind, index, phase, uid=uid, **{"restarts": restarts} | fields)

    def counts_restarts(self, replica: Replica) -> bool:
        return self.model.types[replica[0]][1] != "Never"

    @rule(data=st.data())
    def a_pod_runs(self, data: st.DataObject) -> None:
        replica = self.some(data, "pending")
        if replica is not None:
            self.model.state[replica] = "running"
            self.move(replica, "Running")

    @rule()
    def all_pods_run(self) -> None:
        for replica, state in self.model.state.items():
            if state == "pending":
                self.model.state[replica] = "running"
                self.move(replica, "Running")

    @rule(data=st.data())
    def a_container_restarts_in_place(self, data: st.DataObject) -> None:
        replica = self.some(data, "pending", "running")
        if replica is not None and self.counts_restarts(replica):
            self.model.restarts[replica] += 1
            self.move(replica, "Running" if self.model.state[replica] == "running" else "Pending")

    @rule(data=st.data())
    def a_pod_succeeds(self, data: st.DataObject) -> None:
        replica = self.some(data, "running")
        if replica is not None:
            self.model.state[replica] = "succeeded"
            self.move(replica, "Succeeded", code=0)

    @rule(data=st.data(), code=CODES, evicted=st.booleans())
    def a_pod_fails(self, data: st.DataObject, code: int, evicted: bool) -> None:
        replica = self.some(data, "pending", "running")
        if replica is not None:
            self.model.state[replica] = "failed"
            self.model.ends[replica] = code, evicted
            self.move(replica, "Failed", code=code, reason="Evicted" if evicted else "")

    @precondition(lambda life: life.model.phase not in ("Succeeded", "Failed"))
    @rule(data=st.data())
    def a_user_deletes_a_pod_that_was_seen(self, data: st.DataObject) -> None:
        self.the_operator_decides()
        replica = self.some(data, "pending", "running", "succeeded", "failed")
        if replica is not None:
            del self.cluster.pods[name_of_pod(replica)]
            self.model.gone(replica)

    @rule(seconds=st.integers(1, 400))
    def time_passes(self, seconds: int) -> None:
        self.cluster.sleep(seconds)

    @rule()
    def the_operator_decides(self) -> None:
        self.model.decide()
        self.seen = dict(self.model.state)
        decision = self.cluster.sync()
        self.cluster.job = replace(self.cluster.job, status=stored(self.cluster.job.status))
        for action in decision.actions:
            if isinstance(action, DeletePod):
                kind, index = next(
                    each for each in self.model.state if action.name == f"train-{each[0].lower()}-{each[1]}"
                )
                ended = self.model.phase in ("Succeeded", "Failed")
                assert ended or (kind, index) in self.model.failed
                self.model.gone((kind, index))
            elif isinstance(action, CreatePod):
                replica = action.type, action.index
                assert replica not in self.model.state
                assert replica not in self.model.done
                self.model.state[replica] = "pending"
        self.the_status_is_that_of_the_model(decision.status)
        self.pods_are_those_of_the_model()

    def the_status_is_that_of_the_model(self, status: JobStatus) -> None:
        true = [each.type for each in status.conditions if each.status == "True"]
        phase = self.model.phase
        assert true == (["Created"] if phase == "Created" else ["Created", phase])
        assert status.conditions[-1].type == phase
        if phase in ("Succeeded", "Failed"):
            return
        counted = {
            (kind, int(index)): retry.failures
            for kind, counts in status.replica_statuses.items()
            for index, retry in counts.retries.items()
        }
        assert {replica: n for replica, n in counted.items() if n} == +self.model.failures
        for kind in self.model.types:
            counts, own = status.replica_statuses[kind], set(self.model.replicas(kind))
            assert counts.succeeded == len(self.model.done & own)
            assert counts.active == sum(self.seen.get(replica) == "running" for replica in own)

    def pods_are_those_of_the_model(self) -> None:
        """A job that exceeded a limit has stopped what ran."""
        assert self.cluster.pods.keys() == set(map(name_of_pod, self.model.state))
        if self.cluster.job.status.over_limit:
            assert all(has_ended(each) for each in self.cluster.pods.values())

    @precondition(lambda life: life.model.phase not in ("Succeeded", "Failed"))
    @rule()
    def every_replica_comes_back_in_time(self) -> None:
        """After the longest back-off each replica has a pod, unless it succeeded."""
        self.the_operator_decides()
        self.cluster.sleep(400)
        self.the_operator_decides()
        if self.model.phase not in ("Succeeded", "Failed"):
            wanted = set(self.model.replicas(*self.model.types)) - self.model.done
            assert wanted <= self.model.state.keys()


TrainingLife.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestTrainingLife = TrainingLife.TestCase
