"""What comes in from the API server, before anybody else sees it: is it an object of our kind, and what of it is kept.

An object that can't be read as one is logged, counted and left out. It harms none of its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import structlog

from store.kube.objects import Object
from store.kube.resources import Resource

log = structlog.get_logger(__name__)

Transform: TypeAlias = Callable[[Object], Object]


def without_managed_fields(obj: Object) -> Object:
    """Transform: leave out the bookkeeping of server-side apply, which no controller reads."""
    metadata = obj["metadata"]
    if "managedFields" not in metadata:
        return obj
    return {**obj, "metadata": {name: value for name, value in metadata.items() if name != "managedFields"}}


class Intake:
    """Admits objects of one resource. `malformed`: how many were left out.

    `transform` may leave out parts of an object; it gets the object as the server sent it and does not change it.
    """

    def __init__(self, resource: Resource, transform: Transform | None = None) -> None:
        self.malformed = 0
        self._resource, self._transform = resource, transform
        self._api_version = resource.api_version
        self._texts = ("name", "resourceVersion", "namespace") if resource.namespaced else ("name", "resourceVersion")

    def admit(self, obj: Any) -> Object | None:
        """The object as it is to be kept; None when it is not one of ours."""
        defect = self._defect(obj)
        if defect:
            self.refuse(obj, defect)
            return None
        admitted: Object = obj
        if self._transform is None:
            return admitted
        try:
            return self._transform(admitted)
        except Exception as error:
            self.refuse(obj, f"its transform failed: {error!r}")
            return None

    def refuse(self, obj: Any, defect: str) -> None:
        """Leave out what can't be understood."""
        self.malformed += 1
        log.error(
            "An object can't be understood and is left out",
            resource=self._resource.plural,
            namespace=metadata_text(obj, "namespace"),
            name=metadata_text(obj, "name"),
            reason=defect,
        )

    def _defect(self, obj: Any) -> str:
        """Why it is not an object of the resource; "" when it is. Items of a list need not say what they are."""
        if not isinstance(obj, dict):
            return "it is not an object"
        kind, api_version = obj.get("kind"), obj.get("apiVersion")
        if kind is not None and kind != self._resource.kind:
            return f"its kind is {kind!r} instead of {self._resource.kind!r}"
        if api_version is not None and api_version != self._api_version:
            return f"its apiVersion is {api_version!r} instead of {self._api_version!r}"
        metadata = obj.get("metadata")
        if not isinstance(metadata, dict):
            return "it has no metadata"
        for name in self._texts:
            value = metadata.get(name)
            if not value or not isinstance(value, str):
                return f"its metadata.{name} is missing or not a text"
        return ""


def metadata_text(obj: Any, name: str) -> str:
    """A text in the metadata of what may not even be an object; "" when it is not there."""
    metadata = obj.get("metadata") if isinstance(obj, dict) else None
    value = metadata.get(name) if isinstance(metadata, dict) else None
    return value if isinstance(value, str) else ""
