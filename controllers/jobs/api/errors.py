"""Errors in the handling of a job, apart from the API's own (`store.kube.api.errors`).

JobError
├── AdoptionRefused   the job may not adopt anything: it is being deleted, or is not the cached one
├── ClaimFailed       some pods or services could not be adopted or released
├── ActionsFailed     some of the decided actions failed; the others were taken
├── Leftover          an object of an earlier job of that name still has a needed name; it will be deleted
├── NameTaken         an object that the job does not own has a needed name; an administrator must remove it
├── HookFailed        an operator's hook raised
└── NotServed         the API server does not serve a resource that is needed
"""

from __future__ import annotations

from collections.abc import Sequence

from store.errors import RcfarmError
from store.kube.api.objects import Object, Resource, controller_of, is_deleting, key_of, name_of


class JobError(RcfarmError):
    """An error in the handling of one job. The sync is retried later."""


class AdoptionRefused(JobError):
    """The live job is being deleted or is another one than the cached job, which may therefore not adopt anything."""


class ClaimFailed(JobError):
    """Some candidates could not be adopted or released. `claimed`: the candidates that do belong to the job."""

    def __init__(self, owner: Object, resource: Resource, claimed: list[Object], errors: Sequence[Exception]) -> None:
        super().__init__(
            f"{key_of(owner)}: {len(errors)} of its {resource.plural} could not be claimed: {_joined(errors)}"
        )
        self.claimed, self.errors = claimed, tuple(errors)


class ActionsFailed(JobError):
    """Some actions failed; each error is in `errors`."""

    def __init__(self, job: Object, errors: Sequence[Exception]) -> None:
        super().__init__(f"{key_of(job)}: {_joined(errors)}")
        self.errors = tuple(errors)


class Leftover(JobError):
    """An object of an earlier job of the same name, or one that is being deleted, still has the name."""


class NameTaken(JobError):
    """An object with another controller, or with none, has the name."""


class HookFailed(JobError):
    """An operator's hook raised; the message names the hook and the error."""


class NotServed(JobError):
    """The API server does not serve a resource; the message says what to install or to disable."""


def not_ours(obj: Object, resource: Resource, job: Object, job_kind: str) -> JobError:
    """Return the error for an object that has a needed name and is not controlled by the job."""
    controller = controller_of(obj)
    what = f"{resource.kind} {key_of(obj)}"
    if is_deleting(obj):
        return Leftover(f"{what} is still being deleted")
    if controller is None:
        return NameTaken(f"{what} has the name that {job_kind} {name_of(job)} needs, and has no controller; delete it")
    owner = f"{controller.get('kind')} {controller.get('name')}"
    if owner == f"{job_kind} {name_of(job)}":
        return Leftover(f"{what} belongs to an earlier {owner} and is not collected yet")
    return NameTaken(f"{what} has the name that {job_kind} {name_of(job)} needs, and belongs to {owner}; rename one")


def _joined(errors: Sequence[Exception]) -> str:
    """Join the first three distinct texts: a job of a thousand replicas fails a thousand times with one cause."""
    texts = list(dict.fromkeys(str(error) for error in errors))
    more = f"; and {len(texts) - 3} more" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + more
