"""An operator for XGBoostJobs of kubeflow's training-operator: a master, and workers that find it.

A third kind beside PyTorchJob and TFJob, to copy for your own. One class holds what is particular to it: names, the
checks of a job, and what each pod must know about the others.

    python xgboost_operator.py --definition | kubectl apply -f -
    python xgboost_operator.py
    kubectl apply -f xgboost.yaml
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Mapping

from controllers.jobs import BadSpec, ReplicaSpec, gen_general_name
from controllers.training import Port, TrainingJobs, append_variables, definition, port_of
from store.kube.api import Object, Resource, name_of
from store.kube.client import KubeClient


class XGBoostJobs(TrainingJobs):
    """The job succeeds with its master. Every pod finds it, and knows its own rank; LightGBM needs all workers."""

    resource = Resource("kubeflow.org", "v1", "xgboostjobs", "XGBoostJob")
    framework = "xgboost"
    replica_specs_field = "xgbReplicaSpecs"
    replica_types = ("Master", "Worker")
    chief_types = ("Master",)
    default_container = "xgboost"
    default_port = Port("xgboostjob-port", 9999)

    def check(self, job: Object, replicas: Mapping[str, ReplicaSpec]) -> list[str]:
        """Refuse a job without its one master, whose address all pods need."""
        if "Master" not in replicas or replicas["Master"].replicas != 1:
            raise BadSpec("spec.xgbReplicaSpecs.Master.replicas: an XGBoostJob has exactly one master")
        return super().check(job, replicas)

    def set_cluster_spec(self, job: Object, pod: Object, replica_type: str, index: int) -> None:
        """Set the variables of XGBoost's and LightGBM's images in every container."""
        super().set_cluster_spec(job, pod, replica_type, index)
        replicas = self.replicas(job)
        workers = replicas["Worker"].replicas if "Worker" in replicas else 0
        variables = {
            "MASTER_PORT": self.port(replicas["Master"]),
            "MASTER_ADDR": gen_general_name(name_of(job), "Master", 0),
            "WORLD_SIZE": str(1 + workers),
            "RANK": str(0 if replica_type == "Master" else 1 + index),
            "PYTHONUNBUFFERED": "1",
        }
        if workers:
            names = (gen_general_name(name_of(job), "Worker", number) for number in range(workers))
            variables |= {"WORKER_PORT": self.port(replicas["Worker"]), "WORKER_ADDRS": ",".join(names)}
        for container in pod["spec"]["containers"]:
            append_variables(container, variables)

    def port(self, spec: ReplicaSpec) -> str:
        return str(port_of(spec.template, self.default_container, self.default_port))


async def operate(namespace: str) -> None:
    """Run the jobs until cancelled."""
    async with await KubeClient.connect() as api:
        if not await api.served(XGBoostJobs.resource):
            sys.exit("the API server does not know XGBoostJobs: apply what --definition prints")
        await XGBoostJobs(api, namespace=namespace).run()


async def main(namespace: str) -> None:
    """Operate until SIGTERM or SIGINT; syncs in flight are finished."""
    operating = asyncio.create_task(operate(namespace))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, operating.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await operating


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Runs XGBoostJobs.")
    parser.add_argument("--namespace", default="", help="whose jobs to run; default: of all namespaces")
    parser.add_argument("--definition", action="store_true", help="print the CustomResourceDefinition, and end")
    arguments = parser.parse_args()
    if arguments.definition:
        print(json.dumps(definition(XGBoostJobs), indent=2))
    else:
        asyncio.run(main(arguments.namespace))
