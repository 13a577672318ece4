"""Every decoder of foreign input: what it reads, the errors that it may raise, and good texts to damage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from controllers.framework.api.types import FRAMEWORKS
from controllers.framework.api.wire import BadFramework, decode_framework
from controllers.framework.config import BadConfig, parse_config
from rcfarm.operations import rc_apply, task_file
from rcfarm.operations.documents import BadFile
from rcfarm.reports.framework import framework_info
from scheduler.hived.config.file import read_config
from scheduler.hived.contract import (
    POD_BIND_INFO,
    POD_SCHEDULING_SPEC,
    extract_pod_bind_info,
    extract_pod_scheduling_spec,
)
from scheduler.hived.errors import InvalidConfig, UserError
from scheduler.pool.ledger import NodeReservations, Reservation
from store.kube.api.errors import KubeError
from store.kube.api.objects import PODS
from store.kube.client.client import decode_event, decode_object, decode_page
from store.kube.informer.reflector import Admission
from store.kv.protocol import BadRecord
from store.schema import quota, records, schedules, tasks
from store.schema.manifest import BadManifest, parse
from store.schema.records import Capacity, Exit, NodeTransfer, Process, Reason, decode, decode_labels, encode
from tests.support.framework.cluster import framework, role

FILE = 10.0  # seconds for files that an operator names
TIME = "2026-01-01T00:00:00Z"
SHA = "c" * 64


class Decoder(NamedTuple):
    """`read` raises one of `errors` and nothing else, for any bytes. `seeds`: texts that it can read. `seconds`: of
    processor time that it may take; decoders on a daemon's event loop get little."""

    read: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    seeds: tuple[bytes, ...]
    seconds: float = 0.2


_ERRORS = records.Analysis(
    name="errors",
    prometheus=records.PrometheusAnalysis(url="http://p:9090", query="sum(errors)", condition="< 0.01"),
    failure_limit=2,
)
_ANSWERS = records.Analysis(name="answers", http=records.HttpAnalysis(url="http://web/healthz", status=200))
_GOOD: tuple[msgspec.Struct, ...] = (
    records.Meta(),
    records.RCSpec(id="web", manifest=SHA, replicas_desired=3, node_selector="a=b", pod_labels={"tier": "web"}),
    records.RCSpec(
        id="web", manifest=SHA, replicas_desired=3, update=records.UpdatePolicy(analysis=(_ERRORS, _ANSWERS))
    ),
    records.Rollout(
        revision=2,
        manifest=SHA,
        state="canary",
        since=TIME,
        started=TIME,
        progressed=TIME,
        analysis=(records.AnalysisResult(name="errors", outcome="no_data", value="no series", at=TIME, errors=3),),
    ),
    records.Owner("farm-1", TIME),
    records.Mutation("alice", "an edit", TIME),
    records.PersonsLock("alice@host", "an incident", TIME),
    records.DeletedRC(
        spec=records.RCSpec(id="web", manifest=SHA, replicas_desired=3, deleting=True),
        manifest=SHA,
        farm="farm-1",
        deleted_at=TIME,
        until=TIME,
    ),
    records.RCStatus(
        state="short",
        generation=7,
        desired=3,
        placed=2,
        healthy=1,
        farm="farm-1",
        token=42,
        reasons=(Reason("no_nodes", "no node is left", ("node-1",)),),
        node_transfer=NodeTransfer("t", "node-1", "node-2"),
        updated_at=TIME,
    ),
    records.Handover(old="blue", new="green", desired=5, minimum=3, state="running", started=TIME),
    records.Health("passing", SHA, "ok", TIME),
    records.NodeSpec(name="node-1", labels={"pool": "web"}, capacity=Capacity(4000, 2**34, {"gpu": 8}), evict=True),
    records.NodeAlive(
        "node-1",
        TIME,
        "10.0.0.1",
        "0.1.0",
        limits=records.Enforcement(by="cgroup v1", why="no"),
    ),
    records.Intent(manifest=SHA, rc="web", shard="0a", token=9, labels={"tier": "web"}),
    records.Reality(
        manifest=SHA,
        rc="web",
        state="running",
        launchables={
            "main": Process(
                state="backoff",
                pid=4,
                restarts=2,
                last_exit=Exit(TIME, 1, "SIGKILL", "killed by the kernel: over its memory limit of 1Gi"),
                usage=records.Usage(at=TIME, memory=2**20, memory_limit=2**30, cpu=20, pids=3, oom_kills=1),
            )
        },
        ports={"http": 8080},
    ),
    records.FarmMember(farm="farm-1", selector="a=b", since=TIME),
    records.Brake(farm="farm-1", since=TIME, code="no_rcs_found", message="gone"),
    records.Brake(farm="", since=TIME, code="engaged", message="upgrade", by="ada@ops"),
    records.Incident(kind="rc", about="web", summary="it fails", severity="error", since=TIME, farm="farm-1"),
    records.AuditEvent(event_type="SCALED", event_details={"rc": "web", "changes": [1, 2.5, None]}, timestamp=TIME),
    quota.QuotaLimit(units=8, project_units=2, keys={"eve": 1}, rate=quota.Rate(3, 1.5), weights={"eve": 2.0}),
    quota.QuotaHead(7, 1.5, {"eve": 2.5}),
    quota.QuotaTicket(token="t/1", execution="t", order="01J", units=2, namespace_constraint=0, since=1.5),
    quota.QuotaGrant(token="t/1", execution="t", order="01J", priority=-1),
    tasks.TaskSpec(
        id="nightly", type="process", inputs={"x": [1, 2.5]}, quotas={"gpu": 2}, abort=tasks.AbortRequest(reason="no")
    ),
    tasks.TaskState(
        step="cleaning",
        phase="PhaseRetryableFailure",
        plugin_state={"job": 7},
        plugin_state_version=2,
        outcome="retry",
        pending=("abort", "finalize"),
        error=tasks.TaskError("Oops", "it failed", "USER"),
        reasons=(tasks.Wait("Backoff", "later", 5.0, 9.5),),
        intent=tasks.RemoteIntent("nightly-0", 3.0),
    ),
    tasks.TaskEvent(n=3, at=5.0, attempt=1, phase="PhaseRunning", info={"logs": []}),
    tasks.TaskOwner("engine-1", TIME),
    tasks.EngineMember(
        engine="engine-1", since=TIME, pauses=(tasks.EnginePause(kind="plugin", name="job", calls="handle", since=1.0),)
    ),
    schedules.ScheduleSpec(
        name="nightly", cron=("0 3 * * *",), time_zone="Europe/Berlin", task=tasks.TaskSpec(id="", type="process")
    ),
    schedules.ScheduleState(
        decided=60.0, active=("nightly-1",), skips=(schedules.Skip("Overlap", "nightly-0 has not ended", 60.0),)
    ),
    NodeReservations({"web": Reservation(request=Capacity(100, 2**20, {"gpu": 1}), selector="a=b", releasing=True)}),
)

MANIFEST_JSON = (
    b'{"id":"web","launchables":{"main":{"command":["sleep","9"],"env":{"A":"1"},"stop_timeout":2.5,"artifact":'
    b'{"url":"https://a/b","sha256":"%s"},"resources":{"cpu":100,"memory":1048576,"devices":{"gpu":1}}}},'
    b'"config":{"a":[1,2.5,{"b":null}]},"ports":{"http":0},"health":{"http":{"port":"http"},"interval":1}}'
) % SHA.encode()
MANIFEST_YAML = (
    b"id: web\nlaunchables:\n  main: &main\n    command: [sleep, '9']\n    resources: {cpu: 100}\n"
    b"config:\n  a: [1, 2.5, {b: null}]\n  when: 2026-01-01\nports: {http: 0}\nhealth: {tcp: {port: http}}\n"
)
_indented = MANIFEST_YAML.replace(b"  when: 2026-01-01\n", b"").replace(b"\n", b"\n  ").rstrip(b" ")


def _record(good: msgspec.Struct) -> Decoder:
    """Return a decoder that also checks that the value can be encoded, and decodes to the same again."""
    kind = type(good)

    def read(raw: bytes) -> object:
        found = decode(kind, "a/key", raw)
        again = decode(kind, "a/key", encode(found))
        assert again == found, (again, found)
        return found

    return Decoder(read, (BadRecord,), (encode(good),))


def _labels(raw: bytes) -> Any:
    return decode_labels("a/key", raw)


RECORDS: dict[str, Decoder] = {
    **{type(good).__name__: _record(good) for good in _GOOD},
    "Labels": Decoder(_labels, (BadRecord,), (b'{"pod_id":"web","replication_controller_id":"web"}',)),
    "Manifest": Decoder(parse, (BadManifest,), (MANIFEST_JSON, MANIFEST_YAML)),
}


def _framework(raw: bytes) -> object:
    """Decode the text of an object, as it comes from an API server, up to what a command shows."""
    obj = Admission(FRAMEWORKS).admit(decode_object(raw))
    return obj and framework_info(decode_framework(obj))


def _event(raw: bytes) -> object:
    seen = Admission(PODS)
    return [seen.admit(obj) for obj in (decode_event(raw).object, *decode_page(_page_of(raw)).items)]


def _page_of(raw: bytes) -> bytes:
    return b'{"metadata":{"resourceVersion":"1"},"items":[{"metadata":{"name":"a"}},%b]}' % raw


TASK_FILES = (
    b"task: a\nprocess: {command: [echo, hi]}\nretries: 2\nquotas: {gpu: 1}\ninputs: {n: 1.5}\n",
    b"task: a\nhttp: {remote: r, create: {path: /j, headers: {a: b}}, get: {path: /j}, phases: {D: success}}\n",
    b"task: a\npod:\n  primary: c\n  pod: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, command: [a], "
    b"env: [{name: n, value: v}], resources: {limits: {cpu: 1}}}]}}\n",
    b"task: a\nframework:\n  framework: {spec: {taskRoles: [{name: w, taskNumber: 1, task: {pod: {spec: {containers: "
    b"[{name: c}]}}}}]}}\n",
    b"task: a\nrc:\n  rc: {id: w, replicas: 1, manifest: {id: w, launchables: {m: {command: [a]}}}}\n  patience: 3\n",
    b"quota: gpu\nunits: 3\nkeys: {a: 1}\nrate: {count: 10, per: 60}\n",
    b"schedule: nightly\ncron: '0 3 * * *'\ntime_zone: Europe/Zurich\ntask:\n  process: {command: [backup]}\n",
)


def _rc_file(raw: bytes) -> object:
    return rc_apply.load("f", raw)


def _task_file(raw: bytes) -> object:
    return task_file.load("f", raw)


def _framework_config(raw: bytes) -> object:
    return parse_config(raw.decode(errors="replace"))


def _hived_config(raw: bytes) -> object:
    return read_config(raw.decode(errors="replace"), environ={}, home=Path("/nonexistent"))


def _annotated(name: str, read: Callable[[Any], object]) -> Callable[[bytes], object]:
    def of_pod(raw: bytes) -> object:
        return read({"metadata": {"name": "p", "annotations": {name: raw.decode(errors="surrogateescape")}}})

    return of_pod


FRAMEWORK_JSON = msgspec.json.encode(
    framework("train", role("worker", 2))
    | {
        "metadata": {"name": "train", "namespace": "ns", "uid": "u", "resourceVersion": "7"},
        "status": {
            "state": "AttemptRunning",
            "startTime": TIME,
            "transitionTime": TIME,
            "retryPolicyStatus": {"totalRetriedCount": 0, "accountableRetriedCount": 0},
            "attemptStatus": {"id": 0, "startTime": TIME, "configMapName": "train-attempt"},
        },
    }
)
POD_EVENT = (
    b'{"type":"MODIFIED","object":{"kind":"Pod","apiVersion":"v1","metadata":{"name":"p","namespace":"ns","uid":"u",'
    b'"resourceVersion":"7","managedFields":[{"fieldsV1":{"f:spec":{}}}]},"spec":{"containers":[{"name":"c"}]}}}'
)
SCHEDULING_SPEC = (
    b'{"virtualCluster":"a","priority":1,"leafCellNumber":2,"affinityGroup":{"name":"g","members":'
    b'[{"podNumber":1,"leafCellNumber":2}]}}',
    b"virtualCluster: a\npriority: 1\nleafCellNumber: 2\n",
)
BIND_INFO = (
    b'{"node":"a0","leafCellIsolation":[0,1],"cellChain":"c","affinityGroupBindInfo":[{"podPlacements":'
    b'[{"physicalNode":"a0","physicalLeafCellIndices":[0,1],"preassignedCellTypes":["x","x"]}]}]}',
    b"node: a0\nleafCellIsolation: [0]\ncellChain: c\naffinityGroupBindInfo:\n- podPlacements:\n"
    b"  - physicalNode: a0\n    physicalLeafCellIndices: [0]\n",
)
HIVED_CONFIG = (
    b"physicalCluster:\n  cellTypes:\n    HOST: {childCellType: GPU, childCellNumber: 4, isNodeLevel: true}\n"
    b"  physicalCells:\n  - &a {cellType: HOST, cellAddress: a0}\nvirtualClusters:\n"
    b"  vision: {virtualCells: [{cellType: HOST, cellNumber: 1}]}\n"
)

DECODERS: dict[str, Decoder] = {
    **RECORDS,
    "Kubernetes event and page": Decoder(_event, (KubeError,), (POD_EVENT,)),
    "Framework": Decoder(_framework, (KubeError, BadFramework), (FRAMEWORK_JSON,)),
    "pod-scheduling-spec": Decoder(
        _annotated(POD_SCHEDULING_SPEC, extract_pod_scheduling_spec), (UserError,), SCHEDULING_SPEC
    ),
    "pod-bind-info": Decoder(_annotated(POD_BIND_INFO, extract_pod_bind_info), (UserError,), BIND_INFO),
    "RC file": Decoder(_rc_file, (BadFile,), (b"id: web\nreplicas: 2\nmanifest:\n  " + _indented,), FILE),
    "Task file": Decoder(_task_file, (BadFile,), TASK_FILES, FILE),
    "frameworkcontroller.yaml": Decoder(
        _framework_config, (BadConfig,), (b"workerNumber: 3\npodFailureSpec: []\n",), FILE
    ),
    "HiveD configuration": Decoder(_hived_config, (InvalidConfig,), (HIVED_CONFIG,), FILE),
}
