"""What marks an object in the cluster as the one that an attempt of an execution has created."""

from __future__ import annotations

from typing import NamedTuple

from controllers.tasks.api.plugin import TaskExecutionContext
from store.kube.api.objects import Object, annotations_of, join_key, split_key

PLUGIN = "rcfarm/plugin"  # label: the id of the plugin that created the object
EXECUTION = "rcfarm/execution"  # annotation: the execution's id
ATTEMPT = "rcfarm/attempt"  # annotation: the number of the attempt, from 0
INTENT = "rcfarm/intent"  # annotation: the nonce of the attempt's intent


class Place(NamedTuple):
    """What an intent declares: the attempt's object, and a random text that no other attempt has."""

    namespace: str
    name: str
    nonce: str

    @property
    def key(self) -> str:
        """Return NAMESPACE/NAME."""
        return join_key(self.namespace, self.name)

    def __str__(self) -> str:
        return f"{self.key} {self.nonce}"

    @classmethod
    def parse(cls, intent: str) -> Place:
        """Return what an intent's key says."""
        key, _, nonce = intent.partition(" ")
        return cls(*split_key(key), nonce)


class Stamps(NamedTuple):
    """Which intent an object was created for."""

    execution: str
    attempt: str
    nonce: str


def stamps_of(obj: Object) -> Stamps:
    """Return which intent an object was created for; texts are "" where it has no stamp."""
    found = annotations_of(obj)
    return Stamps(*(str(found.get(name) or "") for name in (EXECUTION, ATTEMPT, INTENT)))


def stamps_for(context: TaskExecutionContext, place: Place) -> Stamps:
    """Return the stamps of the attempt's object."""
    identity = context.task_execution_metadata.get_task_execution_id().get_id()
    return Stamps(identity.name, str(identity.retry_attempt), place.nonce)
