"""Decides which pods and services belong to a job; adopts and releases them accordingly.

The model: candidates are the cached objects under the job's UID and under its labels. A pure rule classifies each; then
owner references are patched where needed. A patch carries the candidate's UID and, for an adoption, its resource
version. So the API server rejects a patch that would touch a successor of the same name, an object that has changed
since, or an object that already has a controller.

Before the first adoption of a sync the job itself is read live, once for all of its pods and services: the cached job
may look alive when the real one is being deleted or is another job of the same name. The result, a success or an error,
holds until the sync ends.

Source: client-go's controller reference managers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from enum import Enum

from controllers.jobs.api.errors import AdoptionRefused, ClaimFailed
from controllers.loop.writes import attempt_all
from store.kube.api.errors import Invalid, KubeError, NotFound
from store.kube.api.objects import (
    Object,
    Resource,
    controller_of,
    is_deleting,
    key_of,
    labels_of,
    name_of,
    namespace_of,
    resource_version_of,
    uid_of,
)
from store.kube.api.protocol import KubeApi


class Claim(Enum):
    """The verdict on a candidate."""

    SKIP = "skip"
    KEEP = "keep"
    ADOPT = "adopt"
    RELEASE = "release"


def classify(candidate: Object, owner: Object, selector: Mapping[str, str]) -> Claim:
    """Decide what the owner does with the candidate. `selector`: labels that its objects must carry."""
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
    """Return a check to await before an adoption: `get_object` must find the object with `uid`, and not being deleted.

    The check reads once; every later call has the same result, as in kubeflow's `RecheckDeletionTimestamp`. It raises
    `AdoptionRefused`, or the `KubeError` of the read.
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
    between the managers of a sync. `released`: called with each object that no longer belongs to the owner.
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
        """Adopt and release. Return the candidates that belong to the owner. Raises `ClaimFailed` at the end."""
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
        """Adopt the object and return its new state, or None when it is gone."""
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
        """Remove our owner reference. `NotFound`, or `Invalid` for another UID, means there is nothing to release."""
        reference = {"$patch": "delete", "uid": uid_of(self._owner)}
        metadata = {"uid": uid_of(obj), "ownerReferences": [reference]}
        with suppress(NotFound, Invalid):
            await self._patch(obj, {"metadata": metadata})
        self._released(obj)

    async def _patch(self, obj: Object, patch: Object) -> Object:
        return await self._api.patch(self._resource, name_of(obj), namespace_of(obj), patch, patch_type="strategic")
