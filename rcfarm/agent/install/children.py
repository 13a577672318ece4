"""Start `rcfarm.agent.install.unpack`: work that may be slow, large or stuck happens in a process that can be killed.

A child that does not end after SIGKILL, because it hangs in a file system, is abandoned: neither the agent's work nor
its stop waits for it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rcfarm.agent.errors import BadArtifact, InstallFailed
from rcfarm.agent.install.unpack import BAD, MEMORY, NOT_AN_ARCHIVE, REFUSED
from rcfarm.agent.processes.process import ExitStatus, LaunchSpec, spawn

_REPORT = 4096  # bytes that are read of a child's report
_LAST_WAIT = 2.0  # seconds that a killed child gets to end


async def unpack(archive: Path, target: Path, report: Path, *, limit: int, timeout: float) -> bool:
    """Unpack `archive` into the empty directory `target`. Return False when it is not an archive.

    `timeout` in seconds of processor time; it may last three times as long. Raises `InstallFailed`, `BadArtifact`, and
    `OSError` when the disk refuses.
    """
    status = await _run(
        "unpack", [archive, target], report, limit=limit, cpu=timeout, timeout=3 * timeout, at="agent.unpack_timeout"
    )
    if status.code not in (0, NOT_AN_ARCHIVE):
        _refuse(status, _read(report), limit, timeout)
    return status.code == 0


async def copy(source: Path, target: Path, report: Path, places: Sequence[str], *, limit: int, timeout: float) -> str:
    """Copy a regular file below one of `places`. Return its sha256. Raises as `unpack` does."""
    arguments: list[Path | str] = [source, target, *places]
    status = await _run(
        "copy", arguments, report, limit=limit, cpu=timeout, timeout=timeout, at="agent.artifact_timeout"
    )
    if status.code != 0:
        _refuse(status, _read(report), limit, timeout)
    return _read(report)


async def _run(
    verb: str, arguments: Sequence[Path | str], report: Path, *, limit: int, cpu: float, timeout: float, at: str
) -> ExitStatus:
    words = [verb, str(limit), str(max(1, round(cpu))), *map(str, arguments)]
    argv = [sys.executable, "-I", "-m", "rcfarm.agent.install.unpack", *words]
    child = spawn(LaunchSpec(argv, {"PATH": os.defpath}, report.parent, report)).open()
    try:
        async with asyncio.timeout(timeout):
            await child.wait()
        return child.reap()
    except TimeoutError:
        raise InstallFailed(f"not finished within {timeout:g} s: see {at}") from None
    finally:
        child.signal_group(signal.SIGKILL)
        try:
            async with asyncio.timeout(_LAST_WAIT):
                await child.wait()
        except TimeoutError:
            child.release()
        else:
            child.reap()


def _refuse(status: ExitStatus, report: str, limit: int, timeout: float) -> None:
    if status.code == BAD:
        raise BadArtifact(report or "it can't be unpacked; there is no room on the disk to say why")
    if status.code is not None and status.code >= REFUSED and (number := status.code - REFUSED) in errno.errorcode:
        if number == errno.EFBIG:
            raise BadArtifact(f"it unpacks to more than {limit} bytes: see agent.artifact_limit")
        raise OSError(number, os.strerror(number), report or None)
    if status.signal == "SIGXCPU":
        raise BadArtifact(f"unpacking it takes more than {timeout:g} s of processor time: see agent.unpack_timeout")
    if status.signal == "SIGKILL":
        raise InstallFailed("unpacking it was killed: this machine is short of memory")
    if report.endswith("MemoryError"):  # raised outside of what `unpack` guards
        raise BadArtifact(f"unpacking it needs more than {MEMORY} bytes of memory")
    how = status.signal or f"code {status.code}"
    raise InstallFailed(f"unpacking it failed with {how}: {report.splitlines()[-1] if report else 'no report'}")


def _read(report: Path) -> str:
    with open(report, "rb") as file:
        text = file.read(_REPORT).decode(errors="replace").strip()
    return "".join(character if character.isprintable() or character == "\n" else "?" for character in text)
