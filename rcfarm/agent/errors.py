"""Errors of the node agent. Their messages go into reality, for operators: they name the field and what to do.

AgentError
├── InstallFailed     the pod can't be made ready to start; the previous version keeps running
│   └── BadArtifact   it does not match the manifest, or can't be unpacked safely
├── StartFailed       a launchable can't be started now; retried with back-off
├── StateError        the state directory can't be used
├── ExecRefused       a client's command is not run
└── NoSuchLaunchable, NoSuchLog   a client has named what the pod does not have
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from store.errors import RcfarmError
from store.schema.records import NO_SPACE


class AgentError(RcfarmError):
    """The base class: the agent can't do what was asked of it."""


class InstallFailed(AgentError):
    """The pod can't be made ready to start."""


class BadArtifact(InstallFailed):
    """The artifact has another digest, is too large, or holds members that would leave their directory."""


class StartFailed(AgentError):
    """A launchable can't be started now."""


class NoSuchLaunchable(AgentError):
    """The pod has no launchable of that name."""


class NoSuchLog(AgentError):
    """The pod has no such log; the message says what there is."""


class ExecRefused(AgentError):
    """The command of a client is not run."""


class StateError(AgentError):
    """The state directory is in use by another agent, or can't be written."""


def describe_os_error(error: OSError, path: Path | str) -> str:
    """Return a message for the operator: what failed and what to do."""
    place = error.filename or path
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{NO_SPACE} of {place}: free some"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"no permission for {place}: the agent runs as uid {os.geteuid()}"
    return f"{place}: {error.strerror or error}"
