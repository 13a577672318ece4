"""A cluster that lives at random, and what must hold in it after every step.

The world stands where kube-scheduler, users and hardware stand: it submits gangs, asks for them in either phase, evicts
what it is told to, loses and heals nodes, restarts and reconfigures. `checks` compares each answer with the world's own
books, and the state with the invariants. `story` tells what happened, to be read by people.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from contextlib import suppress

from scheduler.hived.algorithm import HivedAlgorithm
from scheduler.hived.constants import POD_SCHEDULING_SPEC
from scheduler.hived.errors import UserError
from scheduler.hived.pod_contract import PodBindInfo, new_binding_pod
from scheduler.hived.types import PodScheduleResult, SchedulingPhase
from store.kube.objects import Object, name_of
from tests.property.hived import checks
from tests.property.hived.choices import Choices, one_in, pick, shuffled, subset
from tests.property.hived.configurations import changed, picture, random_plan
from tests.property.hived.jobs import random_job
from tests.support.hived import FILTERING, Cluster, Job, pod_object

MOST_WAITING = 8


class World:
    """`jobs`: what was submitted, by group; `pods`: as submitted, with group and leaves; `victims`: whom kube-scheduler
    was told to evict. `forged`: pods that lie, and those of `forged_jobs`, whose places they may have spoilt.
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

    def tell(self, event: str) -> None:
        self.story.append(event)

    def number(self) -> int:
        """One that no name has yet."""
        return next(self._numbers)

    # users

    def submit(self, choices: Choices) -> None:
        """A user submits a gang, which kube-scheduler may try at once; or gives up the one that waits longest."""
        if len(self.cluster.waiting) >= MOST_WAITING:
            self.delete(*self.pods_of(self.pods[self.waiting()[0]][1]))
        else:
            job = self.announce(self.random_job(choices))
            if not one_in(choices, 3):
                self.ask_for(choices, job)

    def random_job(self, choices: Choices) -> Job:
        return random_job(choices, f"g{self.number()}", self.algorithm.topology)

    def announce(self, job: Job) -> Job:
        """All pods of a job are seen."""
        self.jobs[job.name] = job
        self.tell(f"submit {job}")
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
        """What these jobs hold is no longer to be relied on."""
        self.forged_jobs.update(jobs)
        self.forged.update(name for job in jobs for name in self.pods_of(job))

    def delete_pod(self, choices: Choices) -> None:
        """A user deletes a pod, or it ends."""
        if names := list(self.cluster.bound) or self.waiting():
            self.delete(pick(choices, names))

    def delete_job(self, choices: Choices) -> None:
        """A user deletes a gang, its pods go in any order."""
        jobs = sorted({self.pods[name][1] for name in (*self.cluster.bound, *self.cluster.waiting)})
        if jobs:
            self.delete(*shuffled(choices, self.pods_of(pick(choices, jobs))))

    def pods_of(self, job: str) -> list[str]:
        """Names of its pods that live."""
        return [name for name in (*self.cluster.bound, *self.cluster.waiting) if self.pods[name][1] == job]

    def delete(self, *names: str) -> None:
        for name in names:
            self.tell(f"delete {name}")
            self.cluster.delete(name)
            self.forged.discard(name)
            self.check()

    # kube-scheduler

    def ask(self, choices: Choices) -> None:
        """It tries one pod."""
        if waiting := self.waiting():
            self.schedule(
                choices, pick(choices, waiting), self.suggested(choices), pick(choices, tuple(SchedulingPhase))
            )

    def ask_for_gang(self, choices: Choices) -> None:
        """It tries every waiting pod of a gang."""
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
        """One answer, checked and carried out; None if the user was told of a mistake.

        A pod that may be bound in the Preempting phase is only bound when kube-scheduler filters it again.
        """
        pod, job, leaves = self.pods[name]
        asked = checks.Asked.now(self.algorithm, self.jobs[job], leaves, suggested, phase)
        try:
            result = self.algorithm.schedule(pod, suggested, phase)
        except UserError as error:
            self.tell(f"{phase} {name}: {error}")
            checks.check_refusal(self.algorithm, asked, error)
            return None
        self.tell(f"{phase} {name}, suggested {list(suggested)}: {checks.told(result)}")
        checks.check_answer(self.cluster, asked, result)
        self.check()
        if result.pod_preempt_info is not None:
            self.victims += [name_of(victim) for victim in result.pod_preempt_info.victim_pods]
        if result.pod_bind_info is not None and (phase is FILTERING or choices.below(2)):
            self.bind(name, result.pod_bind_info)
        checks.check_downgrades(self.cluster, asked)
        return result

    def bind(self, name: str, info: PodBindInfo) -> None:
        """The pod gets the place that it was given."""
        self.tell(f"bind {name}")
        self.cluster.bound[name] = new_binding_pod(self.cluster.waiting.pop(name), info)
        self.algorithm.add_allocated_pod(self.cluster.bound[name])
        self.check()

    def evict(self, choices: Choices) -> None:
        """It evicts one of the victims that it was told of, some time ago maybe, or all of them."""
        self.victims = [name for name in self.victims if name in self.cluster.bound]
        if self.victims:
            victims = self.victims if one_in(choices, 2) else [pick(choices, self.victims)]
            self.delete(*dict.fromkeys(victims))

    # hardware

    def change_node(self, choices: Choices) -> None:
        """A node breaks, is cordoned, deleted, or heals."""
        cluster = self.cluster
        changes: list[Callable[[str], None]] = [cluster.heal, cluster.break_, cluster.cordon, cluster.remove_node]
        name, change = pick(choices, cluster.node_names), pick(choices, changes)
        if name in cluster.nodes or change == cluster.heal:
            self.tell(f"{change.__name__} {name}")
            change(name)
            self.check()

    def heal_all(self, choices: Choices) -> None:
        """Every node is well again."""
        for name in shuffled(choices, self.cluster.node_names):
            self.cluster.heal(name)
            self.check()
        self.tell("heal all")

    # the process

    def restart(self, choices: Choices) -> None:
        """It dies and recovers; bindings that were under way may be lost. The order of recovery does not matter."""
        self.lose_bindings(choices)
        if self.forged:
            self.spoil(*self.jobs)
        before = self.cluster
        first, second = self.recovered(choices, before.config), self.recovered(choices, before.config)
        self.tell("restart")
        if not self.forged:
            checks.check_recovery(before, first, second)
        self.resume(first)

    def reconfigure(self, choices: Choices) -> None:
        """The file has changed: whoever runs keeps running."""
        config = changed(choices, self.plan)
        self.tell(f"reconfigure {picture(config)}")
        if self.forged:
            self.spoil(*self.jobs)
        first, second = self.recovered(choices, config), self.recovered(choices, config)
        if not self.forged:
            checks.check_same_users(first, second)
        self.resume(first)

    def lose_bindings(self, choices: Choices) -> None:
        for name in subset(choices, self.cluster.bound) if one_in(choices, 3) else ():
            if name not in self.forged and choices.below(2):
                self.tell(f"the binding of {name} is lost")
                self.cluster.delete(name)
                self.cluster.announce(self.pods[name][0])
                self.check()

    def recovered(self, choices: Choices, config: Object) -> Cluster:
        """A new process that has seen all nodes and bound pods, in any order."""
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
