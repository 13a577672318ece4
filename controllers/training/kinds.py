"""The kinds of training jobs that rcfarm runs, and their CustomResourceDefinitions: the training-operator's names and
fields, without the pod's schema.

The original's definitions inline the whole PodTemplateSpec of their time, so the API server drops newer fields of pods,
and everything in the status that they don't know. Ours keep `template` and `status` whole; their size is below what
`kubectl apply` can annotate.
"""

from __future__ import annotations

from controllers.training.kind import TrainingJobs
from controllers.training.pytorch import PyTorchJobs
from controllers.training.spec import RUN_POLICY_FIELDS, number_field, text_field
from controllers.training.tensorflow import TFJobs
from store.kube.api.objects import Object

KINDS: tuple[type[TrainingJobs], ...] = (PyTorchJobs, TFJobs)

_ANY_OBJECT: Object = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_COLUMNS = [
    {"name": "State", "type": "string", "jsonPath": ".status.conditions[-1:].type"},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
]


def definition(kind: type[TrainingJobs]) -> Object:
    """Return the definition of a kind, as `deploy/kubernetes/training/crds` has it."""
    resource = kind.resource
    subresources: Object = {"status": {}}
    if kind.scaled_type:
        of_type = f".status.replicaStatuses.{kind.scaled_type}"
        subresources["scale"] = {
            "specReplicasPath": f".spec.{kind.replica_specs_field}.{kind.scaled_type}.replicas",
            "statusReplicasPath": f"{of_type}.active",
            "labelSelectorPath": f"{of_type}.selector",
        }
    misplaced = {  # these fields are kept only so that the operator can warn of them
        name: {"x-kubernetes-preserve-unknown-fields": True, "description": f"No effect: move it to runPolicy.{name}."}
        for name in sorted(RUN_POLICY_FIELDS)
    }
    spec: Object = {
        "type": "object",
        "description": "What is to run, and its limits.",
        "required": [kind.replica_specs_field],
        "properties": {
            kind.replica_specs_field: {
                "type": "object",
                "description": f"Replicas by type: {', '.join(kind.replica_types)}.",
                "additionalProperties": _REPLICA_SPEC,
            },
            "runPolicy": _RUN_POLICY,
            **misplaced,
            **kind.spec_fields,
        },
    }
    version: Object = {
        "name": resource.version,
        "served": True,
        "storage": True,
        "subresources": subresources,
        "additionalPrinterColumns": _COLUMNS,
        "schema": {
            "openAPIV3Schema": {
                "type": "object",
                "description": f"{resource.kind} of kubeflow's training-operator.",
                "properties": {
                    "spec": spec,
                    "status": {**_ANY_OBJECT, "description": "Written by the operator alone."},
                },
            }
        },
    }
    names: Object = {
        "plural": resource.plural,
        "singular": resource.kind.lower(),
        "kind": resource.kind,
        "listKind": f"{resource.kind}List",
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{resource.plural}.{resource.group}"},
        "spec": {"group": resource.group, "names": names, "scope": "Namespaced", "versions": [version]},
    }


_REPLICA_SPEC: Object = {
    "type": "object",
    "description": "Replicas of one type.",
    "properties": {
        "replicas": number_field("How many; 1 by default, 0 for none."),
        "restartPolicy": text_field("Always, OnFailure, Never or ExitCode."),
        "template": {**_ANY_OBJECT, "description": "The pod template; every field of pods is kept."},
    },
}
_QUANTITY: Object = {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True}
_RUN_POLICY: Object = {
    "type": "object",
    "description": "The limits of the job's time and retries, and what becomes of its pods.",
    "properties": {
        "activeDeadlineSeconds": number_field("Seconds from the start after which the job fails.", "int64"),
        "backoffLimit": number_field("Retries before the job fails; without a limit by default."),
        "cleanPodPolicy": text_field("Pods deleted when the job has finished: All, Running or None, the default."),
        "managedBy": text_field(
            "The controller that runs the job; any other than the training-operator's is left alone."
        ),
        "schedulingPolicy": {
            "type": "object",
            "description": "The gang that the job's pods form.",
            "properties": {
                "minAvailable": number_field("Pods that must be able to run together; by default all."),
                "minResources": {
                    "type": "object",
                    "description": "Resources that the gang needs; by default those of its pods.",
                    "additionalProperties": _QUANTITY,
                },
                "priorityClass": text_field("Volcano's priority class of the gang."),
                "queue": text_field("Volcano's queue."),
                "scheduleTimeoutSeconds": number_field("Seconds that the scheduler-plugins' gang may wait."),
            },
        },
        "suspend": {
            "type": "boolean",
            "default": False,
            "description": "Delete all pods, and start none until this is false again.",
        },
        "ttlSecondsAfterFinished": number_field("Seconds after its end until the job is deleted; never by default."),
    },
}
