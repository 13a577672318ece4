"""The ConfigMap that stands for one attempt of a Framework: it holds no data, it owns the attempt's pods.

It is born with the finalizer of foreground deletion, so that whoever deletes it, it only vanishes after its pods.
"""

from __future__ import annotations

from controllers.framework import constants as names
from controllers.framework.types import Framework
from store.kube.objects import Object
from store.kube.resources import CONFIG_MAPS


def build_config_map(framework: Framework) -> Object:
    """The ConfigMap to create for the Framework's current attempt."""
    assert framework.status is not None, "an action is in terms of a status"
    attempt = framework.status.attempt_status
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": attempt.config_map_name,
            "namespace": framework.namespace,
            "labels": {names.FRAMEWORK_NAME: framework.name},
            "annotations": {
                names.FRAMEWORK_NAMESPACE: framework.namespace,
                names.FRAMEWORK_NAME: framework.name,
                names.CONFIG_MAP_NAME: attempt.config_map_name,
                names.FRAMEWORK_UID: framework.uid,
                names.FRAMEWORK_ATTEMPT_ID: str(attempt.id),
            },
            "ownerReferences": [
                _controlled_by(names.FRAMEWORKS.api_version, names.FRAMEWORKS.kind, framework.name, framework.uid)
            ],
            "finalizers": [names.FOREGROUND_DELETION],
        },
    }


def attempt_reference(framework: Framework) -> Object:
    """The reference by which a pod belongs to the Framework's current attempt."""
    assert framework.status is not None, "an action is in terms of a status"
    attempt = framework.status.attempt_status
    return _controlled_by(
        CONFIG_MAPS.api_version, CONFIG_MAPS.kind, attempt.config_map_name, attempt.config_map_uid or ""
    )


def _controlled_by(api_version: str, kind: str, name: str, uid: str) -> Object:
    return {
        "apiVersion": api_version,
        "kind": kind,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
