"""The CustomResourceDefinition of Frameworks, as data.

Compatible mode is frameworkcontroller's definition: the status is part of the main resource, which its own programs
write by PUT. Native mode is what the API has learnt since: a status subresource (users can't overwrite what we report,
a status write never touches the spec), columns for `kubectl get`, short names. A running frameworkcontroller rewrites
the definition at its start and can't write to a status subresource: the two modes exclude each other.
"""

from __future__ import annotations

from typing import Any, Literal

from controllers.framework.constants import FRAMEWORKS, MAX_TASK_NUMBER
from store.kube.objects import Object

CRD_NAME = f"{FRAMEWORKS.plural}.{FRAMEWORKS.group}"

Mode = Literal["compatible", "native"]

NAME_PATTERN = "^[a-z0-9]{1,63}$"  # no dashes: the names of pods split at them

_RETRY_POLICY: Object = {
    "type": "object",
    "properties": {
        "fancyRetryPolicy": {"type": "boolean"},
        "maxRetryCount": {"type": "integer", "minimum": -2},
    },
}
_COMPLETION_POLICY: Object = {
    "type": "object",
    "properties": {
        "minFailedTaskCount": {"type": "integer", "minimum": -1},
        "minSucceededTaskCount": {"type": "integer", "minimum": -1},
    },
}
_ANY_OBJECT: Object = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def crd(mode: Mode = "compatible") -> Object:
    """The definition to create. Source: frameworkcontroller's CRD, `frameworkcontroller.microsoft.com/v1`."""
    version: Object = {
        "name": FRAMEWORKS.version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": _schema(mode)},
    }
    names: Object = {
        "plural": FRAMEWORKS.plural,
        "singular": "framework",
        "kind": FRAMEWORKS.kind,
        "listKind": f"{FRAMEWORKS.kind}List",
    }
    if mode == "native":
        version |= {"subresources": {"status": {}}, "additionalPrinterColumns": _COLUMNS}
        names |= {"shortNames": ["fw"], "categories": ["all"]}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": CRD_NAME},
        "spec": {"group": FRAMEWORKS.group, "names": names, "scope": "Namespaced", "versions": [version]},
    }


def _schema(mode: Mode) -> Object:
    return {
        "type": "object",
        "properties": {
            "metadata": {"type": "object", "properties": {"name": {"type": "string", "pattern": NAME_PATTERN}}},
            "spec": _spec(mode),
            "status": {**_ANY_OBJECT, "nullable": True},
        },
    }


def _spec(mode: Mode) -> Object:
    spec: Object = {
        "type": "object",
        "properties": {
            "description": {"type": "string", "nullable": True},
            "executionType": {"type": "string", "enum": ["Create", "Start", "Stop"]},
            "retryPolicy": _RETRY_POLICY,
            "taskRoles": {"type": "array", "items": _task_role(mode)},
        },
    }
    return spec | ({"required": ["executionType", "taskRoles"]} if mode == "native" else {})


def _task_role(mode: Mode) -> Object:
    role: Object = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": NAME_PATTERN},
            "taskNumber": {"type": "integer", "minimum": 0, "maximum": MAX_TASK_NUMBER},
            "frameworkAttemptCompletionPolicy": _COMPLETION_POLICY,
            "task": _task(mode),
        },
    }
    return role | ({"required": ["name", "taskNumber", "task"]} if mode == "native" else {})


def _task(mode: Mode) -> Object:
    grace: Object = {"type": "integer", "nullable": True}
    task: Object = {
        "type": "object",
        "properties": {
            "retryPolicy": _RETRY_POLICY,
            "podGracefulDeletionTimeoutSec": grace,
            "pod": _ANY_OBJECT,
        },
    }
    if mode == "native":
        grace["minimum"] = 0
        task["required"] = ["pod"]
    return task


def _column(name: str, path: str, kind: str = "string", **more: Any) -> Object:
    return {"name": name, "type": kind, "jsonPath": path, **more}


_COLUMNS = [
    _column("Execution", ".spec.executionType"),
    _column("State", ".status.state"),
    _column("Attempt", ".status.attemptStatus.id", "integer"),
    _column("Code", ".status.attemptStatus.completionStatus.code", "integer"),
    _column("Phrase", ".status.attemptStatus.completionStatus.phrase"),
    _column("Retries", ".status.retryPolicyStatus.totalRetriedCount", "integer", priority=1),
    _column("Age", ".metadata.creationTimestamp", "date"),
]
