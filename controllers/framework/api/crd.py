"""The CustomResourceDefinition of Frameworks, as data.

Compatible mode is frameworkcontroller's definition, with descriptions for `kubectl explain`: the status is part of the
main resource, which its own programs write by PUT. Native mode uses newer features of the API: a status subresource
(users can't overwrite the status, a status write never touches the spec), columns for `kubectl get`, short names. A
running frameworkcontroller rewrites the definition at its start and can't write to a status subresource, so the two
modes exclude each other.
"""

from __future__ import annotations

from typing import Any, Literal

from controllers.framework.api.types import FRAMEWORKS, MAX_TASK_NUMBER
from store.kube.api.objects import Object

CRD_NAME = f"{FRAMEWORKS.plural}.{FRAMEWORKS.group}"

Mode = Literal["compatible", "native"]

NAME_PATTERN = "^[a-z0-9]{1,63}$"  # no dashes: the names of pods split at them

_COMPLETION_POLICY: Object = {
    "type": "object",
    "description": "When tasks of this role complete the attempt of the whole Framework.",
    "properties": {
        "minFailedTaskCount": {
            "type": "integer",
            "minimum": -1,
            "description": "The attempt fails when this many tasks of the role have failed. Below 1: never.",
        },
        "minSucceededTaskCount": {
            "type": "integer",
            "minimum": -1,
            "description": "The attempt succeeds when this many tasks of the role have succeeded. Below 1: never.",
        },
    },
}
_ANY_OBJECT: Object = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def crd(mode: Mode = "compatible") -> Object:
    """Return the definition to create. Source: frameworkcontroller's CRD, `frameworkcontroller.microsoft.com/v1`."""
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


def _described(description: str, schema: Object) -> Object:
    return {**schema, "description": description}


def _retry_policy(what: str) -> Object:
    return {
        "type": "object",
        "description": f"Whether an attempt of {what} that has ended is followed by another one.",
        "properties": {
            "fancyRetryPolicy": {
                "type": "boolean",
                "description": "Retry transient failures beyond maxRetryCount, with a delay after conflicts, and "
                "permanent failures never.",
            },
            "maxRetryCount": {
                "type": "integer",
                "minimum": -2,
                "description": "How many failures are retried. -1: all failures; -2: successes, too.",
            },
        },
    }


def _schema(mode: Mode) -> Object:
    return {
        "type": "object",
        "description": "A gang of tasks that runs, is retried and completes as a whole.",
        "properties": {
            "metadata": {"type": "object", "properties": {"name": {"type": "string", "pattern": NAME_PATTERN}}},
            "spec": _spec(mode),
            "status": _described("Written by the operator alone.", {**_ANY_OBJECT, "nullable": True}),
        },
    }


def _spec(mode: Mode) -> Object:
    spec: Object = {
        "type": "object",
        "description": "What is to run: roles of equal tasks, and when the whole is retried.",
        "properties": {
            "description": {"type": "string", "nullable": True, "description": "For people; nothing reads it."},
            "executionType": {
                "type": "string",
                "enum": ["Create", "Start", "Stop"],
                "description": "Create: wait for Start. Start: run. Stop: end everything, and never start again.",
            },
            "retryPolicy": _retry_policy("the whole Framework"),
            "taskRoles": {
                "type": "array",
                "description": "Groups of equal tasks. Roles may be added, removed and rescaled while they run.",
                "items": _task_role(mode),
            },
        },
    }
    return spec | ({"required": ["executionType", "taskRoles"]} if mode == "native" else {})


def _task_role(mode: Mode) -> Object:
    role: Object = {
        "type": "object",
        "properties": {
            "name": {
                "type": "string",
                "pattern": NAME_PATTERN,
                "description": "Unique within the Framework. Pods are named FRAMEWORK-ROLE-INDEX.",
            },
            "taskNumber": {
                "type": "integer",
                "minimum": 0,
                "maximum": MAX_TASK_NUMBER,
                "description": "How many tasks; each is one pod at a time.",
            },
            "frameworkAttemptCompletionPolicy": _COMPLETION_POLICY,
            "task": _task(mode),
        },
    }
    return role | ({"required": ["name", "taskNumber", "task"]} if mode == "native" else {})


def _task(mode: Mode) -> Object:
    grace: Object = {
        "type": "integer",
        "nullable": True,
        "description": "Seconds after which a pod that is being deleted is deleted by force. Null: never, so that no "
        "two pods of a task ever run at the same time.",
    }
    task: Object = {
        "type": "object",
        "description": "What each task of the role runs.",
        "properties": {
            "retryPolicy": _retry_policy("a task"),
            "podGracefulDeletionTimeoutSec": grace,
            "pod": _described(
                "A pod template (metadata and spec), as in a Deployment. Placeholders such as {{FC_TASK_INDEX}} are "
                "filled in.",
                _ANY_OBJECT,
            ),
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
