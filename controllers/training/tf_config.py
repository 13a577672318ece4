"""The variable `TF_CONFIG` of a TFJob's pods: pure.

It is compact JSON with the training-operator's order of fields, because programs and tests compare it as text. The
dense form has the addresses of all replicas. With dynamic workers the sparse form has only what the pod dials: so a
worker can join or leave without the environment of the others becoming wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import msgspec

from controllers.jobs.api import ReplicaSpec, gen_general_name
from controllers.training.spec import Port, port_of

CHIEF, EVALUATOR, MASTER, PS, WORKER = TYPES = ("Chief", "Evaluator", "Master", "PS", "Worker")
CONTAINER = "tensorflow"
PORT = Port("tfjob-port", 2222)
VARIABLE = "TF_CONFIG"


class Cluster:
    """The addresses of a job's replicas. `replicas`: with defaults, by type; types without replicas count as absent.

    `domain`: that of the cluster, such as `cluster.local`, or "".
    """

    def __init__(self, job_name: str, namespace: str, replicas: Mapping[str, ReplicaSpec], domain: str = "") -> None:
        self._name, self._suffix = job_name, ".".join(filter(None, (namespace, "svc", domain)))
        self._replicas = {name: replica for name, replica in replicas.items() if replica.replicas}

    @property
    def is_distributed(self) -> bool:
        """False for a job of one replica, which needs no addresses. Types that TensorFlow does not know don't count."""
        return sum(replica.replicas for name, replica in self._replicas.items() if name in TYPES) != 1

    def address(self, replica_type: str, index: int) -> str:
        port = port_of(self._replicas[replica_type].template, CONTAINER, PORT)
        return f"{gen_general_name(self._name, replica_type, index)}.{self._suffix}:{port}"

    def addresses(self, replica_type: str) -> list[str]:
        return [self.address(replica_type, index) for index in range(self._replicas[replica_type].replicas)]

    def dense(self, replica_type: str, index: int) -> str:
        """Return the configuration with all replicas of all types."""
        task = {"type": replica_type.lower(), "index": index}
        return msgspec.json.encode({"cluster": self._all, "task": task, "environment": "cloud"}).decode()

    @cached_property
    def _all(self) -> msgspec.Raw:  # encoded once: it is the same for all pods, and long for many
        types = sorted(self._replicas, key=str.lower)
        return msgspec.Raw(msgspec.json.encode({name.lower(): self.addresses(name) for name in types}))

    def sparse(self, replica_type: str, index: int) -> str:
        """Return the configuration of a pod with dynamic workers: a worker has itself and the parameter servers; a
        parameter server has only itself; another type has itself, which the training-operator leaves out, and the
        parameter servers.
        """
        servers = self.addresses(PS) if PS in self._replicas else None
        own = {} if replica_type == PS else {str(index): self.address(replica_type, index)}
        cluster: dict[str, Any] = {"worker": {}, "ps": servers or []}
        if replica_type == WORKER:
            cluster = {"worker": own, "ps": servers}
        elif replica_type == PS:
            cluster["ps"] = [self.address(PS, index)]
        else:
            cluster[replica_type.lower()] = own
        task = {"type": replica_type.lower(), "index": index}
        return msgspec.json.encode({"cluster": cluster, "task": task}).decode()
