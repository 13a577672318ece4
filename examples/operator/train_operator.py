"""An operator for TrainJobs: distributed training with one chief and any number of workers.

Copy this directory to write your own. One class holds what is particular to TrainJobs: the resource, the types that
have a service, the validation of a job, and what each pod must know about the others. rcfarm handles pods, services,
restarts, limits, clean-up, status, Events and recovery.

    kubectl apply -f crd.yaml
    python train_operator.py
    kubectl apply -f sample.yaml
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
import sys
import uuid

from controllers.jobs import BadSpec, JobOperator, JobView, gen_general_name
from store.kube.api import Object, Resource, name_of
from store.kube.client import KubeClient
from store.kube.leaderelection import Election, FencedApi

DEFAULT_PORT = 29500


class TrainJobs(JobOperator):
    """The job succeeds when its chief does. Every pod finds the chief by name, and knows its own rank."""

    resource = Resource("example.rcfarm.dev", "v1", "trainjobs", "TrainJob")
    service_types = ("Chief",)

    def view(self, job: Object) -> JobView:
        """Return the job as rcfarm sees it, after the checks that a schema can't make."""
        view = super().view(job)
        chief = view.replica_specs.get("Chief")
        if chief is None or chief.replicas != 1:
            raise BadSpec("spec.replicaSpecs.Chief.replicas: a TrainJob has exactly one chief")
        return view

    def set_cluster_spec(self, job: Object, pod: Object, replica_type: str, index: int) -> None:
        """Set the environment variables of torch.distributed. Variables that the template sets take precedence."""
        workers = job["spec"]["replicaSpecs"].get("Worker", {"replicas": 0})
        environment = {
            "MASTER_ADDR": gen_general_name(name_of(job), "Chief", 0),
            "MASTER_PORT": str(job["spec"].get("port", DEFAULT_PORT)),
            "WORLD_SIZE": str(1 + workers.get("replicas", 1)),
            "RANK": str(0 if replica_type == "Chief" else 1 + index),
        }
        ours = [{"name": name, "value": value} for name, value in environment.items()]
        for container in pod["spec"]["containers"]:
            container["env"] = [*ours, *container.get("env", ())]


async def operate(arguments: argparse.Namespace) -> None:
    """Run the jobs until cancelled; with a lease, only while no other replica of this operator does."""
    async with await KubeClient.connect(arguments.kubeconfig) as api:
        if not await api.served(TrainJobs.resource):
            sys.exit("the API server does not know TrainJobs: kubectl apply -f crd.yaml")
        if arguments.lease is None:
            await TrainJobs(api, namespace=arguments.namespace).run()
        else:
            namespace, _, name = arguments.lease.rpartition("/")
            election = Election(api, namespace or "default", name, f"{socket.gethostname()}_{uuid.uuid4()}")
            await election.run(TrainJobs(FencedApi(api, election), namespace=arguments.namespace).run)


async def main(arguments: argparse.Namespace) -> None:
    """Operate until SIGTERM or SIGINT; syncs in flight are finished."""
    operating = asyncio.create_task(operate(arguments))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, operating.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await operating


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Runs TrainJobs.")
    parser.add_argument("--kubeconfig", help="default: $KUBECONFIG, the cluster that it runs in, ~/.kube/config")
    parser.add_argument("--namespace", default="", help="whose jobs to run; default: of all namespaces")
    parser.add_argument("--lease", metavar="NAMESPACE/NAME", help="for several replicas: what the leader holds")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main(parse_arguments()))
