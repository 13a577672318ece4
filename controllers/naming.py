"""Names and label values that a job gives to what it makes.

A pod and its service share one name, `JOB-TYPE-INDEX` in lower case. It has to be a DNS-1035 label, because that is
what a service needs (pods would take more): at most 63 of `a-z`, `0-9` and `-`, a letter first. Label values have at
most 63 characters as well. A text that does not fit is cut and gets a hash of the whole text, so that different jobs
never share a name by truncation, and the same job always gets the same name.
"""

from __future__ import annotations

import hashlib
import re

from store.selectors import BadLabel, check_label_value

MAX_LABEL = 63  # characters: RFC 1035 labels, and values of Kubernetes labels

_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_NOT_DNS = re.compile(r"[^a-z0-9]+")
_NOT_LABEL = re.compile(r"[^A-Za-z0-9_.-]+")
_HASH = 8  # hexadecimal digits
_SHORTEST_STEM = 8  # characters of the job's name that are kept at least, for whoever reads it


def gen_general_name(job_name: str, replica_type: str, index: int | str) -> str:
    """The name of one replica's pod and service (the seed's `GenGeneralName`)."""
    tail = f"-{replica_type}-{index}".lower().replace("/", "-")
    name = job_name.replace("/", "-") + tail
    if len(name) <= MAX_LABEL and _DNS_1035.fullmatch(name):
        return name
    return _shortened(job_name.lower(), _NOT_DNS.sub("-", tail), name)


def _shortened(stem: str, tail: str, whole: str) -> str:
    """`STEM-HASH-TAIL`; a tail that leaves no room for a stem is given up, since the hash covers it."""
    hashed = "-" + _digest(whole)
    end = hashed + tail.rstrip("-")
    if len(end) > MAX_LABEL - _SHORTEST_STEM:
        end = hashed
    start = _NOT_DNS.sub("-", stem).strip("-")
    if not start[:1].isalpha():
        start = f"j{start}"
    return start[: MAX_LABEL - len(end)].rstrip("-") + end


def label_value(text: str) -> str:
    """`text` as the value of a label: itself if it may be one, `/` becomes `-`, else cut and hashed."""
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
    """Where a job's expectations about its pods are kept; we pass the job's UID as `job_key`."""
    return f"{job_key}/{replica_type.lower()}/pods"


def gen_expectation_services_key(job_key: str, replica_type: str) -> str:
    """Where a job's expectations about its services are kept; we pass the job's UID as `job_key`."""
    return f"{job_key}/{replica_type.lower()}/services"
