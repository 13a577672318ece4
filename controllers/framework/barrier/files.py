"""The files that a passed barrier writes for the containers: the gang's addresses, in several forms.

- `framework.json`: the Framework, one line, without apiVersion and kind, its statuses decompressed.
- `membership.json`: the members, and the digest of them.
- `hostfile.ROLE`: the addresses of a role, one per line, for gangs whose list is too long for the environment.
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

from controllers.framework.api.types import CompletionPolicy
from controllers.framework.api.wire import decode_spec
from controllers.framework.barrier.readiness import Look, Role
from store.kube.api.objects import Object

FRAMEWORK_OBJECT_FILE_PATH = "./framework.json"
INJECTOR_FILE_PATH = "./injector.sh"
MEMBERSHIP_FILE_PATH = "./membership.json"
HOSTFILE_PREFIX = "./hostfile."

MAX_EXPORT = 128 * 1024
"""Bytes of the longest variable that Linux passes to a program; with a longer one, exec fails."""

_PORT = "65535"  # no port is longer


class File(NamedTuple):
    path: str
    content: bytes
    mode: int = 0o644


def render(framework: Object, look: Look, *, redact: bool = False) -> list[File]:
    """Return the files for a complete gang. `framework` is decompressed. `redact`: leave out pod templates, annotations
    and managedFields, which the containers of one role need not know of another. Raises `BadFramework`."""
    digest = membership_digest(look.roles)
    return [
        File(FRAMEWORK_OBJECT_FILE_PATH, msgspec.json.encode(_shown(framework, redact))),
        File(MEMBERSHIP_FILE_PATH, msgspec.json.encode(_membership(framework, look.roles, digest))),
        *(
            File(f"{HOSTFILE_PREFIX}{role.name}", "".join(f"{member.ip}\n" for member in role.members).encode())
            for role in look.roles
        ),
        File(INJECTOR_FILE_PATH, _injector(look.roles, digest, is_empty=framework.get("status") is None), 0o755),
    ]


def membership_digest(roles: Sequence[Role]) -> str:
    """Return the SHA-256 of every member's (role, index, pod UID), in hex: equal for pods that saw the same gang."""
    lines = sorted((role.name, member.index, member.pod_uid) for role in roles for member in role.members)
    text = "".join(f"{role} {index} {uid}\n" for role, index, uid in lines)
    return hashlib.sha256(text.encode()).hexdigest()


def write_files(directory: Path, files: Sequence[File]) -> None:
    """Put the files in place, in this order, each atomically. Raises `OSError`; later files are then missing."""
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
    """Return the Framework as frameworkcontroller's barrier writes it: readers expect every field of the spec."""
    spec = decode_spec(framework.get("spec"))
    roles = []
    for role in spec.task_roles:
        policy = role.framework_attempt_completion_policy or CompletionPolicy()
        task = msgspec.structs.replace(role.task, pod={} if redact else role.task.pod)
        roles.append(msgspec.structs.replace(role, framework_attempt_completion_policy=policy, task=task))
    filled = msgspec.to_builtins(msgspec.structs.replace(spec, task_roles=tuple(roles)))
    metadata = framework["metadata"]
    if redact:
        metadata = {name: value for name, value in metadata.items() if name not in ("annotations", "managedFields")}
    return {"metadata": metadata, "spec": filled, "status": framework.get("status")}


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
    """Return the lines that set and print a variable. Only `port` is special to a shell within double quotes."""
    value = ",".join(items)
    length = len(name) + len(value.replace(port, _PORT) if port else value) + len("=\0")
    keyword = "export " if length <= MAX_EXPORT else ""  # too long to export: a shell variable only
    return [f'{keyword}{name}="{value}"', f'echo "{name}=${{{name}}}"']


def _bracketed(ip: str) -> str:
    return f"[{ip}]" if ":" in ip else ip
