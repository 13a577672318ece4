"""A random cluster, and the checks after every step.

The world acts as kube-scheduler, users and hardware: it submits gangs, asks for them in either phase, evicts victims,
loses and heals nodes, restarts and reconfigures. `checks` compares each answer with the world's own records, and the
state with the invariants. `story` describes the events for people.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from contextlib import suppress

from scheduler.hived.algorithm import Decision, HivedAlgorithm, PodScheduleResult, SchedulingPhase
from scheduler.hived.contract import POD_SCHEDULING_SPEC
from scheduler.hived.errors import UserError
from store.kube.api.objects import Object, name_of
from tests.property.hived.world import checks
from tests.property.hived.world.choices import Choices, one_in, pick, shuffled, subset
from tests.property.hived.world.configurations import changed, picture, random_plan
from tests.property.hived.world.jobs import random_job
from tests.support.hived.cluster import FILTERING, Cluster, Job, pod_object

MOST_WAITING = 8


class World:
    """`jobs`: submitted jobs, by group; `pods`: as submitted, with group and leaves; `victims`: named to
    kube-scheduler. `forged`: forged pods, and those of `forged_jobs`, whose places they may have taken.
    """

    def __init__(self, choices: Choices) -> None:
        self.plan = random_plan(choices)
        self.cluster = Cluster(self.plan.configuration(choices))
        self.jobs: dict[str, Job] = {}
        self.pods: dict[str, tuple[Object, str, int]] = {}
        self.forged: set[str] = set()
        self.forged_jobs: set[str] = set()
        self.victims: list[str] = []
        self.story = [f"configuration {picture(self.cluster.config)}"]
        self._numbers = itertools.count()
        self.check()

    @property
    def algorithm(self) -> HivedAlgorithm:
        return self.cluster.algorithm

    def check(self) -> None:
        checks.check_state(self.cluster, self.forged)

    def log(self, event: str) -> None:
        self.story.append(event)

    def number(self) -> int:
        """Return a number that no name has yet."""
        return next(self._numbers)

    # users

    def submit(self, choices: Choices) -> None:
        """Submit a gang, which kube-scheduler may try at once; or withdraw the one that has waited longest."""
        if len(self.cluster.waiting) >= MOST_WAITING:
            self.delete(*self.pods_of(self.pods[self.waiting()[0]][1]))
        else:
            job = self.announce(self.random_job(choices))
            if not one_in(choices, 3):
                self.ask_for(choices, job)

    def random_job(self, choices: Choices) -> Job:
        return random_job(choices, f"g{self.number()}", self.algorithm.topology)

    def announce(self, job: Job) -> Job:
        """Announce all pods of a job."""
        self.jobs[job.name] = job
        self.log(f"submit {job}")
        for pods, leaves in job.members:
            for _ in range(pods):
                self.announce_pod(job, leaves)
        return job

    def announce_pod(self, job: Job, leaves: int) -> str:
        name = f"{job.name}-{self.number()}"
        pod = pod_object(name, {POD_SCHEDULING_SPEC: json.dumps(job.spec(leaves))})
        self.pods[name] = pod, job.name, leaves
        self.cluster.announce(pod)
        if job.name in self.forged_jobs:
            self.forged.add(name)
        return name

    def spoil(self, *jobs: str) -> None:
        """Mark jobs whose places can't be relied on any longer."""
        self.forged_jobs.update(jobs)
        self.forged.update(name for job in jobs for name in self.pods_of(job))

    def delete_pod(self, choices: Choices) -> None:
        """Delete a pod as its user, or end it."""
        if names := list(self.cluster.bound) or self.waiting():
            self.delete(pick(choices, names))

    def delete_job(self, choices: Choices) -> None:
        """Delete a gang as its user; its pods go in any order."""
        jobs = sorted({self.pods[name][1] for name in (*self.cluster.bound, *self.cluster.waiting)})
        if jobs:
            self.delete(*shuffled(choices, self.pods_of(pick(choices, jobs))))

    def pods_of(self, job: str) -> list[str]:
        """Return the names of its live pods."""
        return [name for name in (*self.cluster.bound, *self.cluster.waiting) if self.pods[name][1] == job]

    def delete(self, *names: str) -> None:
        for name in names:
            self.log(f"delete {name}")
            self.cluster.delete(name)
            self.forged.discard(name)
            self.check()

    # kube-scheduler

    def ask(self, choices: Choices) -> None:
        """Try one pod as kube-scheduler."""
        if waiting := self.waiting():
            self.schedule(
                choices, pick(choices, waiting), self.suggested(choices), pick(choices, tuple(SchedulingPhase))
            )

    def ask_for_gang(self, choices: Choices) -> None:
        """Try every waiting pod of a gang as kube-scheduler."""
        if waiting := sorted({self.pods[name][1] for name in self.waiting()}):
            self.ask_for(choices, self.jobs[pick(choices, waiting)])

    def ask_for(self, choices: Choices, job: Job) -> None:
        suggested, phase = self.suggested(choices), pick(choices, tuple(SchedulingPhase))
        for name in [name for name in self.waiting() if self.pods[name][1] == job.name]:
            self.schedule(choices, name, suggested, phase)

    def waiting(self) -> list[str]:
        return list(self.cluster.waiting)

    def suggested(self, choices: Choices) -> list[str]:
        nodes = self.cluster.node_names
        return subset(choices, nodes) if one_in(choices, 4) else nodes

    def schedule(
        self, choices: Choices, name: str, suggested: Sequence[str], phase: SchedulingPhase
    ) -> PodScheduleResult | None:
        """Return one answer, checked and carried out; None if the user got an error.

        A pod that may be bound in the Preempting phase is only bound when kube-scheduler filters it again.
        """
        pod, job, leaves = self.pods[name]
        asked = checks.Asked.now(self.algorithm, self.jobs[job], leaves, suggested, phase)
        try:
            decision = self.algorithm.schedule(pod, suggested, phase)
        except UserError as error:
            self.log(f"{phase} {name}: {error}")
            checks.check_refusal(self.algorithm, asked, error)
            return None
        result = decision.result
        self.log(f"{phase} {name}, suggested {list(suggested)}: {checks.describe(result)}")
        checks.check_answer(self.cluster, asked, result)
        self.check()
        if result.pod_preempt_info is not None:
            self.victims += [name_of(victim) for victim in result.pod_preempt_info.victim_pods]
        if result.pod_bind_info is not None and (phase is FILTERING or choices.below(2)):
            self.bind(decision)
        checks.check_downgrades(self.cluster, asked)
        return result

    def bind(self, decision: Decision) -> None:
        """Bind the pod to its decided place."""
        self.log(f"bind {name_of(decision.pod)}")
        self.cluster.commit(decision)
        self.check()

    def evict(self, choices: Choices) -> None:
        """Evict, as kube-scheduler, one of the victims that were named, possibly earlier, or all of them."""
        self.victims = [name for name in self.victims if name in self.cluster.bound]
        if self.victims:
            victims = self.victims if one_in(choices, 2) else [pick(choices, self.victims)]
            self.delete(*dict.fromkeys(victims))

    # hardware

    def change_node(self, choices: Choices) -> None:
        """Break, cordon, delete or heal a node."""
        cluster = self.cluster
        changes: list[Callable[[str], None]] = [cluster.heal, cluster.break_, cluster.cordon, cluster.remove_node]
        name, change = pick(choices, cluster.node_names), pick(choices, changes)
        if name in cluster.nodes or change == cluster.heal:
            self.log(f"{change.__name__} {name}")
            change(name)
            self.check()

    def heal_all(self, choices: Choices) -> None:
        """Make every node healthy."""
        for name in shuffled(choices, self.cluster.node_names):
            self.cluster.heal(name)
            self.check()
        self.log("heal all")

    # the process

    def restart(self, choices: Choices) -> None:
        """Kill the process and recover; bindings in flight may be lost. The order of recovery does not matter."""
        self.lose_bindings(choices)
        if self.forged:
            self.spoil(*self.jobs)
        before = self.cluster
        first, second = self.recovered(choices, before.config), self.recovered(choices, before.config)
        self.log("restart")
        if not self.forged:
            checks.check_recovery(before, first, second)
        self.resume(first)

    def reconfigure(self, choices: Choices) -> None:
        """Change the file; running pods keep running."""
        config = changed(choices, self.plan)
        self.log(f"reconfigure {picture(config)}")
        if self.forged:
            self.spoil(*self.jobs)
        first, second = self.recovered(choices, config), self.recovered(choices, config)
        if not self.forged:
            checks.check_same_users(first, second)
        self.resume(first)

    def lose_bindings(self, choices: Choices) -> None:
        for name in subset(choices, self.cluster.bound) if one_in(choices, 3) else ():
            if name not in self.forged and choices.below(2):
                self.log(f"the binding of {name} is lost")
                self.cluster.delete(name)
                self.cluster.announce(self.pods[name][0])
                self.check()

    def recovered(self, choices: Choices, config: Object) -> Cluster:
        """Return a new process that has seen all nodes and bound pods, in any order."""
        cluster = Cluster(config, healthy=False)
        names = dict.fromkeys((*self.cluster.nodes, *cluster.node_names))
        events = [("node", name) for name in names] + [("pod", name) for name in self.cluster.bound]
        for kind, name in shuffled(choices, events):
            if kind == "pod":
                with suppress(UserError):
                    cluster.recover(self.cluster.bound[name])
            elif name in self.cluster.nodes:
                cluster.nodes[name] = self.cluster.nodes[name]
                cluster.algorithm.add_node(cluster.nodes[name])
            elif name not in self.cluster.node_names:
                cluster.heal(name)
            checks.check_state(cluster, self.forged)
        return cluster

    def resume(self, cluster: Cluster) -> None:
        for pod in self.cluster.waiting.values():
            cluster.announce(pod)
        self.cluster = cluster
        self.check()
