"""Unpack tar archives of unknown origin; runs in the limited child of `rcfarm.agent.install.unpack`.

An archive is refused as a whole, naming the member, for absolute names, `..`, devices and pipes, duplicate names,
members below a link, and links that lead outside. A symbolic link may go up only at the start of its target and never
above the root. Since no member lies below a link, a link's own place is real; each step down then meets either
something real or another link for which the same holds; so by induction no chain of links leaves the root. The standard
library's own filter (`tarfile.data_filter`) checks everything a second time.

Permissions are reduced to rwxr-xr-x at most and owners are ignored. Bounded are the total size, the number of members,
the length and depth of names, and the extended headers, which `tarfile` reads whole before a member can be checked.
"""

from __future__ import annotations

import lzma
import tarfile
import zlib
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Self

from rcfarm.agent.errors import BadArtifact

MAX_MEMBERS = 200_000
MAX_DEPTH = 64  # components of a name
MAX_NAME = 1024  # bytes of a name or a link's target
MAX_HEADER = 64 * 1024  # bytes of one extended header, which holds long names and the like

_EXTENDED = {
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
}


def unpack(file: BinaryIO, target: Path, *, limit: int) -> bool:
    """Unpack a tar archive, plain or compressed with gzip, bzip2 or xz, into the existing, empty directory `target`.

    `limit` in bytes of content. Return False when the file is not an archive. Raises `BadArtifact` for anything unsafe
    or damaged, and `OSError` when the disk refuses; `target` then holds the members unpacked so far.
    """
    try:
        tar = _opened(file)
        if tar is None:
            return False
        with tar:
            members = Members(limit)
            while (member := tar.next()) is not None:
                checked = members.check(member)
                if checked is not None:
                    tar.extract(checked, target, filter="data")
                # Kept only for looking members up by name, and hundreds of megabytes for an archive of small files.
                tar.members.clear()  # type: ignore[attr-defined]
    except (tarfile.TarError, EOFError, ValueError, OverflowError, zlib.error, lzma.LZMAError) as error:
        raise BadArtifact(f"the archive can't be unpacked: {error}") from error
    except OSError as error:
        if error.errno is None:  # gzip and bz2 report damaged data like this
            raise BadArtifact(f"the archive can't be unpacked: {error}") from error
        raise
    return True


def _opened(file: BinaryIO) -> tarfile.TarFile | None:
    try:
        return tarfile.open(fileobj=file, tarinfo=_BoundedHeader)
    except tarfile.TarError:
        return None


class _BoundedHeader(tarfile.TarInfo):
    """A header block. One that announces more extended data than any packer writes is refused before they are read."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        info = super().frombuf(buf, encoding, errors)
        if info.type in _EXTENDED and not 0 <= info.size <= MAX_HEADER:
            raise BadArtifact(f"an extended header of {info.size} bytes; at most {MAX_HEADER} are read")
        return info


class Members:
    """The members of one archive, checked in order. `limit` in bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0
        self._kinds: dict[PurePosixPath, str] = {}

    def check(self, member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        """Return the member as it may be unpacked, or None for the root itself. Raises `BadArtifact`."""
        _check_length(member.name, "member")
        _check_length(member.linkname, "the link of member")
        path = _relative(member.name, member.name)
        if path == PurePosixPath("."):
            return None
        kind = self._kind(member)
        if kind == "symlink":
            target = PurePosixPath(member.linkname)
            parts = list(target.parts)
            ups = 0
            while parts and parts[0] == "..":
                parts.pop(0)
                ups += 1
            if target.is_absolute() or ".." in parts or ups > len(path.parts) - 1:
                raise BadArtifact(
                    f"member {member.name!r} links to {member.linkname!r}, which could lead out of the archive"
                )
        elif kind == "hardlink":
            linked = self._kinds.get(_relative(member.linkname, member.name))
            if linked not in ("file", "hardlink"):
                raise BadArtifact(
                    f"member {member.name!r} is a hard link to {member.linkname!r}, which is no earlier file"
                )
        for parent in path.parents[:-1]:
            if self._kinds.setdefault(parent, "directory") != "directory":
                raise BadArtifact(f"member {member.name!r} lies below {str(parent)!r}, which is not a directory")
        known = self._kinds.get(path)
        if known is not None and (known, kind) != ("directory", "directory"):
            raise BadArtifact(f"member {member.name!r} occurs twice")
        self._kinds[path] = kind
        if member.size < 0:
            raise BadArtifact(f"member {member.name!r} has a negative size")
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


def _check_length(name: str, what: str) -> None:
    if len(name) > MAX_NAME or len(name.encode(errors="surrogateescape")) > MAX_NAME or name.count("/") >= MAX_DEPTH:
        raise BadArtifact(f"{what} {name[:60]!r}…: names may have {MAX_NAME} bytes and {MAX_DEPTH} levels at most")


def _relative(name: str, member: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise BadArtifact(f"member {member!r} names a place outside of the archive: pack it with relative names")
    return path
