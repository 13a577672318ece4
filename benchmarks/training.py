"""Speed of training jobs on a real control plane, beside that of Frameworks in the same run, and the cost of idle ones.

Run: python -m benchmarks.training [JOBS] [PODS] [IDLE]. As `benchmarks.frameworks`, without its comparison: first
Frameworks, then PyTorchJobs of as many pods, all created at once, to their end. Then IDLE jobs of one pod that runs for
ever: what the operator needs for them, over a minute in which nothing happens.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path

import psutil

from benchmarks.fleet import report, servers_required
from benchmarks.frameworks import NAMESPACE, RCFARM, Workload, cluster, run, run_all
from controllers.jobs.status import decode_status
from controllers.training.kinds import definition
from controllers.training.pytorch import PYTORCH_JOBS, PyTorchJobs
from store.kube.api.objects import Object
from store.kube.client.client import KubeClient

QUIET = 60.0  # seconds
SETTLE = 240.0  # seconds until the operator looks at an idle job only every five minutes


def pytorch_job(number: int, pods: int, *, seconds: float = 0.5) -> Object:
    """Return a master and workers whose pods run for this time and succeed."""
    plan = {"hollow/exit-code": "0", "hollow/run-seconds": str(seconds)}
    spec = {"containers": [{"name": "pytorch", "image": "example.org/task:1"}]}
    template = {"metadata": {"annotations": plan}, "spec": spec}
    counts = {"Master": 1, "Worker": pods - 1}
    return {
        "apiVersion": PYTORCH_JOBS.api_version,
        "kind": PYTORCH_JOBS.kind,
        "metadata": {"name": f"job{number:04}", "namespace": NAMESPACE},
        "spec": {
            "pytorchReplicaSpecs": {
                name: {"replicas": count, "restartPolicy": "Never", "template": template}
                for name, count in counts.items()
                if count
            }
        },
    }


def has_succeeded(job: Object) -> bool:
    return decode_status(job.get("status")).has("Succeeded")


def is_running(job: Object) -> bool:
    return decode_status(job.get("status")).has("Running")


def idle_job(number: int, pods: int) -> Object:
    return pytorch_job(number, pods, seconds=float("inf"))


DEFINITION = definition(PyTorchJobs)
TO_THE_END = Workload("pytorchjob", PYTORCH_JOBS, DEFINITION, pytorch_job, has_succeeded)
IDLE = Workload("pytorchjob", PYTORCH_JOBS, DEFINITION, idle_job, is_running)


async def idle(count: int) -> None:
    """Measure an operator whose jobs all run and need nothing, beside the same one with one job."""
    with tempfile.TemporaryDirectory() as name, cluster(Path(name), DEFINITION) as plane:
        environ = {**os.environ, "KUBECONFIG": str(plane.kubeconfig)}
        with (Path(name) / "operator.log").open("wb") as log:
            process = psutil.Popen(RCFARM.command, env=environ, stdout=log, stderr=log)
        try:
            async with await KubeClient.connect(str(plane.kubeconfig)) as api:
                await run_all(api, IDLE, [idle_job(9999, 1)])
                alone = process.memory_info().rss
                await run_all(api, IDLE, [idle_job(number, 1) for number in range(count)])
            await asyncio.sleep(SETTLE)
            before = process.cpu_times()
            await asyncio.sleep(QUIET)
            used, memory = process.cpu_times(), process.memory_info().rss
        finally:
            process.kill()
            process.wait()
    spent = used.user + used.system - before.user - before.system
    report(
        "pytorchjobs_idle",
        pytorchjobs=count,
        core_percent=round(100 * spent / QUIET, 2),
        rss_mb=round(memory / 1e6),
        more_mb=round((memory - alone) / 1e6),
    )


def main() -> None:
    given = [int(text) for text in sys.argv[1:]]
    count, pods, idle_jobs = given + [300, 4, 1000][len(given) :]
    if count:
        frameworks = asyncio.run(run(RCFARM, count, pods))
        jobs = asyncio.run(run(RCFARM, count, pods, TO_THE_END))
        report("pytorchjobs_beside_frameworks", times=round(jobs / frameworks, 2))
    if idle_jobs:
        asyncio.run(idle(idle_jobs))


if __name__ == "__main__":
    with servers_required():
        main()
