"""Definitions of custom resources that take anything, for tests."""

from __future__ import annotations

from store.kube.api.objects import Object, Resource


def definition(resource: Resource, *, has_status: bool = False) -> Object:
    """Return a CustomResourceDefinition (v1) of `resource`, whose schema accepts every field."""
    version = {
        "name": resource.version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
        **({"subresources": {"status": {}}} if has_status else {}),
    }
    names = {"plural": resource.plural, "kind": resource.kind, "listKind": f"{resource.kind}List"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{resource.plural}.{resource.group}"},
        "spec": {
            "group": resource.group,
            "scope": "Namespaced" if resource.namespaced else "Cluster",
            "names": names | {"singular": resource.kind.lower()},
            "versions": [version],
        },
    }
