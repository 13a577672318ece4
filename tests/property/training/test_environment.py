"""The variables of pods equal, byte for byte, what tables say that were written from the original's
documentation. The tables know only the plan of a job, not how the operator reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from controllers.training.options import TrainingOptions
from controllers.training.pytorch import PyTorchJobs
from controllers.training.tensorflow import TFJobs
from store.kube.api.objects import Object
from store.kube.memory.kube import MemoryKube
from tests.support.training.manifests import built_pod, environment, pytorch_job, template, tf_job

PYTORCH_OPERATOR = PyTorchJobs(MemoryKube())
TF_OPERATORS = {
    domain: TFJobs(MemoryKube(), options=TrainingOptions(cluster_domain=domain)) for domain in ("", "cluster.local")
}

names = st.from_regex(r"[a-z][a-z0-9]{0,10}(-[a-z0-9]{1,5})?", fullmatch=True)
texts = st.text("abc=,: $é", max_size=5)
numbers = st.integers(0, 9)


@dataclass(frozen=True)
class PyTorchPlan:
    """A PyTorchJob in short. A port or a number of None stands for the default; -1 for a type that is absent."""

    name: str
    masters: int  # 1 or -1
    workers: int
    master_port: int | None
    worker_port: int | None
    processes: str | None
    elastic: dict[str, Any] | None

    @property
    def total(self) -> int:
        return max(self.masters, 0) + max(self.workers, 0)

    @property
    def world(self) -> int:
        known = {None: 1, "auto": 1, "cpu": 1, "gpu": 1, "many": 1}
        return self.total * (known[self.processes] if self.processes in known else int(self.processes or ""))

    def policy(self, field: str, default: Any = None) -> Any:
        return (self.elastic or {}).get(field, default)

    @property
    def bounds(self) -> str:
        least, largest = self.policy("minReplicas"), self.policy("maxReplicas")
        known = [bound for bound in (least, largest) if bound is not None] or [self.workers]
        return f"{known[0]}:{known[-1]}"

    def manifest(self) -> Object:
        ports = {"Master": self.master_port, "Worker": self.worker_port}
        counts = {"Master": self.masters, "Worker": self.workers}
        types: dict[str, Any] = {}
        for kind, count in counts.items():
            if count >= 0:
                port = ports[kind]
                listed = {"other": 80} if port is None else {"other": 80, "pytorchjob-port": port}
                types[kind] = {"replicas": count, "template": template("pytorch", ports=listed)}
        spec = {} if self.processes is None else {"nprocPerNode": self.processes}
        return pytorch_job(
            self.name, spec=spec | ({} if self.elastic is None else {"elasticPolicy": self.elastic}), **types
        )


Cell = Callable[[PyTorchPlan, str, int], str | None]  # the value in the pod of this type and index; None: no variable


def with_master(value: Callable[[PyTorchPlan, str, int], object]) -> Cell:
    return lambda plan, kind, index: str(value(plan, kind, index)) if plan.masters > 0 else None


def if_elastic(value: Callable[[PyTorchPlan], object]) -> Cell:
    def cell(plan: PyTorchPlan, kind: str, index: int) -> str | None:
        found = None if plan.elastic is None else value(plan)
        return None if found is None else str(found)

    return cell


PYTORCH: list[tuple[str, Cell]] = [
    ("PYTHONUNBUFFERED", lambda plan, kind, index: "1"),
    ("MASTER_PORT", with_master(lambda plan, kind, index: plan.master_port or 23456)),
    ("PET_MASTER_PORT", with_master(lambda plan, kind, index: plan.master_port or 23456)),
    ("MASTER_ADDR", with_master(lambda plan, kind, index: f"{plan.name}-master-0")),
    ("PET_MASTER_ADDR", with_master(lambda plan, kind, index: f"{plan.name}-master-0")),
    ("WORLD_SIZE", with_master(lambda plan, kind, index: plan.world)),
    ("RANK", with_master(lambda plan, kind, index: {"Master": 0, "Worker": index + 1}[kind])),
    ("PET_NODE_RANK", with_master(lambda plan, kind, index: {"Master": 0, "Worker": index + 1}[kind])),
    (
        "PET_NPROC_PER_NODE",
        lambda plan, kind, index: None if plan.policy("nProcPerNode") is not None else plan.processes or "auto",
    ),
    ("PET_NNODES", lambda plan, kind, index: str(plan.total) if plan.elastic is None else None),
    (
        "PET_RDZV_ENDPOINT",
        if_elastic(
            lambda plan: (
                f"{plan.policy('rdzvHost', plan.name + '-worker-0')}:"
                f"{plan.policy('rdzvPort', plan.worker_port or 23456)}"
            )
        ),
    ),
    ("PET_RDZV_BACKEND", if_elastic(lambda plan: plan.policy("rdzvBackend", "c10d"))),
    ("PET_NNODES", if_elastic(lambda plan: plan.bounds)),
    ("PET_MAX_RESTARTS", if_elastic(lambda plan: plan.policy("maxRestarts"))),
    ("PET_NPROC_PER_NODE", if_elastic(lambda plan: plan.policy("nProcPerNode"))),
    ("PET_RDZV_ID", if_elastic(lambda plan: plan.policy("rdzvId"))),
    (
        "PET_RDZV_CONF",
        if_elastic(
            lambda plan: ",".join(f"{entry['key']}={entry['value']}" for entry in plan.policy("rdzvConf", ())) or None,
        ),
    ),
    ("PET_STANDALONE", if_elastic(lambda plan: "" if plan.policy("standalone") is True else None)),
]

ports = st.none() | st.integers(1, 65535)
elastic_policies = st.fixed_dictionaries(
    {},
    optional={
        "minReplicas": numbers,
        "maxReplicas": numbers,
        "rdzvBackend": st.sampled_from(["c10d", "etcd", "etcd-v2"]),
        "rdzvPort": st.integers(1, 65535),
        "rdzvHost": names,
        "rdzvId": texts,
        "rdzvConf": st.lists(st.fixed_dictionaries({"key": names, "value": texts}), max_size=3),
        "standalone": st.booleans(),
        "nProcPerNode": numbers,
        "maxRestarts": numbers,
    },
)


@st.composite
def pytorch_plans(draw: st.DrawFn) -> PyTorchPlan:
    workers = draw(st.integers(-1, 4))
    elastic = draw(st.none() | elastic_policies) if workers >= 0 else None
    processes = draw(st.none() | st.sampled_from(["auto", "cpu", "gpu", "many", "1", "4", "08"]))
    if elastic is not None and "nProcPerNode" in elastic:
        processes = None
    masters = 1 if workers < 1 else draw(st.sampled_from([-1, 1]))
    return PyTorchPlan(draw(names), masters, workers, draw(ports), draw(ports), processes, elastic)


@given(pytorch_plans())
@settings(max_examples=200)
def test_pytorch_pods_get_what_the_table_says(plan: PyTorchPlan) -> None:
    """The variables of the master and of every worker, in their order."""
    operator, job = PYTORCH_OPERATOR, plan.manifest()
    for kind, count in (("Master", plan.masters), ("Worker", plan.workers)):
        for index in range(count):
            cells = [(name, cell(plan, kind, index)) for name, cell in PYTORCH]
            expected = [(name, value) for name, value in cells if value is not None]
            assert environment(built_pod(operator, job, kind, index)) == expected


TF_TYPES = ("Chief", "Evaluator", "Master", "PS", "Worker")


@dataclass(frozen=True)
class TFPlan:
    """A TFJob in short: by type, the number of replicas and the port, None for the default."""

    name: str
    types: dict[str, tuple[int, int | None]]
    dynamic: bool
    domain: str

    def manifest(self) -> Object:
        specs = {}
        for kind, (count, port) in self.types.items():
            listed = {} if port is None else {"tfjob-port": port}
            specs[kind] = {"replicas": count, "template": template("tensorflow", ports=listed)}
        return tf_job(self.name, spec={"enableDynamicWorker": True} if self.dynamic else {}, **specs)

    def host(self, kind: str, index: int) -> str:
        domain = f".{self.domain}" if self.domain else ""
        return f"{self.name}-{kind.lower()}-{index}.default.svc{domain}:{self.types[kind][1] or 2222}"

    def hosts(self, kind: str) -> list[str]:
        return [self.host(kind, index) for index in range(self.types.get(kind, (0, None))[0])]


def dense(plan: TFPlan, kind: str, index: int) -> str:
    """Return the text as the original writes it: no spaces, types in alphabetical order."""
    cluster = ",".join(
        f'"{each.lower()}":[' + ",".join(f'"{host}"' for host in plan.hosts(each)) + "]"
        for each in TF_TYPES
        if plan.hosts(each)
    )
    return f'{{"cluster":{{{cluster}}},"task":{{"type":"{kind.lower()}","index":{index}}},"environment":"cloud"}}'


SPARSE: dict[str, Callable[[TFPlan, int], dict[str, object]]] = {
    "Worker": lambda plan, index: {
        "worker": {str(index): plan.host("Worker", index)},
        "ps": plan.hosts("PS") or None,
    },
    "PS": lambda plan, index: {"worker": {}, "ps": [plan.host("PS", index)]},
    "Chief": lambda plan, index: {
        "worker": {},
        "ps": plan.hosts("PS"),
        "chief": {str(index): plan.host("Chief", index)},
    },
    "Master": lambda plan, index: {
        "worker": {},
        "ps": plan.hosts("PS"),
        "master": {str(index): plan.host("Master", index)},
    },
    "Evaluator": lambda plan, index: {
        "worker": {},
        "ps": plan.hosts("PS"),
        "evaluator": {str(index): plan.host("Evaluator", index)},
    },
}


def sparse(plan: TFPlan, kind: str, index: int) -> str:
    task = {"type": kind.lower(), "index": index}
    return json.dumps({"cluster": SPARSE[kind](plan, index), "task": task}, separators=(",", ":"))


@st.composite
def tf_plans(draw: st.DrawFn) -> TFPlan:
    chosen = draw(st.lists(st.sampled_from(TF_TYPES), unique=True, min_size=1))
    if "Chief" in chosen and "Master" in chosen:
        chosen.remove("Master")
    types = {kind: (draw(st.integers(0, 3)), draw(ports)) for kind in chosen}
    domain = draw(st.sampled_from(list(TF_OPERATORS)))
    return TFPlan(draw(names), types, draw(st.booleans()), domain)


@given(tf_plans())
@settings(max_examples=200)
def test_tensorflow_pods_get_what_the_tables_say(plan: TFPlan) -> None:
    """`TF_CONFIG` of every replica, as text; none for a job of one replica."""
    operator, job = TF_OPERATORS[plan.domain], plan.manifest()
    alone = sum(count for count, _ in plan.types.values()) == 1
    for kind, (count, _) in plan.types.items():
        for index in range(count):
            text = sparse(plan, kind, index) if plan.dynamic else dense(plan, kind, index)
            expected = [] if alone else [("TF_CONFIG", text)]
            assert environment(built_pod(operator, job, kind, index)) == expected
