"""The barrier's settings, from environment variables: which gang, how long to wait, and which member this pod is.

There is no configuration file. The names are those of frameworkcontroller's barrier, so that its manifests work
unchanged; the pod's identity comes from the variables that the operator sets in every container.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from controllers.framework.api.types import (
    FRAMEWORK_ATTEMPT_INSTANCE_UID,
    FRAMEWORK_NAME,
    FRAMEWORK_NAMESPACE,
    FRAMEWORK_UID,
    TASK_ATTEMPT_INSTANCE_UID,
    TASK_INDEX,
    TASK_ROLE_NAME,
)
from store.errors import RcfarmError

COMPONENT_NAME = "frameworkbarrier"
ENV_NAME_BARRIER_CHECK_INTERVAL_SEC = "BARRIER_CHECK_INTERVAL_SEC"
ENV_NAME_BARRIER_CHECK_TIMEOUT_SEC = "BARRIER_CHECK_TIMEOUT_SEC"
ENV_NAME_KUBE_API_SERVER_ADDRESS = "KUBE_APISERVER_ADDRESS"
ENV_NAME_KUBE_CONFIG = "KUBECONFIG"

DEFAULT_INTERVAL_SEC = 10
MIN_INTERVAL_SEC = 5
DEFAULT_TIMEOUT_SEC = 600
MIN_TIMEOUT_SEC, MAX_TIMEOUT_SEC = 60, 1200

_INTEGER = re.compile(r"[+-]?[0-9]{1,19}", re.ASCII)
_ATTEMPT = re.compile(r"(?P<id>[0-9]{1,18})_(?P<uid>.+)", re.ASCII)


class BadConfig(RcfarmError, ValueError):
    """An environment variable is invalid; the message names the variable and a valid value."""


@dataclass(frozen=True, slots=True)
class AttemptInstance:
    """One attempt of a Framework or a task: its number, and the UID of its ConfigMap or pod."""

    id: int
    uid: str

    @classmethod
    def parse(cls, text: str | None) -> AttemptInstance | None:
        """Parse `{id}_{uid}`, the status' form; return None for anything else."""
        found = _ATTEMPT.fullmatch(text or "")
        return cls(int(found["id"]), found["uid"]) if found else None


@dataclass(frozen=True, slots=True)
class Identity:
    """The pod's identity from its environment. An unset variable is not checked."""

    framework_uid: str = ""
    framework_attempt: AttemptInstance | None = None
    task_role: str = ""
    task_index: int | None = None
    task_attempt: AttemptInstance | None = None


@dataclass(frozen=True, slots=True)
class Config:
    """`kube_api_server_address` replaces the server of the kubeconfig; with neither, the pod's service account is used.

    `barrier_check_interval_sec`: seconds between two reads where a watch is not allowed, and the longest pause after an
    error. `barrier_check_timeout_sec`: seconds until the barrier gives up.
    """

    framework_namespace: str
    framework_name: str
    kube_api_server_address: str = ""
    kube_config_file_path: str = ""
    barrier_check_interval_sec: int = DEFAULT_INTERVAL_SEC
    barrier_check_timeout_sec: int = DEFAULT_TIMEOUT_SEC
    identity: Identity = field(default_factory=Identity)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Config:
        """Read the settings from environment variables. Raises `BadConfig`."""
        config = cls(
            framework_namespace=environ.get(FRAMEWORK_NAMESPACE, ""),
            framework_name=environ.get(FRAMEWORK_NAME, ""),
            kube_api_server_address=environ.get(ENV_NAME_KUBE_API_SERVER_ADDRESS, ""),
            kube_config_file_path=environ.get(ENV_NAME_KUBE_CONFIG, ""),
            barrier_check_interval_sec=_integer(environ, ENV_NAME_BARRIER_CHECK_INTERVAL_SEC, DEFAULT_INTERVAL_SEC),
            barrier_check_timeout_sec=_integer(environ, ENV_NAME_BARRIER_CHECK_TIMEOUT_SEC, DEFAULT_TIMEOUT_SEC),
            identity=_identity(environ),
        )
        config._check()
        return config

    def _check(self) -> None:
        for name, value in (
            (FRAMEWORK_NAMESPACE, self.framework_namespace),
            (FRAMEWORK_NAME, self.framework_name),
        ):
            if not value:
                raise BadConfig(f"{name} is not set; the operator sets it in every container of a Framework's pods")
        if self.barrier_check_interval_sec < MIN_INTERVAL_SEC:
            raise BadConfig(
                f"{ENV_NAME_BARRIER_CHECK_INTERVAL_SEC} is {self.barrier_check_interval_sec}; "
                f"set it to {MIN_INTERVAL_SEC} or more"
            )
        if not MIN_TIMEOUT_SEC <= self.barrier_check_timeout_sec <= MAX_TIMEOUT_SEC:
            raise BadConfig(
                f"{ENV_NAME_BARRIER_CHECK_TIMEOUT_SEC} is {self.barrier_check_timeout_sec}; "
                f"set it between {MIN_TIMEOUT_SEC} and {MAX_TIMEOUT_SEC}"
            )


def _integer(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    if not _INTEGER.fullmatch(text):
        raise BadConfig(f"{name} is {text!r}; set it to whole seconds, without a unit")
    return int(text)


def _identity(environ: Mapping[str, str]) -> Identity:
    index = environ.get(TASK_INDEX, "")
    return Identity(
        framework_uid=environ.get(FRAMEWORK_UID, ""),
        framework_attempt=AttemptInstance.parse(environ.get(FRAMEWORK_ATTEMPT_INSTANCE_UID)),
        task_role=environ.get(TASK_ROLE_NAME, ""),
        task_index=int(index) if _INTEGER.fullmatch(index) else None,
        task_attempt=AttemptInstance.parse(environ.get(TASK_ATTEMPT_INSTANCE_UID)),
    )
