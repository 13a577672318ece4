"""What is there: the caches, and what the last actions found out that the caches may not show yet.

An object counts only if it has the UID that the status recorded; another one of the same name is a stranger. An object
that a quorum read or a deletion found to be gone is gone, whatever an older cache still shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from controllers.framework.actions import (
    Created,
    CreateFailed,
    DeleteAccepted,
    Failed,
    Gone,
    NameTaken,
    Outcome,
    Present,
    Target,
)
from store.kube.objects import Object, uid_of


class Observed:
    """One step's view of the world. `config_map` and `pods` (by name) are what the caches show."""

    def __init__(self, config_map: Object | None, pods: Mapping[str, Object], outcomes: Iterable[Outcome] = ()) -> None:
        self._config_map, self._pods = config_map, pods
        self.refusals: dict[Target, CreateFailed] = {}
        self.name_taken: dict[Target, Object | None] = {}
        self.accepted: set[str] = set()
        self.failed: dict[str, str] = {}
        self.present: dict[str, Object] = {}
        self._created: dict[Target, str] = {}
        self._gone: dict[str, Object | None] = {}
        for outcome in outcomes:
            self._note(outcome)
        self.creation_failed = bool(self.refusals or self.name_taken)
        """Whether something could not be created just now; then nothing is created before the back-off ends."""
        self.creation_succeeded = bool(self._created)

    def _note(self, outcome: Outcome) -> None:
        match outcome:
            case Created(target, uid):
                self._created[target] = uid
            case CreateFailed(target):
                self.refusals[target] = outcome
            case NameTaken(target, holder):
                self.name_taken[target] = holder
            case DeleteAccepted(uid):
                self.accepted.add(uid)
            case Failed(uid, message):
                self.failed[uid] = message
            case Present(found):
                self.present[uid_of(found)] = found
            case Gone(uid, final):
                self._gone[uid] = final or self._gone.get(uid)

    def config_map(self, uid: str | None) -> Object | None:
        """The ConfigMap of that UID, if it exists."""
        return self._if_it_is(self._config_map, uid)

    def pod(self, name: str, uid: str | None) -> Object | None:
        """The pod of that name and UID, if it exists."""
        return self._if_it_is(self._pods.get(name), uid)

    def _if_it_is(self, found: Object | None, uid: str | None) -> Object | None:
        if uid is None or uid in self._gone:
            return None
        if found is not None and found["metadata"].get("uid") == uid:
            return found
        return self.present.get(uid)

    def is_gone(self, uid: str | None) -> bool:
        """Whether it is certain that no object of that UID exists."""
        return uid in self._gone

    def final_state(self, uid: str | None) -> Object | None:
        """The last known state of an object that is gone, if anybody saw it."""
        return self._gone.get(uid or "")

    def holder(self, target: Target, name: str) -> Object | None:
        """Who has the name of an object that is yet to be created."""
        held = self.name_taken.get(target)
        if held is None:
            held = self._config_map if target is None else self._pods.get(name)
        return None if held is None or self.is_gone(uid_of(held)) else held

    def pods(self) -> Iterable[Object]:
        """All pods that the cache shows, without those that are gone."""
        return (pod for pod in self._pods.values() if pod["metadata"].get("uid") not in self._gone)

    def take_created(self, target: Target) -> str | None:
        """The UID of the object that was created for the target; it belongs to one attempt only."""
        return self._created.pop(target, None)

    def take_refusal(self, target: Target) -> CreateFailed | None:
        """Why the target's object could not be created; it concerns one attempt only."""
        return self.refusals.pop(target, None)
