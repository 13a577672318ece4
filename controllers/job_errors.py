"""What may stand in the way of a job, apart from the API's own errors (`store.kube.errors`).

JobError
├── AdoptionRefused   the job may not adopt anything: it is going, or not the one that the cache shows
├── ClaimFailed       some pods or services could not be adopted or released
├── ActionsFailed     some of what was decided could not be done; the rest was
├── Leftover          a name still belongs to what an earlier job of our name left; it will go
├── NameTaken         a name belongs to somebody else; it takes a person to change that
├── HookFailed        an operator's hook raised
└── NotServed         the API server does not know the kind of object that is needed
"""

from __future__ import annotations

from collections.abc import Sequence

from store.kube.objects import Object, controller_of, is_deleting, key_of, name_of
from store.kube.resources import Resource


class JobError(Exception):
    """Something in the way of one job. The job is tried again later."""


class AdoptionRefused(JobError):
    """The live job is gone, being deleted, or another one; its cached self may not adopt anything."""


class ClaimFailed(JobError):
    """Some candidates could not be adopted or released. `claimed`: those that belong to the job all the same."""

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
    """An object of an earlier job with our name, or one on its way out, still has the name."""


class NameTaken(JobError):
    """An object that belongs to somebody else has the name."""


class HookFailed(JobError):
    """An operator's hook raised; the message names the hook and the error."""


class NotServed(JobError):
    """The API server does not serve a resource; the message says what to install or to switch off."""


def not_ours(obj: Object, resource: Resource, job: Object, job_kind: str) -> JobError:
    """The error for an object that has a name we need and is not the job's."""
    controller = controller_of(obj)
    what = f"{resource.kind} {key_of(obj)}"
    if is_deleting(obj):
        return Leftover(f"{what} is still being deleted")
    if controller is None:
        return NameTaken(f"{what} has the name that {job_kind} {name_of(job)} needs, and belongs to nobody; delete it")
    owner = f"{controller.get('kind')} {controller.get('name')}"
    if owner == f"{job_kind} {name_of(job)}":
        return Leftover(f"{what} belongs to an earlier {owner} and is not collected yet")
    return NameTaken(f"{what} has the name that {job_kind} {name_of(job)} needs, and belongs to {owner}; rename one")


def _joined(errors: Sequence[Exception]) -> str:
    """The first few: a job of a thousand replicas fails a thousand times with one cause."""
    texts = list(dict.fromkeys(str(error) for error in errors))
    more = f"; and {len(texts) - 3} more" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + more
