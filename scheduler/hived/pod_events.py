"""Telling the owner of a pod what becomes of it."""

from __future__ import annotations

from store.kube.events import Recorder, Severity
from store.kube.objects import Object
from store.kube.resources import PODS


class PodEvents:
    """Events on pods; without a recorder nobody is told."""

    def __init__(self, recorder: Recorder | None) -> None:
        self._recorder = recorder

    def event(self, pod: Object, severity: Severity, reason: str, message: str) -> None:
        """`reason`: a machine's word in CamelCase."""
        if self._recorder is not None:
            self._recorder.event(pod, severity, reason, message, api_version=PODS.api_version, kind=PODS.kind)
