"""What an operator tells the `JobController` about its jobs (the seed's `ControllerInterface`)."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from store.kube.objects import Object


class GroupVersion(NamedTuple):
    """`group` is "" for the core group."""

    group: str
    version: str

    def __str__(self) -> str:
        """As objects carry it: `v1`, `apps/v1`."""
        return f"{self.group}/{self.version}" if self.group else self.version


class GroupVersionKind(NamedTuple):
    """A kind of objects, in one version."""

    group: str
    version: str
    kind: str

    @property
    def group_version(self) -> GroupVersion:
        return GroupVersion(self.group, self.version)


class ControllerInterface(Protocol):
    """Implemented by all operators. `controllers.job_operator.JobOperator` does it for any custom resource."""

    def controller_name(self) -> str:
        """Who is it that acts: the component in Events."""

    def get_api_group_version_kind(self) -> GroupVersionKind:
        """The kind of the jobs."""

    def get_api_group_version(self) -> GroupVersion:
        """The version of the jobs' API group."""

    def get_group_name_label_key(self) -> str:
        """The key of the label that every pod and service of the operator carries, with one value for all."""

    def get_group_name_label_value(self) -> str:
        """The value of that label."""

    def get_job_name_label_key(self) -> str:
        """The key of the label that says which job a pod or service is of."""

    def get_replica_type_label_key(self) -> str:
        """The key of the label that says its replica type, in lower case."""

    def get_replica_index_label_key(self) -> str:
        """The key of the label that says its index, in decimal."""

    def get_job_from_informer_cache(self, namespace: str, name: str) -> Object | None:
        """The job as the cache shows it; None when it shows none."""

    async def get_job_from_api_client(self, namespace: str, name: str) -> Object:
        """The job as it is now. Raises `KubeError`, `NotFound` when there is none."""
