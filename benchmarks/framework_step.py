"""Milliseconds per step of one large Framework: nothing changed, one pod failed, and its status on the wire.

`python -m benchmarks.framework_step [--tasks N] [--repeat N]` prints one JSON line. The cost of a step grows with the
changes, plus one check of each task.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

from controllers.framework.api.types import Framework, FrameworkStatus
from controllers.framework.api.wire import decode_framework, decode_status, encode_status
from controllers.framework.config import FrameworkConfig
from controllers.framework.executor import build_config_map, build_pod
from controllers.framework.step.context import Create, Created, Outcome, Step
from controllers.framework.step.step import step
from store.kube.api.objects import Object, name_of

RUNNING = {"phase": "Running", "podIP": "10.0.0.1", "hostIP": "192.0.2.1"}
FAILED = {
    **RUNNING,
    "phase": "Failed",
    "containerStatuses": [{"name": "main", "state": {"terminated": {"exitCode": 1}}}],
}


class Cluster:
    """A Framework whose pods all run."""

    def __init__(self, tasks: int) -> None:
        template = {"spec": {"containers": [{"name": "main", "image": "example.org/work:1"}]}}
        self.framework: Framework = decode_framework(
            {
                "metadata": {"name": "job", "namespace": "default", "uid": "framework"},
                "spec": {"taskRoles": [{"name": "worker", "taskNumber": tasks, "task": {"pod": template}}]},
            }
        )
        self.config_map: Object | None = None
        self.pods: dict[str, Object] = {}
        self._rng, self._config = random.Random(0), FrameworkConfig()
        outcomes: list[Outcome] = []
        while (asked := self.step(*outcomes)).actions:
            self.framework = replace(self.framework, status=asked.status)
            outcomes = [self._create(action) for action in asked.actions if isinstance(action, Create)]
        self.framework = replace(self.framework, status=asked.status)

    def step(self, *outcomes: Outcome) -> Step:
        return step(
            self.framework,
            self.config_map,
            self.pods,
            now=datetime(2024, 5, 1, tzinfo=UTC),
            rng=self._rng,
            config=self._config,
            outcomes=outcomes,
        )

    def _create(self, action: Create) -> Outcome:
        if action.target is None:
            self.config_map = build_config_map(self.framework)
            self.config_map["metadata"]["uid"] = uid = "config-map"
        else:
            pod = {**build_pod(self.framework, action.target), "status": RUNNING}
            pod["metadata"]["uid"] = uid = name_of(pod)
            self.pods[name_of(pod)] = pod
        return Created(action.target, uid)

    def fail_one(self) -> None:
        name = next(iter(self.pods))
        self.pods[name] = {**self.pods[name], "status": FAILED}

    @property
    def status(self) -> FrameworkStatus:
        assert self.framework.status is not None
        return self.framework.status


def milliseconds(work: Callable[[], object], repeat: int) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        work()
    return round((time.perf_counter() - start) / repeat * 1000, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=50)
    arguments = parser.parse_args()
    cluster = Cluster(arguments.tasks)
    idle = milliseconds(cluster.step, arguments.repeat)
    wire = encode_status(cluster.status)
    cluster.fail_one()
    result = {
        "benchmark": "framework_step",
        "tasks": arguments.tasks,
        "idle_ms": idle,
        "one_failed_ms": milliseconds(cluster.step, arguments.repeat),
        "encode_ms": milliseconds(lambda: encode_status(cluster.status), arguments.repeat),
        "decode_ms": milliseconds(lambda: decode_status(wire), arguments.repeat),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
