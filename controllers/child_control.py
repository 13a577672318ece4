"""Creating and deleting what belongs to a job, told on the job as Events.

One `ChildControl` per resource: the seed's pod control and service control are two of them. It asks and tells; what to
expect of the answer is its caller's business.
"""

from __future__ import annotations

from controllers.controller_interface import GroupVersionKind
from controllers.job_metrics import ChildVerb, JobMetrics
from store.kube.api import KubeApi
from store.kube.errors import AlreadyExists, Conflict, KubeError, NotFound
from store.kube.events import Recorder, Severity
from store.kube.objects import Object, name_of, namespace_of
from store.kube.resources import Resource

_NAMESPACE_TERMINATING = "NamespaceTerminating"  # the cause in Status.details of a 403


class ChildControl:
    """Creates and deletes objects of `resource` for jobs of `job_kind`. `noun`: in the reasons of Events."""

    def __init__(
        self,
        api: KubeApi,
        resource: Resource,
        job_kind: GroupVersionKind,
        recorder: Recorder,
        metrics: JobMetrics,
        *,
        noun: str = "",
    ) -> None:
        self.resource = resource
        self._noun = noun or resource.kind
        self._api, self._job_kind, self._recorder, self._metrics = api, job_kind, recorder, metrics

    async def create(self, job: Object, body: Object) -> Object:
        """The object as stored. Raises `KubeError`; the job gets an Event either way, save for `AlreadyExists`: whether
        that is bad news, only the caller can find out.
        """
        name, namespace = name_of(body), namespace_of(job)
        try:
            created = await self._api.create(self.resource, body, namespace)
        except KubeError as error:
            self._count("create", namespace, ok=False)
            if not isinstance(error, AlreadyExists) and not _namespace_is_terminating(error):
                self._tell(job, "Warning", "FailedCreate", f"{self._kind} {name} could not be created: {error}")
            raise
        self._count("create", namespace, ok=True)
        self._tell(job, "Normal", "SuccessfulCreate", f"Created {self._kind.lower()} {name}")
        return created

    async def delete(self, job: Object, name: str, uid: str, *, why: str = "", force: bool = False) -> bool:
        """Ask for the deletion of the object with this UID. False: it is gone already, and nothing was told.

        `why`: for whoever reads the Event. `force`: without waiting for its kubelet. Raises `KubeError`.
        """
        namespace = namespace_of(job)
        try:
            await self._api.delete(self.resource, name, namespace, uid=uid, grace_period=0 if force else None)
        except (NotFound, Conflict):  # gone, or the name belongs to a successor
            return False
        except KubeError as error:
            self._count("delete", namespace, ok=False)
            self._tell(job, "Warning", "FailedDelete", f"{self._kind} {name} could not be deleted: {error}")
            raise
        self._count("delete", namespace, ok=True)
        reason = f": {why}" if why else ""
        self._tell(job, "Normal", "SuccessfulDelete", f"Deleted {self._kind.lower()} {name}{reason}")
        return True

    @property
    def _kind(self) -> str:
        return self.resource.kind

    def _count(self, verb: ChildVerb, namespace: str, *, ok: bool) -> None:
        self._metrics.child(self._job_kind.kind, verb, self._kind, namespace, ok=ok)

    def _tell(self, job: Object, severity: Severity, reason: str, message: str) -> None:
        self._recorder.event(
            job,
            severity,
            f"{reason}{self._noun}",
            message,
            api_version=str(self._job_kind.group_version),
            kind=self._job_kind.kind,
        )


def _namespace_is_terminating(error: KubeError) -> bool:
    """Everything in the namespace is about to go, and nobody may create Events in it either."""
    causes = error.details.get("causes") or ()
    return any(cause.get("reason") == _NAMESPACE_TERMINATING for cause in causes)
