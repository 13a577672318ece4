"""Informers on what an operator's jobs own: only objects with the operator's group label are watched at all.

They are found by the UID of the job that controls them or, while nobody does, by the job that their labels name, so
that a sync costs as much as the job has pods, however many others there are.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from controllers.controller_interface import ControllerInterface
from store.kube.api import KubeApi
from store.kube.indexes import Indexer, by_controller, by_label
from store.kube.informer import Informer
from store.kube.objects import Object, controller_of
from store.kube.resources import PODS, SERVICES, Resource

_OWNER, _ORPHANS = "owner", "orphans"


class JobInformers:
    """Informers in one namespace or, with "", in all. `clock`: monotonic seconds."""

    def __init__(
        self,
        api: KubeApi,
        controller: ControllerInterface,
        *,
        namespace: str = "",
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._api, self._namespace, self._clock, self._rng = api, namespace, clock, rng
        self._selector = f"{controller.get_group_name_label_key()}={controller.get_group_name_label_value()}"
        self._job_label = controller.get_job_name_label_key()
        self.pods, self.services = self.make(PODS), self.make(SERVICES)

    def make(self, resource: Resource) -> Informer:
        """A new informer on one kind of child."""
        return Informer(
            self._api,
            resource,
            namespace=self._namespace,
            label_selector=self._selector,
            indexers={_OWNER: by_controller, _ORPHANS: _orphans_by_label(self._job_label)},
            clock=self._clock,
            rng=self._rng,
        )


def _orphans_by_label(label: str) -> Indexer:
    """Indexer: `NAMESPACE/VALUE` of a label, for what nobody controls."""
    values = by_label(label)
    return lambda obj: values(obj) if controller_of(obj) is None else ()


def candidates(children: Informer, job_uid: str, namespace: str, label_value: str) -> list[Object]:
    """What a job may claim: everything under its UID, and the orphans under its label."""
    return children.by_index(_OWNER, job_uid) + children.by_index(_ORPHANS, f"{namespace}/{label_value}")
