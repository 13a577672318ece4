"""What a passed barrier leaves for the containers: the gang's addresses, in several forms.

- `framework.json`: the Framework, one line, without apiVersion and kind, its statuses decompressed.
- `membership.json`: who the members are, and the digest of it.
- `hostfile.ROLE`: the addresses of a role, one a line, for gangs whose list no environment can hold.
- `injector.sh`: to be sourced; exports the addresses and the digest. It is put in place last.

Each file appears whole or not at all. Rendering is pure.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from controllers.barrier_readiness import Look, Role
from controllers.framework.types import CompletionPolicy, TaskRoleSpec
from controllers.framework.wire import decode_spec
from store.kube.objects import Object

FRAMEWORK_OBJECT_FILE_PATH = "./framework.json"
INJECTOR_FILE_PATH = "./injector.sh"
MEMBERSHIP_FILE_PATH = "./membership.json"
HOSTFILE_PREFIX = "./hostfile."

MAX_EXPORT = 128 * 1024
"""Bytes that Linux passes to a program in one variable; with a longer one no program can be started."""

_PORT = "65535"  # no port is longer


class File(NamedTuple):
    path: str
    content: bytes
    mode: int = 0o644


def render(framework: Object, look: Look, *, redact: bool = False) -> list[File]:
    """The files for a gang that is whole. `framework` is decompressed. `redact`: leave out what tells how the tasks run
    (pod templates, annotations), which the containers of one role need not know of another. Raises `BadFramework`."""
    digest = membership_digest(look.roles)
    return [
        File(FRAMEWORK_OBJECT_FILE_PATH, msgspec.json.encode(_shown(framework, redact))),
        File(MEMBERSHIP_FILE_PATH, msgspec.json.encode(_membership(framework, look.roles, digest))),
        *(File(f"{HOSTFILE_PREFIX}{role.name}", _hostfile(role)) for role in look.roles),
        File(INJECTOR_FILE_PATH, _injector(look.roles, digest, is_empty=framework.get("status") is None), 0o755),
    ]


def membership_digest(roles: Sequence[Role]) -> str:
    """SHA-256 over (role, index, pod UID) of every member, in hex: equal for pods that saw the same gang."""
    lines = sorted((role.name, member.index, member.pod_uid) for role in roles for member in role.members)
    text = "".join(f"{role} {index} {uid}\n" for role, index, uid in lines)
    return hashlib.sha256(text.encode()).hexdigest()


def write_files(directory: Path, files: Sequence[File]) -> None:
    """Put the files in place, in this order, each whole. Raises `OSError`; then the last ones are not there."""
    prepared: list[tuple[str, Path]] = []
    try:
        for file in files:
            descriptor, temporary = tempfile.mkstemp(prefix=".barrier-", dir=directory)
            prepared.append((temporary, directory / file.path))
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(file.content)
                os.fchmod(stream.fileno(), file.mode)
        for temporary, path in prepared:
            os.replace(temporary, path)
    finally:
        for temporary, _ in prepared:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


def _shown(framework: Object, redact: bool) -> Object:
    """As frameworkcontroller's barrier shows it: its readers expect no fields to be left out of the spec."""
    spec = decode_spec(framework.get("spec"))
    roles = [_complete(role, redact) for role in spec.task_roles]
    filled = msgspec.to_builtins(msgspec.structs.replace(spec, task_roles=tuple(roles)))
    metadata = framework["metadata"]
    if redact:
        metadata = {name: value for name, value in metadata.items() if name not in ("annotations", "managedFields")}
    return {"metadata": metadata, "spec": filled, "status": framework.get("status")}


def _complete(role: TaskRoleSpec, redact: bool) -> TaskRoleSpec:
    policy = role.framework_attempt_completion_policy or CompletionPolicy()
    task = msgspec.structs.replace(role.task, pod={} if redact else role.task.pod)
    return msgspec.structs.replace(role, framework_attempt_completion_policy=policy, task=task)


def _membership(framework: Object, roles: Sequence[Role], digest: str) -> Object:
    metadata = framework["metadata"]
    attempt = (framework.get("status") or {}).get("attemptStatus") or {}
    return {
        "framework": {name: metadata.get(name) for name in ("namespace", "name", "uid")},
        "attemptInstanceUID": attempt.get("instanceUID"),
        "digest": digest,
        "roles": [
            {
                "name": role.name,
                "members": [{"index": each.index, "ip": each.ip, "podUID": each.pod_uid} for each in role.members],
            }
            for role in roles
        ],
    }


def _hostfile(role: Role) -> bytes:
    return "".join(f"{member.ip}\n" for member in role.members).encode()


def _injector(roles: Sequence[Role], digest: str, *, is_empty: bool) -> bytes:
    lines = ["#!/bin/bash"]
    if not is_empty:
        lines.append('echo "frameworkbarrier: setting the addresses of the gang"')
        for role in roles:
            lines += _assignment(f"FB_{role.name.upper()}_IPS", [member.ip for member in role.members])
        for role in roles:
            port = f"${{FB_{role.name.upper()}_PORT}}"
            addresses = [f"{_bracketed(member.ip)}:{port}" for member in role.members]
            lines += _assignment(f"FB_{role.name.upper()}_ADDRESSES", addresses, port)
        lines += _assignment("FB_MEMBERSHIP_DIGEST", [digest])
        lines.append('echo "frameworkbarrier: done"')
    return "".join(f"{line}\n" for line in lines).encode()


def _assignment(name: str, items: Sequence[str], port: str = "") -> list[str]:
    """Set and show a variable. Nothing in it but `port` means something to a shell within double quotes."""
    value = ",".join(items)
    length = len(name) + len(value.replace(port, _PORT) if port else value) + len("=\0")
    keyword = "export " if length <= MAX_EXPORT else ""  # too long: known to the shell alone
    return [f'{keyword}{name}="{value}"', f'echo "{name}=${{{name}}}"']


def _bracketed(ip: str) -> str:
    return f"[{ip}]" if ":" in ip else ip
