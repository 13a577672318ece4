"""The shipped Kubernetes manifests, as the two ways of installation read them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import yaml

from store.kube.api.objects import Object

Variant = Literal["compatible", "native"]

ROOT = Path(__file__).parents[3]
_BASE, _NATIVE = ROOT / "deploy" / "kubernetes", ROOT / "deploy" / "kubernetes-native"
FOLDERS: dict[Variant, Path] = {"compatible": _BASE, "native": _NATIVE}


def documents(path: Path) -> list[Object]:
    """Return the documents of a YAML file."""
    return list(yaml.safe_load_all(path.read_text()))


def manifest(variant: Variant, kind: str, name: str = "") -> Object:
    """Return the object that a variant installs: native's, or the compatible one. Native's Deployment is a patch."""
    folders = [_NATIVE, _BASE] if variant == "native" and kind != "Deployment" else [_BASE]
    for folder in folders:
        for path in sorted(folder.glob("*.yaml")):
            for found in documents(path):
                if found["kind"] == kind and name in ("", found["metadata"]["name"]):
                    return found
    raise LookupError(f"no {kind} {name} in {folders}")


def rights(*roles: Object) -> set[tuple[str, str, str]]:
    """Return what rules allow, as (API group, resource, verb)."""
    return {
        (group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
