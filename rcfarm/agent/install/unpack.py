"""The child process that handles untrusted files: `python -m rcfarm.agent.install.unpack VERB …`.

An archive may make its parser slow, large or stuck; a path may lead to a pipe or to a file system that hangs.
So the agent starts this program for each of them, with limits of memory, processor time and file size and a time limit
(`rcfarm.agent.install.children`), and kills it when one is exceeded. The standard output is a short report.

`unpack ARCHIVE DIRECTORY` unpacks into an empty directory. As root it forks: the child changes its root to that
directory, where it may, and becomes `nobody` before it reads the first byte; the parent then changes the owner of the
unpacked files to root, because pods that run as `nobody` must not own files that other pods execute. `copy FILE TARGET
PLACE…` copies a regular file that is below one of the places, links resolved, and reports its sha256.

Exit codes: 0 done; 3 not an archive; 4 the artifact is bad, the report says why; 64 + errno: a system error, the report
is the path if it is valid outside of the child. On a full disk there is no report.
"""

from __future__ import annotations

import bz2  # noqa: F401  tarfile imports these when it meets such an archive: too late, under another root
import contextlib
import gzip  # noqa: F401
import hashlib
import os
import pwd
import resource
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from rcfarm.agent.errors import BadArtifact
from rcfarm.agent.install import archive

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
    _bound(int(limit), int(seconds))
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
    return 0 if archive.unpack(file, Path("."), limit=limit) else NOT_AN_ARCHIVE


def _unpack_as_nobody(file: BinaryIO, target: str, limit: int) -> int:
    nobody = _NOBODY, _NOBODY
    with contextlib.suppress(KeyError):  # a container without the account
        account = pwd.getpwnam("nobody")
        nobody = account.pw_uid, account.pw_gid
    directory = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(PermissionError):  # a root without capabilities unpacks as itself
        os.fchown(directory, *nobody)
    child = os.fork()
    if child == 0:
        os.fchdir(directory)
        if os.fstat(directory).st_uid == nobody[0]:
            _become(nobody)
        code = _reported(lambda: _unpack(file, limit))
        os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        os.kill(os.getpid(), os.WTERMSIG(status))  # so that the agent sees which limit was exceeded
    code = os.WEXITSTATUS(status)
    return code or _reported(lambda: _take_over(directory))


def _become(nobody: tuple[int, int]) -> None:
    """Drop root's rights and change the root to the present directory, as far as a container allows it."""
    with contextlib.suppress(PermissionError):
        os.chroot(".")
        os.chdir("/")
    with contextlib.suppress(PermissionError):
        os.setgroups([])
        os.setgid(nobody[1])
        os.setuid(nobody[0])


def _take_over(directory: int) -> int:
    """Change the owner of the directory and everything below it to root."""
    for _, directories, files, fd in os.fwalk(".", dir_fd=directory, follow_symlinks=False):
        for name in (*directories, *files):
            os.chown(name, 0, 0, dir_fd=fd, follow_symlinks=False)
    os.fchown(directory, 0, 0)
    return 0


def _bound(limit: int, seconds: int) -> None:
    """Set the limits, and give pods priority for memory and processors."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))  # first SIGXCPU, which names the limit
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(5)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
