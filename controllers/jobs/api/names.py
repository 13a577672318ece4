"""The labels and reads that an operator defines, the names and label values of a job's objects, and the objects by the
type and index in their labels.

A pod and its service share one name, `JOB-TYPE-INDEX` in lower case. It must be a DNS-1035 label, because services
require that: at most 63 of `a-z`, `0-9` and `-`, a letter first. Label values have at most 63 characters as well. A
text that does not fit is cut and gets a hash of the whole text, so that different jobs never share a name by
truncation, and the same job always gets the same name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import structlog

from store.kube.api.objects import Object, key_of, labels_of
from store.schema.selectors import BadLabel, check_label_value

log = structlog.get_logger(__name__)

MAX_LABEL = 63  # characters: RFC 1035 labels, and values of Kubernetes labels

_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_NOT_DNS = re.compile(r"[^a-z0-9]+")
_NOT_LABEL = re.compile(r"[^A-Za-z0-9_.-]+")
_HASH = 8  # hexadecimal digits
_SHORTEST_STEM = 8  # characters of the job's name that are kept at least, for readability

_MAX_DIGITS = 18  # Python refuses to convert very long digits; no index comes near


class GroupVersion(NamedTuple):
    """`group` is "" for the core group."""

    group: str
    version: str

    def __str__(self) -> str:
        """Return the `apiVersion` of objects: `v1`, `apps/v1`."""
        return f"{self.group}/{self.version}" if self.group else self.version


class GroupVersionKind(NamedTuple):
    """A kind of object, in one version."""

    group: str
    version: str
    kind: str

    @property
    def group_version(self) -> GroupVersion:
        return GroupVersion(self.group, self.version)


class ControllerInterface(Protocol):
    """Implemented by all operators. `controllers.jobs.operator.JobOperator` implements it for any custom resource."""

    def controller_name(self) -> str:
        """Return the operator's name, shown as the component in Events."""

    def get_api_group_version_kind(self) -> GroupVersionKind:
        """Return the kind of the jobs."""

    def get_api_group_version(self) -> GroupVersion:
        """Return the version of the jobs' API group."""

    def get_group_name_label_key(self) -> str:
        """Return the key of the label that every pod and service of the operator carries, with one value for all."""

    def get_group_name_label_value(self) -> str:
        """Return the value of that label."""

    def get_job_name_label_key(self) -> str:
        """Return the key of the label that holds the name of the pod's or service's job."""

    def get_replica_type_label_key(self) -> str:
        """Return the key of the label that holds the replica type, in lower case."""

    def get_replica_index_label_key(self) -> str:
        """Return the key of the label that holds the replica's index, in decimal."""

    def get_job_from_informer_cache(self, namespace: str, name: str) -> Object | None:
        """Return the cached job, or None when the cache has none."""

    async def get_job_from_api_client(self, namespace: str, name: str) -> Object:
        """Read the job from the API server. Raises `KubeError`, `NotFound` when there is none."""


def gen_general_name(job_name: str, replica_type: str, index: int | str) -> str:
    """Return the name of one replica's pod and service, as kubeflow's `GenGeneralName`."""
    tail = f"-{replica_type}-{index}".lower().replace("/", "-")
    name = job_name.replace("/", "-") + tail
    if len(name) <= MAX_LABEL and _DNS_1035.fullmatch(name):
        return name
    return _shortened(job_name.lower(), _NOT_DNS.sub("-", tail), name)


def _shortened(stem: str, tail: str, whole: str) -> str:
    """Return `STEM-HASH-TAIL`. A tail that leaves no room for a stem is dropped, since the hash covers it."""
    hashed = "-" + _digest(whole)
    end = hashed + tail.rstrip("-")
    if len(end) > MAX_LABEL - _SHORTEST_STEM:
        end = hashed
    start = _NOT_DNS.sub("-", stem).strip("-")
    if not start[:1].isalpha():
        start = f"j{start}"
    return start[: MAX_LABEL - len(end)].rstrip("-") + end


def label_value(text: str) -> str:
    """Return `text` as the value of a label: `/` becomes `-`, and a value that is not valid is cut and hashed."""
    value = text.replace("/", "-")
    if len(value) <= MAX_LABEL and _is_label_value(value):
        return value
    start = _NOT_LABEL.sub("-", value)[: MAX_LABEL - _HASH - 1].strip("-_.")
    return f"{start}-{_digest(text)}" if start else _digest(text)


def _is_label_value(text: str) -> bool:
    try:
        check_label_value(text)
    except BadLabel:
        return False
    return True


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH]


def gen_expectation_pods_key(job_key: str, replica_type: str) -> str:
    """Return the key of a job's expectations about its pods; we pass the job's UID as `job_key`."""
    return f"{job_key}/{replica_type.lower()}/pods"


def gen_expectation_services_key(job_key: str, replica_type: str) -> str:
    """Return the key of a job's expectations about its services; we pass the job's UID as `job_key`."""
    return f"{job_key}/{replica_type.lower()}/services"


def replica_index(obj: Object, label: str) -> int | None:
    """Return the index in the object's label, or None unless it is a decimal number ≥ 0."""
    text = labels_of(obj).get(label, "")
    valid = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    return int(text) if valid else None


def slices(objects: Iterable[Object], replicas: int, label: str) -> dict[int, list[Object]]:
    """Return objects by index: every index below `replicas`, empty or not, and existing ones at or above it.

    An object without a valid index is in no slice; it is logged.
    """
    found: dict[int, list[Object]] = {index: [] for index in range(replicas)}
    for obj in objects:
        index = replica_index(obj, label)
        if index is None:
            value = labels_of(obj).get(label)
            log.warning("Replica without a valid index ignored", object=key_of(obj), label=label, value=value)
        else:
            found.setdefault(index, []).append(obj)
    return found


def filter_for_replica_type(objects: Iterable[Object], replica_type: str, label: str) -> list[Object]:
    """Return the objects whose label names the type; labels carry it in lower case."""
    wanted = replica_type.lower()
    return [obj for obj in objects if labels_of(obj).get(label) == wanted]
