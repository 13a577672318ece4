"""Errors of the node agent. Their messages go into reality, for operators: they name the field and what to do.

AgentError
├── InstallFailed     the pod can't be made ready to start; what ran before goes on
│   └── BadArtifact   it is not what the manifest says, or would not unpack safely
├── StartFailed       a launchable can't be started now; tried again with a growing delay
└── StateError        the state directory can't be used
"""

from __future__ import annotations

import errno
import os
from pathlib import Path


class AgentError(Exception):
    """Anything that keeps the agent from doing what was asked for."""


class InstallFailed(AgentError):
    """The pod can't be made ready to start."""


class BadArtifact(InstallFailed):
    """The artifact has another digest, is too large, or holds members that would leave their directory."""


class StartFailed(AgentError):
    """A launchable can't be started now."""


class StateError(AgentError):
    """The state directory is in use by another agent, or can't be written."""


NO_SPACE = "no space left on the disk"  # how every message about a full disk begins, or goes on after a colon


def describe_os_error(error: OSError, path: Path | str) -> str:
    """What failed and what to do about it, in words for an operator."""
    place = error.filename or path
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{NO_SPACE} of {place}: free some"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"no permission for {place}: the agent runs as uid {os.geteuid()}"
    return f"{place}: {error.strerror or error}"
