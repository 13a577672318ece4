"""What comes in from the API server, before anybody else sees it: is it an object of our kind, and what of it is kept.

An object that can't be read as one is logged, counted and left out. It harms none of its neighbours. As long as it is
there it is kept in `unreadable` with the reason, if its key can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any, TypeAlias

import structlog

from store.kube.objects import MalformedObject, Object, join_key, key_of
from store.kube.resources import Resource

log = structlog.get_logger(__name__)

_SHOWN = 100  # characters of what is written where something else belongs

Transform: TypeAlias = Callable[[Object], Object]


def without_managed_fields(obj: Object) -> Object:
    """Transform: leave out the bookkeeping of server-side apply, which no controller reads."""
    metadata = obj["metadata"]
    if "managedFields" not in metadata:
        return obj
    return {**obj, "metadata": {name: value for name, value in metadata.items() if name != "managedFields"}}


class Intake:
    """Admits objects of one resource. `malformed`: how often one was left out. `unreadable`: those that are there now
    and can't be understood, by key, and why.

    `transform` may leave out parts of an object; it gets the object as the server sent it and does not change it.
    """

    def __init__(self, resource: Resource, transform: Transform | None = None) -> None:
        self.malformed = 0
        self.unreadable: dict[str, str] = {}
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
        if self._transform is not None:
            try:
                admitted = self._transform(admitted)
            except Exception as error:
                self.refuse(obj, f"its transform failed: {error!r}")
                return None
        if self.unreadable:
            self.unreadable.pop(key_of(admitted), None)
        return admitted

    def refuse(self, obj: Any, defect: str) -> None:
        """Leave out what can't be understood."""
        self.malformed += 1
        if key := key_in(obj):
            self.unreadable[key] = defect
        log.error(
            "An object can't be understood and is left out",
            resource=self._resource.plural,
            namespace=metadata_text(obj, "namespace"),
            name=metadata_text(obj, "name"),
            reason=defect,
        )

    def forget(self, obj: Any) -> None:
        """It is gone: nothing of it is left to be understood."""
        self.unreadable.pop(key_in(obj), None)

    def retain(self, keys: Set[str]) -> None:
        """Only these are there."""
        self.unreadable = {key: reason for key, reason in self.unreadable.items() if key in keys}

    def _defect(self, obj: Any) -> str:
        """Why it is not an object of the resource; "" when it is. Items of a list need not say what they are."""
        if isinstance(obj, MalformedObject):
            return obj.reason
        if not isinstance(obj, dict):
            return "it is not an object"
        kind, api_version = obj.get("kind"), obj.get("apiVersion")
        if kind is not None and kind != self._resource.kind:
            return f"its kind is {_shown(kind)} instead of {self._resource.kind!r}"
        if api_version is not None and api_version != self._api_version:
            return f"its apiVersion is {_shown(api_version)} instead of {self._api_version!r}"
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


def _shown(value: object) -> str:
    return repr(value)[:_SHOWN]


def key_in(obj: Any) -> str:
    """The key of what may not even be an object; "" when it has none."""
    name = metadata_text(obj, "name")
    return join_key(metadata_text(obj, "namespace"), name) if name else ""
