"""The child process that handles untrusted files: `python -m rcfarm.agent.unpack VERB …`.

An archive may make its parser slow, large or stuck; a path may lead to a pipe or to a file system that hangs. So the
agent starts this program for each of them, with limits of memory, processor time and file size and a time limit
(`rcfarm.agent.install`), and kills it when one is exceeded. The standard output is a short report.

`unpack ARCHIVE DIRECTORY` unpacks into an empty directory. As root it forks: the child changes its root to that
directory, where it may, and becomes `nobody` before it reads the first byte; the parent then changes the owner of the
unpacked files to root, because pods that run as `nobody` must not own files that other pods execute. `copy FILE TARGET
PLACE…` copies a regular file that is below one of the places, links resolved, and reports its sha256.

Exit codes: 0 done; 3 not an archive; 4 the artifact is bad, the report says why; 64 + errno: a system error, the report
is the path if it is valid outside of the child. On a full disk there is no report.

An archive is refused as a whole, naming the member, for absolute names, `..`, devices and pipes, duplicate names,
members below a link, and links that lead outside. A symbolic link may go up only at the start of its target and never
above the root. Since no member lies below a link, a link's own place is real; each step down then meets either
something real or another link for which the same holds; so by induction no chain of links leaves the root. The standard
library's own filter (`tarfile.data_filter`) checks everything a second time.

Permissions are reduced to rwxr-xr-x at most and owners are ignored. Bounded are the total size, the number of members,
the length and depth of names, and the extended headers, which `tarfile` reads whole before a member can be checked.
"""

from __future__ import annotations

import bz2  # noqa: F401  tarfile imports these when it meets such an archive: too late, under another root
import contextlib
import gzip  # noqa: F401
import hashlib
import lzma
import os
import pwd
import resource
import stat
import sys
import tarfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Self

from rcfarm.agent.errors import BadArtifact

NOT_AN_ARCHIVE, BAD, REFUSED = 3, 4, 64
MEMORY = 512 * 1024 * 1024  # bytes of address space
_CHUNK = 256 * 1024
_NOBODY = 65534


def main(arguments: Sequence[str]) -> int:
    """Do `VERB LIMIT SECONDS ARGUMENT…`. Return the exit code.

    LIMIT: bytes written. SECONDS: of processor time.
    """
    verb, limit, seconds, source, target, *places = arguments
    os.umask(0o022)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 5))  # first SIGXCPU, which names the limit
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(5)  # pods have priority for processors and memory
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if verb == "copy":
        return _reported(lambda: copy(Path(source), Path(target), int(limit), places))
    with open(source, "rb") as file:
        if os.geteuid() == 0:
            return _unpack_as_nobody(file, target, int(limit))
        os.chdir(target)
        return _reported(lambda: _unpack(file, int(limit)))


def copy(source: Path, target: Path, limit: int, places: Sequence[str]) -> int:
    """Copy a regular file and print its sha256. A pipe or a device is refused without waiting for it."""
    digest = hashlib.sha256()
    with open(os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise BadArtifact("it is not a regular file")
        really = Path(os.readlink(f"/proc/self/fd/{file.fileno()}"))
        if not any(really.is_relative_to(Path(place).resolve()) for place in places):
            raise BadArtifact("it is a link to a place that agent.artifact_sources does not allow")
        with open(target, "wb") as copied:
            while chunk := file.read(_CHUNK):
                limit -= len(chunk)
                if limit < 0:
                    raise BadArtifact("it is larger than agent.artifact_limit allows")
                digest.update(chunk)
                copied.write(chunk)
    _report(digest.hexdigest())
    return 0


def _reported(work: Callable[[], int]) -> int:
    """Run `work`. Return its exit code; an error becomes a report and an exit code."""
    try:
        return work()
    except BadArtifact as error:
        _report(str(error))
        return BAD
    except MemoryError:
        _report(f"unpacking it needs more than {MEMORY} bytes of memory")
        return BAD
    except OSError as error:
        if isinstance(error.filename, str) and error.filename.startswith("/"):
            _report(error.filename)
        return REFUSED + (error.errno or 0)
    except Exception as error:  # the parser failed on this input; a retry would not help
        _report(f"the archive can't be unpacked: {type(error).__name__}")
        return BAD


def _report(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), text.encode(errors="replace"))


def _unpack(file: BinaryIO, limit: int) -> int:
    return 0 if unpack(file, Path("."), limit=limit) else NOT_AN_ARCHIVE


def _unpack_as_nobody(file: BinaryIO, target: str, limit: int) -> int:
    """Unpack in a child without root's rights, as far as a container allows it; then give the files to root."""
    uid = gid = _NOBODY
    with contextlib.suppress(KeyError):  # a container without the account
        account = pwd.getpwnam("nobody")
        uid, gid = account.pw_uid, account.pw_gid
    directory = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(PermissionError):  # a root without capabilities unpacks as itself
        os.fchown(directory, uid, gid)
    child = os.fork()
    if child == 0:
        os.fchdir(directory)
        if os.fstat(directory).st_uid == uid:
            with contextlib.suppress(PermissionError):
                os.chroot(".")
                os.chdir("/")
            with contextlib.suppress(PermissionError):
                os.setgroups([])
                os.setgid(gid)
                os.setuid(uid)
        code = _reported(lambda: _unpack(file, limit))
        os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        os.kill(os.getpid(), os.WTERMSIG(status))  # so that the agent sees which limit was exceeded
    code = os.WEXITSTATUS(status)
    return code or _reported(lambda: _take_over(directory))


def _take_over(directory: int) -> int:
    """Change the owner of the directory and everything below it to root."""
    for _, directories, files, fd in os.fwalk(".", dir_fd=directory, follow_symlinks=False):
        for name in (*directories, *files):
            os.chown(name, 0, 0, dir_fd=fd, follow_symlinks=False)
    os.fchown(directory, 0, 0)
    return 0


MAX_MEMBERS = 200_000
MAX_DEPTH = 64  # components of a name
MAX_NAME = 1024  # bytes of a name or a link's target
MAX_HEADER = 64 * 1024  # bytes of one extended header, which holds long names and the like

_KINDS = dict.fromkeys(tarfile.REGULAR_TYPES, "file") | {
    tarfile.DIRTYPE: "directory",
    tarfile.SYMTYPE: "symlink",
    tarfile.LNKTYPE: "hardlink",
}
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
        try:
            tar = tarfile.open(fileobj=file, tarinfo=_BoundedHeader)  # noqa: SIM115
        except tarfile.TarError:
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
        kind = _KINDS.get(member.type)
        if kind is None:
            raise BadArtifact(
                f"member {member.name!r} is a device, a pipe or of an unknown kind: pack only files and links"
            )
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


def _check_length(name: str, what: str) -> None:
    if len(name) > MAX_NAME or len(name.encode(errors="surrogateescape")) > MAX_NAME or name.count("/") >= MAX_DEPTH:
        raise BadArtifact(f"{what} {name[:60]!r}…: names may have {MAX_NAME} bytes and {MAX_DEPTH} levels at most")


def _relative(name: str, member: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise BadArtifact(f"member {member!r} names a place outside of the archive: pack it with relative names")
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
