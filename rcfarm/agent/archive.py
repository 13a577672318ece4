"""Unpacking tar archives that nobody vouches for.

Refused whole, naming the member: absolute names, `..`, devices and pipes, names twice, members below a link, and links
that would lead out. A symbolic link may go up only at the start of its target and never above the root. Since no
member lies below a link, a link's own place is real; each step down then meets either something real or another link
for which the same holds; so by induction no chain of links leaves the root. The standard library's own filter
(`tarfile.data_filter`) checks everything a second time.

Permissions are reduced to rwxr-xr-x at most, owners are ignored, and the total size and the number of members are
bounded, so that a small archive can't fill the disk.
"""

from __future__ import annotations

import gzip
import lzma
import os
import tarfile
import threading
import zlib
from pathlib import Path, PurePosixPath

from rcfarm.agent.errors import BadArtifact

MAX_MEMBERS = 200_000


def is_archive(path: Path) -> bool:
    """Whether the file is a tar archive, plain or compressed with gzip, bzip2 or xz."""
    return tarfile.is_tarfile(path)


def unpack(archive: Path, target: Path, *, limit: int, abandoned: threading.Event | None = None) -> None:
    """Unpack into the existing, empty directory `target`; `limit` in bytes of content.

    Once `abandoned` is set it stops at the next member: nobody wants the result. Raises `BadArtifact` for anything
    unsafe or damaged, and `OSError` when the disk refuses; `target` then holds what was unpacked until there.
    """
    try:
        with tarfile.open(archive) as tar:
            _unpack_members(tar, target, Members(limit), abandoned or threading.Event())
    except (tarfile.TarError, EOFError, ValueError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise BadArtifact(f"the archive can't be unpacked: {error}") from error
    except OSError as error:
        if error.errno is None:  # how bz2 says that its data are damaged
            raise BadArtifact(f"the archive can't be unpacked: {error}") from error
        raise


def _unpack_members(tar: tarfile.TarFile, target: Path, members: Members, abandoned: threading.Event) -> None:
    for member in tar:
        if abandoned.is_set():
            return
        checked = members.check(member)
        if checked is not None:
            tar.extract(checked, target, filter="data")
    for directory, _, _ in os.walk(target):
        os.chmod(directory, 0o755)  # whatever the agent's umask: pods may run as any user


class Members:
    """The members of one archive, checked in order. `limit` in bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0
        self._kinds: dict[PurePosixPath, str] = {}

    def check(self, member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        """The member as it may be unpacked, or None for the root itself. Raises `BadArtifact`."""
        path = _relative(member.name, member.name)
        if path == PurePosixPath("."):
            return None
        kind = self._kind(member)
        if kind == "symlink":
            _check_target(path, member)
        elif kind == "hardlink":
            self._check_hardlink(member)
        self._claim(path, kind, member.name)
        self._size += member.size
        if self._size > self._limit or len(self._kinds) > MAX_MEMBERS:
            raise BadArtifact(
                f"it unpacks to more than {self._limit} bytes or {MAX_MEMBERS} files: see agent.artifact_limit"
            )
        mode = (member.mode & 0o755) | (0o755 if kind == "directory" else 0o644)
        return member.replace(name=str(path), mode=mode, deep=False)

    def _kind(self, member: tarfile.TarInfo) -> str:
        if member.isreg():
            return "file"
        if member.isdir():
            return "directory"
        if member.issym():
            return "symlink"
        if member.islnk():
            return "hardlink"
        raise BadArtifact(
            f"member {member.name!r} is a device, a pipe or of an unknown kind: pack only files and links"
        )

    def _claim(self, path: PurePosixPath, kind: str, name: str) -> None:
        for parent in path.parents[:-1]:
            if self._kinds.setdefault(parent, "directory") != "directory":
                raise BadArtifact(f"member {name!r} lies below {str(parent)!r}, which is not a directory")
        known = self._kinds.get(path)
        if known is not None and (known, kind) != ("directory", "directory"):
            raise BadArtifact(f"member {name!r} is there twice")
        self._kinds[path] = kind

    def _check_hardlink(self, member: tarfile.TarInfo) -> None:
        linked = _relative(member.linkname, member.name)
        if self._kinds.get(linked) not in ("file", "hardlink"):
            raise BadArtifact(f"member {member.name!r} is a hard link to {member.linkname!r}, which is no earlier file")


def _relative(name: str, member: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise BadArtifact(f"member {member!r} names a place outside of the archive: pack it with relative names")
    return path


def _check_target(path: PurePosixPath, member: tarfile.TarInfo) -> None:
    target = PurePosixPath(member.linkname)
    parts = list(target.parts)
    ups = 0
    while parts and parts[0] == "..":
        parts.pop(0)
        ups += 1
    if target.is_absolute() or ".." in parts or ups > len(path.parts) - 1:
        raise BadArtifact(f"member {member.name!r} links to {member.linkname!r}, which could lead out of the archive")
