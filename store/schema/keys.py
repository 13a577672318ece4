"""The key layout: this module alone builds and parses the keys of the tree. It also has the rules of the names and
labels that records and Kubernetes objects may carry.

The layout is a contract that other programs read; docs/pages/key-layout.md describes it.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, cast, get_args
from urllib.parse import quote, unquote

from store.errors import RcfarmError

LAYOUT = 2  # the newest schema of the tree that this program knows; see docs/pages/key-layout.md
DEFAULT_SHARDS = 32
HEALTH_GROUPS = 8  # a farm watches the groups of its shards, too: few enough for its connections
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_NODE = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_RESOURCE = re.compile(r"[A-Za-z0-9]([-_.:A-Za-z0-9]{0,251}[A-Za-z0-9])?")
_LABEL = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_PREFIX = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_MAX_PREFIX = 253
_LABEL_RULE = "use at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends"


class BadLabel(RcfarmError, ValueError):
    """A label key or value that is not allowed; the message names it and the rule."""


def is_dns_label(name: str) -> bool:
    """Return whether `name` is a DNS-1123 label, as RC ids, pod ids and farm names must be."""
    return _NAME.fullmatch(name) is not None


def is_node_name(name: str) -> bool:
    """Return whether `name` is a DNS-1123 subdomain, as node names must be (host names have dots)."""
    return _NODE.fullmatch(name) is not None


def is_resource_name(name: str) -> bool:
    """Return whether `name` can name a resource with a quota: letters, digits, and `-_.:` inside."""
    return _RESOURCE.fullmatch(name) is not None


@lru_cache(maxsize=4096)
def check_label_key(key: str) -> None:
    """Refuse a key that is not `[prefix/]name`, with a DNS subdomain as prefix. Raises `BadLabel`."""
    prefix, slash, name = key.rpartition("/")
    if slash and not (len(prefix) <= _MAX_PREFIX and _LABEL_PREFIX.fullmatch(prefix)):
        raise BadLabel(f"label key {key!r}: the part before '/' must be a DNS name of at most {_MAX_PREFIX} characters")
    if not _LABEL.fullmatch(name):
        raise BadLabel(f"label key {key!r}: {_LABEL_RULE}")


def check_label_value(value: str) -> None:
    """Refuse a value that labels can't have; the empty value is allowed. Raises `BadLabel`."""
    if value and not _LABEL.fullmatch(value):
        raise BadLabel(f"label value {value!r}: {_LABEL_RULE}")


def check_labels(labels: Mapping[str, str]) -> None:
    """Refuse labels of which any key or value is not allowed. Raises `BadLabel`."""
    for key, value in labels.items():
        check_label_key(key)
        check_label_value(value)


RCKind = Literal[
    "spec",
    "owner",
    "mutation",
    "lock",
    "status",
    "rollout",
    "rollout-request",
    "handover",
    "revisions",
    "pods",
    "health",
]
_KINDS = frozenset(get_args(RCKind))
_PER_NODE = frozenset({"pods", "health"})
_REVISION = re.compile(r"[1-9][0-9]{0,9}")
TaskKind = Literal["spec", "owner", "state"]
_TASK_KINDS = frozenset(get_args(TaskKind))


class BadKey(RcfarmError, ValueError):
    """A key that the layout does not have; the message names it and says what is wrong."""


class RCKey(NamedTuple):
    """A parsed key of an RC's folder. `node` is "" unless `kind` is pods or health; of revisions it is the number."""

    shard: str
    rc: str
    kind: RCKind
    node: str = ""


class RCParts(NamedTuple):
    """The parts of a key under `rcs/` that may not be one of an RC. A part that is missing is ""."""

    rc: str
    leaf: str
    node: str


class TaskKey(NamedTuple):
    """A parsed key of an execution's folder."""

    shard: str
    task: str
    kind: TaskKind


class HealthKey(NamedTuple):
    """A parsed key under `health/`."""

    node: str
    rc: str


class PodKey(NamedTuple):
    """A parsed key under `intent/`, `reality/` or `task-pods/`."""

    node: str
    pod_id: str


class NodeKey(NamedTuple):
    """A parsed key under `nodes/`. `leaf`: spec or alive."""

    node: str
    leaf: str


class ScheduleKey(NamedTuple):
    """A parsed key under `schedules/`."""

    schedule: str
    kind: Literal["spec", "state"]


QuotaKind = Literal["limit", "head", "grants", "tickets"]
_PER_TOKEN = frozenset({"grants", "tickets"})


class QuotaKey(NamedTuple):
    """A parsed key under `quota/`. `token` is "" unless `kind` is grants or tickets."""

    resource: str
    kind: QuotaKind
    token: str = ""


class AuditKey(NamedTuple):
    """A parsed key, or prefix of keys, under `audit/`."""

    day: str
    ulid: str


@lru_cache(maxsize=65536)
def shard_of(rc_id: str, shards: int = DEFAULT_SHARDS) -> str:
    """Return the RC's shard: the first byte of sha256(rc id) modulo `shards`, as two hex digits."""
    return f"{hashlib.sha256(rc_id.encode()).digest()[0] % shards:02x}"


def all_shards(shards: int = DEFAULT_SHARDS) -> list[str]:
    """Return every shard name, in order."""
    return [f"{number:02x}" for number in range(shards)]


def health_group(shard: str) -> str:
    """Return the group that the shard's health is kept in, as one digit: the shard's number modulo `HEALTH_GROUPS`."""
    return f"{int(shard, 16) % HEALTH_GROUPS}"


class _Path:
    """A key, or a prefix with its trailing slash, directly under the root of `Keys`."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __get__(self, keys: Keys, owner: type[Keys]) -> str:
        return f"{keys.root}/{self._path}"


@dataclass(frozen=True, slots=True)
class Keys:
    """Builds keys under one root, and takes them apart. `shards` must be what `<root>/meta` says.

    `parse_rc`, `parse_health`, `parse_task` and `parse_schedule` are strict: their keys decide whom
    a record belongs to. The others check nothing; a part that is missing is "".
    """

    root: str = "rcfarm"
    shards: int = DEFAULT_SHARDS

    meta = _Path("meta")
    brake = _Path("brake")  # present while the farms hold; see docs/pages/operating.md
    history = _Path("history")  # the chain by which every process recognizes the history; see `store.schema.history`
    farms = _Path("farms/")
    manifests = _Path("manifests/")
    rcs = _Path("rcs/")
    deleted = _Path("deleted/")  # RCs that can be restored
    nodes = _Path("nodes/")
    intents = _Path("intent/")
    realities = _Path("reality/")
    task_pods = _Path("task-pods/")  # apart from `reality/`, so that engines watch the pods of tasks alone
    healths = _Path("health/")
    audit = _Path("audit/")
    pools = _Path("pools/")  # capacity reservations of the `PoolScheduler`
    quotas = _Path("quota/")
    catalog = _Path("catalog/")
    engines = _Path("engines/")
    tasks = _Path("tasks/")
    schedules = _Path("schedules/")
    retention = _Path("retention")  # the lock of the engine that removes ended executions
    incidents = _Path("incidents/")  # what the farms notify about
    task_events = _Path("task-events/")  # beside the tasks: a watch reads its whole prefix again after each change

    def reservations(self, node: str) -> str:
        """Return the key of what is reserved on one node."""
        return f"{self.root}/pools/{node}"

    def farm(self, farm: str) -> str:
        return f"{self.root}/farms/{farm}"

    def deleted_rc(self, rc_id: str) -> str:
        return f"{self.root}/deleted/{rc_id}"

    def manifest(self, sha256: str) -> str:
        return f"{self.root}/manifests/{sha256}"

    def shard(self, shard: str) -> str:
        return f"{self.root}/rcs/{shard}/"

    def rc(self, rc_id: str) -> str:
        """Return the RC's folder, with its trailing slash."""
        return f"{self.root}/rcs/{shard_of(rc_id, self.shards)}/{rc_id}/"

    def spec(self, rc_id: str) -> str:
        return self.rc(rc_id) + "spec"

    def is_spec(self, key: str) -> bool:
        """Return whether the key is the key of an RC's spec."""
        return key.startswith(self.rcs) and key.endswith("/spec") and key.count("/", len(self.rcs)) == 2

    def parse_rc(self, key: str) -> RCKey:
        """Parse a key under `rcs`. Raises `BadKey` for a key that no RC has; callers must decide nothing from it."""
        prefix = self.rcs
        if not key.startswith(prefix):
            raise BadKey(f"{key}: not under {prefix}")
        parts = key[len(prefix) :].split("/")
        shard, rc_id, kind, node = (*parts, "", "", "", "")[:4]
        if kind not in _KINDS or len(parts) != (4 if kind in _PER_NODE or kind == "revisions" else 3):
            raise BadKey(
                f"{key}: no key of an RC; those are spec, owner, mutation, lock, status, rollout, "
                "rollout-request, handover, revisions/<number>, pods/<node>"
            )
        if not is_dns_label(rc_id):
            raise BadKey(f"{key}: {rc_id!r} is not an RC id")
        if kind in _PER_NODE and not is_node_name(node):
            raise BadKey(f"{key}: {node!r} is not a node name")
        if kind == "revisions" and not _REVISION.fullmatch(node):
            raise BadKey(f"{key}: {node!r} is not the number of a revision")
        if shard != shard_of(rc_id, self.shards):
            raise BadKey(f"{key}: RC {rc_id} belongs to shard {shard_of(rc_id, self.shards)}, not to {shard}")
        return RCKey(shard, rc_id, cast(RCKind, kind), node)

    def split_rc(self, key: str) -> RCParts:
        """Take a key under `rcs/` apart that may not be one of an RC. Equal names of nodes are one object."""
        _, rc_id, leaf, node = (*key[len(self.root) + len("/rcs/") :].split("/", 3), "", "", "")[:4]
        return RCParts(rc_id, leaf, sys.intern(node))

    def owner(self, rc_id: str) -> str:
        return self.rc(rc_id) + "owner"

    def mutation(self, rc_id: str) -> str:
        return self.rc(rc_id) + "mutation"

    def lock(self, rc_id: str) -> str:
        """Return the key that exists while a person has locked the RC."""
        return self.rc(rc_id) + "lock"

    def status(self, rc_id: str) -> str:
        return self.rc(rc_id) + "status"

    def rollout(self, rc_id: str) -> str:
        return self.rc(rc_id) + "rollout"

    def rollout_request(self, rc_id: str) -> str:
        return self.rc(rc_id) + "rollout-request"

    def handover(self, rc_id: str) -> str:
        return self.rc(rc_id) + "handover"

    def revisions(self, rc_id: str) -> str:
        """Return the prefix of the RC's former revisions."""
        return self.rc(rc_id) + "revisions/"

    def revision(self, rc_id: str, number: int) -> str:
        return f"{self.rc(rc_id)}revisions/{number}"

    def names_manifests(self, key: str) -> bool:
        """Return whether the key is one of an RC whose record names manifests."""
        _, kind, _ = self.split_rc(key)
        return kind in ("spec", "rollout", "revisions")

    def pod(self, rc_id: str, node: str) -> str:
        return f"{self.rc(rc_id)}pods/{node}"

    def health(self, rc_id: str, node: str) -> str:
        return f"{self.health_of(rc_id)}{node}/{rc_id}"

    def former_health(self, rc_id: str, node: str) -> str:
        """Return the key to which agents of layout 1 write the health."""
        return f"{self.rc(rc_id)}health/{node}"

    def health_of(self, rc_id: str) -> str:
        """Return the prefix of the RC's group: the health of every RC whose shard is in the group."""
        return self.health_group(health_group(shard_of(rc_id, self.shards)))

    def health_group(self, group: str) -> str:
        """Return the prefix of one group."""
        return f"{self.root}/health/{group}/"

    def node_healths(self, node: str) -> list[str]:
        """Return the prefixes under which the node's agent writes health, one per group."""
        return [f"{self.root}/health/{group}/{node}/" for group in range(HEALTH_GROUPS)]

    def split_health(self, key: str) -> HealthKey:
        """Take a key under `health/` apart that may not be one of a pod's health."""
        _, node, rc_id = (*key[len(self.healths) :].split("/", 2), "", "")[:3]
        return HealthKey(node, rc_id)

    def parse_health(self, key: str) -> HealthKey:
        """Parse a key under `health/`. Raises `BadKey` for a key that no agent of ours writes."""
        place = self.split_health(key)
        if not is_node_name(place.node) or not is_dns_label(place.rc):
            raise BadKey(f"{key}: no key of a pod's health; those are health/<group>/<node>/<rc>")
        if key != (right := self.health(place.rc, place.node)):
            raise BadKey(f"{key}: the health of RC {place.rc} on {place.node} belongs to {right}")
        return place

    def incident(self, kind: str, about: str) -> str:
        """Return the key of an incident. `about`: the RC, node or farm that it is about."""
        return f"{self.root}/incidents/{kind}/{about}"

    def engine(self, engine: str) -> str:
        return f"{self.root}/engines/{engine}"

    def task_shard(self, shard: str) -> str:
        return f"{self.root}/tasks/{shard}/"

    def task(self, task_id: str) -> str:
        """Return the execution's folder, with its trailing slash."""
        return f"{self.root}/tasks/{shard_of(task_id, self.shards)}/{task_id}/"

    def task_spec(self, task_id: str) -> str:
        return self.task(task_id) + "spec"

    def task_owner(self, task_id: str) -> str:
        return self.task(task_id) + "owner"

    def task_state(self, task_id: str) -> str:
        return self.task(task_id) + "state"

    def parse_task(self, key: str) -> TaskKey:
        """Parse a key under `tasks`. Raises `BadKey` for a key that no execution has."""
        if not key.startswith(self.tasks):
            raise BadKey(f"{key}: not under {self.tasks}")
        parts = key[len(self.tasks) :].split("/")
        if len(parts) != 3:
            raise BadKey(f"{key}: no key of a task; those have a shard, an id and one more part")
        shard, task_id, kind = parts
        if not is_dns_label(task_id):
            raise BadKey(f"{key}: {task_id!r} is not a task id")
        if shard != shard_of(task_id, self.shards):
            raise BadKey(f"{key}: task {task_id} belongs to shard {shard_of(task_id, self.shards)}, not to {shard}")
        if kind not in _TASK_KINDS:
            raise BadKey(f"{key}: no key of a task; those are spec, owner, state")
        return TaskKey(shard, task_id, cast(TaskKind, kind))

    def events_of(self, task_id: str) -> str:
        """Return the prefix of the execution's events."""
        return f"{self.root}/task-events/{shard_of(task_id, self.shards)}/{task_id}/"

    def task_event(self, task_id: str, number: int) -> str:
        """Return the key of the execution's event with the number, which counts from 0 and is below 10^8."""
        return f"{self.events_of(task_id)}{number:08}"

    def schedule_spec(self, schedule: str) -> str:
        return f"{self.root}/schedules/{schedule}/spec"

    def schedule_state(self, schedule: str) -> str:
        return f"{self.root}/schedules/{schedule}/state"

    def parse_schedule(self, key: str) -> ScheduleKey:
        """Parse a key under `schedules`. Raises `BadKey` for a key that no schedule has."""
        name, _, kind = key[len(self.schedules) :].partition("/")
        if not is_dns_label(name) or kind not in ("spec", "state"):
            raise BadKey(f"{key}: no key of a schedule; those are schedules/<name>/spec and state")
        return ScheduleKey(name, "spec" if kind == "spec" else "state")

    def node(self, node: str) -> str:
        """Return the node's folder, with its trailing slash."""
        return f"{self.root}/nodes/{node}/"

    def node_spec(self, node: str) -> str:
        return f"{self.root}/nodes/{node}/spec"

    def node_alive(self, node: str) -> str:
        return f"{self.root}/nodes/{node}/alive"

    def parse_node(self, key: str) -> NodeKey:
        node, _, leaf = key[len(self.nodes) :].partition("/")
        return NodeKey(sys.intern(node), leaf)

    def node_intents(self, node: str) -> str:
        return f"{self.root}/intent/{node}/"

    def intent(self, node: str, pod_id: str) -> str:
        return f"{self.root}/intent/{node}/{pod_id}"

    def node_realities(self, node: str) -> str:
        return f"{self.root}/reality/{node}/"

    def reality(self, node: str, pod_id: str) -> str:
        return f"{self.root}/reality/{node}/{pod_id}"

    def node_task_pods(self, node: str) -> str:
        return f"{self.root}/task-pods/{node}/"

    def task_pod(self, node: str, pod_id: str) -> str:
        """Return the key of the reality of a pod that belongs to a task's execution."""
        return f"{self.root}/task-pods/{node}/{pod_id}"

    def parse_pod(self, key: str) -> PodKey:
        """Take the key of an intent or a reality apart. Equal names of nodes are one object: sets of them are compared
        in a fraction of the time, and a farm has each name a hundred thousand times."""
        node, _, pod_id = key[len(self.root) + 1 :].partition("/")[2].partition("/")
        return PodKey(sys.intern(node), pod_id)

    @property
    def secrets(self) -> str:
        """The prefix of secrets: beside the root, because every farm, agent and operator may read below it."""
        return f"{self.root}-secrets/"

    def secret(self, name: str) -> str:
        return f"{self.root}-secrets/{name}"

    def cached(self, digest: str) -> str:
        """Return the key of a cached result and of its reservation."""
        return f"{self.root}/catalog/{digest}"

    def quota(self, resource: str) -> str:
        """Return the resource's folder, with its trailing slash."""
        return f"{self.root}/quota/{resource}/"

    def quota_limit(self, resource: str) -> str:
        return f"{self.root}/quota/{resource}/limit"

    def quota_head(self, resource: str) -> str:
        return f"{self.root}/quota/{resource}/head"

    def quota_grant(self, resource: str, token: str) -> str:
        """Return the key of a holder. Any token is possible: it is percent-encoded."""
        return f"{self.root}/quota/{resource}/grants/{quote(token, safe='')}"

    def quota_ticket(self, resource: str, token: str) -> str:
        """Return the key of a waiter. Any token is possible: it is percent-encoded."""
        return f"{self.root}/quota/{resource}/tickets/{quote(token, safe='')}"

    def parse_quota(self, key: str) -> QuotaKey:
        """Parse a key under `quota/`. Raises `BadKey` for a key that no quota has."""
        resource, _, rest = key[len(self.quotas) :].partition("/")
        kind, _, token = rest.partition("/")
        found = QuotaKey(resource, cast(QuotaKind, kind), unquote(token))
        if not is_resource_name(resource) or kind not in get_args(QuotaKind) or bool(token) != (kind in _PER_TOKEN):
            raise BadKey(f"{key}: no key of a quota; those are limit, head, grants/<token>, tickets/<token>")
        if kind in _PER_TOKEN and quote(found.token, safe="") != token:
            raise BadKey(f"{key}: the token is not percent-encoded as {quote(found.token, safe='')}")
        return found

    def name_of(self, key: str) -> str:
        """Return the digest of a manifest, the name of a farm, the id of a deleted RC, or the node of reservations."""
        return key[len(self.root) + 1 :].partition("/")[2]

    def parse_audit(self, key: str) -> AuditKey:
        day, _, ulid = key[len(self.audit) :].partition("/")
        return AuditKey(day, ulid)

    def audit_event(self, day: str, ulid: str) -> str:
        """Return the key of an audit event. `day` is written as yyyy-mm-dd."""
        return f"{self.root}/audit/{day}/{ulid}"
