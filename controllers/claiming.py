"""Which pods and services belong to a job, and making it so: adoption and release.

The model: candidates are what the cache has under the job's UID and under its labels. Each is classified by a pure
rule; then the API server is asked to change owner references where needed. The server is the judge: a patch carries the
candidate's UID and, for an adoption, its resource version, so a successor of the same name or an object that somebody
changed meanwhile is never touched, and a second controller is refused.

Before the first adoption of a sync the job itself is read live, once for all of its pods and services: the cached job
may be alive when the real one is being deleted or is another one of the same name. That answer, good or bad, stands
until the sync ends.

Source: client-go's controller reference managers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from enum import Enum

from controllers.concurrency import attempt_all
from controllers.job_errors import AdoptionRefused, ClaimFailed
from store.kube.api import KubeApi
from store.kube.errors import Invalid, KubeError, NotFound
from store.kube.objects import (
    Object,
    controller_of,
    is_deleting,
    key_of,
    labels_of,
    name_of,
    namespace_of,
    resource_version_of,
    uid_of,
)
from store.kube.resources import Resource


class Claim(Enum):
    """What to do about a candidate."""

    SKIP = "skip"
    KEEP = "keep"
    ADOPT = "adopt"
    RELEASE = "release"


def classify(candidate: Object, owner: Object, selector: Mapping[str, str]) -> Claim:
    """What the owner should do about the candidate. `selector`: labels that it must carry to belong."""
    controller = controller_of(candidate)
    matches = selector.items() <= labels_of(candidate).items()
    if controller is None:
        unwanted = is_deleting(owner) or not matches or is_deleting(candidate)
        return Claim.SKIP if unwanted else Claim.ADOPT
    if controller.get("uid") != uid_of(owner):
        return Claim.SKIP
    if matches:
        return Claim.KEEP
    return Claim.SKIP if is_deleting(owner) else Claim.RELEASE


def recheck_deletion_timestamp(get_object: Callable[[], Awaitable[Object]], uid: str) -> Callable[[], Awaitable[None]]:
    """A check to make before adopting: raises unless `get_object` still finds the object with `uid`, not being deleted.

    It reads once; every later call answers the same (the seed's `RecheckDeletionTimestamp`). Raises `AdoptionRefused`,
    or the `KubeError` of the read.
    """
    answers: list[Exception | None] = []
    lock = asyncio.Lock()

    async def can_adopt() -> None:
        async with lock:
            if not answers:
                answers.append(await _reason_against_adoption(get_object, uid))
        if answers[0] is not None:
            raise answers[0]

    return can_adopt


async def _reason_against_adoption(get_object: Callable[[], Awaitable[Object]], uid: str) -> Exception | None:
    try:
        live = await get_object()
    except KubeError as error:
        return error
    if uid_of(live) != uid:
        return AdoptionRefused(f"{key_of(live)}: deleted and created again: its UID is {uid_of(live)}, not {uid}")
    if is_deleting(live):
        return AdoptionRefused(f"{key_of(live)}: being deleted since {live['metadata']['deletionTimestamp']}")
    return None


class ClaimManager:
    """Claims objects of one resource for one owner, during one sync.

    `reference`: the owner reference that an adoption adds. `can_adopt`: see `recheck_deletion_timestamp`; share it
    between the managers of a sync. `released` is told of each object that is not the owner's any more.
    """

    def __init__(
        self,
        api: KubeApi,
        resource: Resource,
        owner: Object,
        *,
        reference: Object,
        selector: Mapping[str, str],
        can_adopt: Callable[[], Awaitable[None]],
        released: Callable[[Object], None] = lambda obj: None,
    ) -> None:
        self._api, self._resource, self._owner = api, resource, owner
        self._reference, self._selector = reference, selector
        self._can_adopt, self._released = can_adopt, released

    async def claim(self, candidates: Iterable[Object]) -> list[Object]:
        """The candidates that belong to the owner, after adopting and releasing. Raises `ClaimFailed` at the end."""
        claims: dict[Claim, list[Object]] = {claim: [] for claim in Claim}
        for candidate in candidates:
            claims[classify(candidate, self._owner, self._selector)].append(candidate)
        adoptions = await attempt_all(claims[Claim.ADOPT], self._adopt, errors=(KubeError, AdoptionRefused))
        releases = await attempt_all(claims[Claim.RELEASE], self._release, errors=(KubeError,))
        adopted = [result for result in adoptions if isinstance(result, dict)]
        claimed = claims[Claim.KEEP] + adopted
        if errors := [result for result in (*adoptions, *releases) if isinstance(result, Exception)]:
            raise ClaimFailed(self._owner, self._resource, claimed, errors)
        return claimed

    async def _adopt(self, obj: Object) -> Object | None:
        """The object as adopted; None when it is gone."""
        await self._can_adopt()
        metadata = {
            "uid": uid_of(obj),
            "resourceVersion": resource_version_of(obj),
            "ownerReferences": [self._reference],
        }
        try:
            return await self._patch(obj, {"metadata": metadata})
        except NotFound:
            return None

    async def _release(self, obj: Object) -> None:
        """Gone, or not the object that it was (its UID cannot change): nothing is left to release."""
        reference = {"$patch": "delete", "uid": uid_of(self._owner)}
        metadata = {"uid": uid_of(obj), "ownerReferences": [reference]}
        with suppress(NotFound, Invalid):
            await self._patch(obj, {"metadata": metadata})
        self._released(obj)

    async def _patch(self, obj: Object, patch: Object) -> Object:
        return await self._api.patch(self._resource, name_of(obj), namespace_of(obj), patch, patch_type="strategic")
