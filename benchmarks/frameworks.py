"""Speed of Frameworks on a real control plane, compared with a kopf operator of equal duty.

Run: python -m benchmarks.frameworks [FRAMEWORKS] [TASKS]. Each operator has its own control plane (etcd, API server,
scheduler, controllers; only the kubelets are hollow, in another process) and runs the same Frameworks, all created at
once, to Completed. Its requests are counted in the API server's audit log. Needs the servers in `$RCFARM_SERVERS`
(`.servers`). kopf is installed into its own environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.fleet import report, servers_required
from controllers.framework.api.types import FRAMEWORKS
from controllers.framework.api.wire import crd
from store.kube.api.objects import Object, Resource
from store.kube.client.client import KubeClient
from store.kube.informer.informer import Informer
from tests.support.kube.control_plane import ControlPlane

NODES = 50
CREATORS = 8  # Frameworks that are created at once
NAMESPACE = "default"
LIMIT = 600.0  # seconds after which an operator has failed
WRITES = ("create", "update", "patch", "delete")
_KOPF = ("kopf", "aiohttp", "pyyaml", "uvloop")
_AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived", "ResponseStarted"],
    "rules": [{"level": "Metadata", "userGroups": ["system:serviceaccounts"]}, {"level": "None"}],
}
_EVERYTHING = [
    {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]},
]


@dataclass(frozen=True)
class Operator:
    """An operator, started by `command`; it finds the cluster by `KUBECONFIG`."""

    name: str
    command: Sequence[str]


def framework(number: int, tasks: int) -> Object:
    """Return a Framework of two roles whose pods run for half a second and succeed."""
    template = {
        "metadata": {"annotations": {"hollow/exit-code": "0", "hollow/run-seconds": "0.5"}},
        "spec": {"restartPolicy": "Never", "containers": [{"name": "main", "image": "example.org/task:1"}]},
    }
    roles = [
        {"name": name, "taskNumber": count, "task": {"pod": template}}
        for name, count in (("ps", 1), ("worker", tasks - 1))
    ]
    return {
        "apiVersion": FRAMEWORKS.api_version,
        "kind": FRAMEWORKS.kind,
        "metadata": {"name": f"job{number:04}", "namespace": NAMESPACE},
        "spec": {"executionType": "Start", "taskRoles": roles},
    }


RCFARM = Operator("rcfarm", [sys.executable, "-m", "rcfarm", "jobs", "--listen", "off", "--log-level", "warning"])


@dataclass(frozen=True)
class Workload:
    """Jobs to run: `kind` names them in the report; `body` makes the one with this number and these pods; `is_done`
    tells whether it has ended well. `definition` is its CustomResourceDefinition."""

    kind: str
    resource: Resource
    definition: Object
    body: Callable[[int, int], Object]
    is_done: Callable[[Object], bool]


def is_completed(obj: Object) -> bool:
    return (obj.get("status") or {}).get("state") == "Completed"


FRAMEWORK_JOBS = Workload("framework", FRAMEWORKS, crd(), framework, is_completed)


@contextmanager
def cluster(directory: Path, definition: Object) -> Iterator[ControlPlane]:
    """Run a control plane that writes an audit log, with its scheduler and hollow nodes."""
    policy = directory / "audit-policy.yaml"
    policy.write_text(json.dumps(_AUDIT))
    flags = [f"--audit-policy-file={policy}", f"--audit-log-path={_audit_log(directory)}", "--audit-log-mode=batch"]
    plane = ControlPlane(directory / "plane", apiserver_flags=flags)
    with ExitStack() as stack:
        stack.callback(plane.close)
        plane.start()
        plane.install(definition)
        plane.start_scheduler()
        command = [sys.executable, "-m", "benchmarks.hollow_nodes", str(plane.kubeconfig), str(NODES)]
        nodes = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        stack.callback(nodes.wait)
        stack.callback(nodes.kill)
        assert nodes.stdout is not None
        assert nodes.stdout.readline() == "ready\n", "the hollow nodes did not start"
        yield plane


def _audit_log(directory: Path) -> Path:
    return directory / "audit.log"


async def run(operator: Operator, count: int, tasks: int, work: Workload = FRAMEWORK_JOBS) -> float:
    """Measure from the first creation until all jobs have ended well. Return the seconds."""
    with tempfile.TemporaryDirectory() as name, cluster(Path(name), work.definition) as plane:
        token = plane.create_user(_EVERYTHING, namespace=NAMESPACE, everywhere=True)
        kubeconfig = plane.write_kubeconfig(Path(name) / "operator.kubeconfig", token=token)
        log = Path(name) / "operator.log"
        with log.open("wb") as output:
            process = psutil.Popen(
                operator.command, env={**os.environ, "KUBECONFIG": str(kubeconfig)}, stdout=output, stderr=output
            )
        try:
            async with await KubeClient.connect(str(plane.kubeconfig)) as api:
                await run_all(api, work, [work.body(9999, tasks)])  # until the operator works
                before = requests_in(Path(name))
                seconds = await run_all(api, work, [work.body(number, tasks) for number in range(count)])
            used, memory = process.cpu_times(), process.memory_info().rss
            await asyncio.sleep(2)  # the audit log is written in batches
        except BaseException:
            print(log.read_text()[-3000:], file=sys.stderr)
            raise
        finally:
            process.kill()
            process.wait()
        requests = requests_in(Path(name)) - before
    report(
        f"{work.kind}s_{operator.name}",
        **{f"{work.kind}s": count},
        tasks=tasks,
        seconds=round(seconds, 1),
        **{f"{work.kind}s_per_second": round(count / seconds, 1)},
        requests_per_job=round(requests.total() / count, 1),
        writes_per_job=round(sum(requests[verb] for verb in WRITES) / count, 1),
        by_verb={verb: round(number / count, 2) for verb, number in sorted(requests.items())},
        cpu_seconds=round(used.user + used.system, 1),
        rss_mb=round(memory / 1e6),
    )
    return seconds


async def run_all(api: KubeClient, work: Workload, bodies: Sequence[Object]) -> float:
    """Create the jobs and wait until each is done. Return the seconds."""
    informer = Informer(api, work.resource, namespace=NAMESPACE)
    waiter = _Waiter({body["metadata"]["name"] for body in bodies}, work.is_done)
    informer.add_handler(waiter)
    watching = asyncio.create_task(informer.run())
    slots = asyncio.Semaphore(CREATORS)

    async def create(body: Object) -> None:
        async with slots:
            await api.create(work.resource, body, NAMESPACE)

    try:
        async with asyncio.timeout(LIMIT):
            await informer.synced()
            began = time.perf_counter()
            await asyncio.gather(*map(create, bodies))
            await waiter.done.wait()
            return time.perf_counter() - began
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


class _Waiter:
    """Waits until the jobs of these names are done."""

    def __init__(self, names: set[str], is_done: Callable[[Object], bool]) -> None:
        self._names, self._is_done = names, is_done
        self.done = asyncio.Event()

    def added(self, obj: Object) -> None:
        if self._is_done(obj):
            self._names.discard(obj["metadata"]["name"])
        if not self._names:
            self.done.set()

    def updated(self, old: Object, new: Object) -> None:
        self.added(new)

    def deleted(self, obj: object) -> None:
        pass


def requests_in(directory: Path) -> Counter[str]:
    """Count the operator's requests by verb, without watches and discovery, which are not work on jobs."""
    log = _audit_log(directory)
    whole, _, _ = (log.read_text() if log.exists() else "").rpartition("\n")  # the last line may be half written
    events = [json.loads(line) for line in whole.splitlines()]
    asked = [event["verb"] for event in events if "objectRef" in event and not event["requestURI"].startswith("/apis?")]
    return Counter(verb for verb in asked if verb != "watch")


def kopf_operator(directory: Path) -> Operator:
    """Install kopf into its own environment, with the fast event loop."""
    if not (directory / "bin" / "kopf").exists():
        venv.create(directory, with_pip=True)
        subprocess.run([directory / "bin" / "pip", "install", "--quiet", *_KOPF], check=True)
    script = str(Path(__file__).with_name("kopf_operator.py"))
    return Operator("kopf", [str(directory / "bin" / "kopf"), "run", "--quiet", "--namespace", NAMESPACE, script])


def main() -> None:
    count, tasks = (int(text) for text in (sys.argv[1:] + ["300", "4"][len(sys.argv) - 1 :])[:2])
    with tempfile.TemporaryDirectory() as directory:
        for operator in (RCFARM, kopf_operator(Path(directory) / "kopf")):
            asyncio.run(run(operator, count, tasks))


if __name__ == "__main__":
    with servers_required():
        main()
