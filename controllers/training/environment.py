"""What the pods of a PyTorchJob must know about each other, as environment variables: pure.

torch reads two families. `MASTER_ADDR`, `MASTER_PORT`, `RANK` and `WORLD_SIZE` are for programs that call
`init_process_group` themselves. `PET_*` are the defaults of torchrun's options. Names, values and their order are the
training-operator's since 1.7: the world counts processes (`nprocPerNode` in each pod), ranks count pods.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from controllers.jobs.api import ReplicaSpec, gen_general_name
from controllers.training.spec import Port, port_of
from store.kube.api.objects import Object

MASTER, WORKER = "Master", "Worker"
CONTAINER = "pytorch"
PORT = Port("pytorchjob-port", 23456)
AUTOMATIC = "auto"
NAMED_PROCESSES = (AUTOMATIC, "cpu", "gpu")
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


class RendezvousOption(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `rdzvConf`."""

    key: str = ""
    value: str = ""


class ElasticPolicy(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """How workers may come and go. Counts are of workers, except `n_proc_per_node`, processes in each.

    `metrics`: those of an autoscaling/v2 HorizontalPodAutoscaler, undecoded.
    """

    min_replicas: int | None = None
    max_replicas: int | None = None
    rdzv_backend: str | None = None
    rdzv_port: int | None = None
    rdzv_host: str | None = None
    rdzv_id: str | None = None
    rdzv_conf: list[RendezvousOption] | None = None
    standalone: bool | None = None
    n_proc_per_node: int | None = None
    max_restarts: int | None = None
    metrics: list[Object] | None = None


class PyTorchSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The fields of a PyTorchJob's spec beside replicas and run policy."""

    nproc_per_node: str | None = None
    elastic_policy: ElasticPolicy | None = None

    @property
    def processes(self) -> int | None:
        """The number of processes per pod; None if torchrun finds it."""
        text = self.nproc_per_node
        return int(text) if text is not None and _INTEGER.fullmatch(text) else None


def elastic_bounds(policy: ElasticPolicy, workers: int) -> tuple[int, int]:
    """Return the least and the largest number of workers. A missing bound is the other; both missing: `workers`."""
    bounds = [bound for bound in (policy.min_replicas, policy.max_replicas) if bound is not None] or [workers]
    return bounds[0], bounds[-1]


def variables(
    job_name: str,
    replicas: Mapping[str, ReplicaSpec],
    spec: PyTorchSpec,
    replica_type: str,
    index: int,
    *,
    worker_master: bool = False,
) -> dict[str, str]:
    """Return the variables of one pod, in their order. `replicas`: with defaults, by type. `worker_master`: whether
    worker 0 is the master of workers that have neither a master nor an elastic policy.
    """
    total, elastic = sum(replica.replicas for replica in replicas.values()), spec.elastic_policy
    found = {"PYTHONUNBUFFERED": "1"}
    if master := MASTER if MASTER in replicas else WORKER if worker_master and elastic is None else "":
        port = str(port_of(replicas[master].template, CONTAINER, PORT))
        address = gen_general_name(job_name, master, 0)
        rank = str(index if replica_type == master else index + 1)
        found |= {"MASTER_PORT": port, "PET_MASTER_PORT": port, "MASTER_ADDR": address, "PET_MASTER_ADDR": address}
        world = total * (1 if spec.processes is None else spec.processes)
        found |= {"WORLD_SIZE": str(world), "RANK": rank, "PET_NODE_RANK": rank}
    if elastic is None or elastic.n_proc_per_node is None:
        found["PET_NPROC_PER_NODE"] = spec.nproc_per_node or AUTOMATIC
    if elastic is None:
        return found | {"PET_NNODES": str(total)}
    workers = replicas[WORKER]
    least, largest = elastic_bounds(elastic, workers.replicas)
    host = elastic.rdzv_host or gen_general_name(job_name, WORKER, 0)
    rendezvous_port = port_of(workers.template, CONTAINER, PORT) if elastic.rdzv_port is None else elastic.rdzv_port
    options = ",".join(f"{option.key}={option.value}" for option in elastic.rdzv_conf or ())
    optional = {
        "PET_MAX_RESTARTS": None if elastic.max_restarts is None else str(elastic.max_restarts),
        "PET_NPROC_PER_NODE": None if elastic.n_proc_per_node is None else str(elastic.n_proc_per_node),
        "PET_RDZV_ID": elastic.rdzv_id,
        "PET_RDZV_CONF": options or None,
        "PET_STANDALONE": "" if elastic.standalone else None,
    }
    return found | {
        "PET_RDZV_ENDPOINT": f"{host}:{rendezvous_port}",
        "PET_RDZV_BACKEND": elastic.rdzv_backend or "c10d",
        "PET_NNODES": f"{least}:{largest}",
        **{name: value for name, value in optional.items() if value is not None},
    }
