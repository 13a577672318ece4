"""Artifacts: fetched once per digest, verified, unpacked, and kept for every pod that names them.

The model: an artifact's directory is the name of its digest, and appears by one rename when all of it is good; whatever
is there is whole. Downloads of different digests run at once, those of one digest only once. What is begun lies in
`tmp/`, which goes into the trash at the start; a download that is cancelled or fails takes its own there. Whatever
looks into a file of unknown origin is a child with limits (`rcfarm.agent.children`), of which a few run at once.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from rcfarm.agent import children
from rcfarm.agent.downloads import Downloads, shown
from rcfarm.agent.errors import BadArtifact, InstallFailed, describe_os_error
from rcfarm.agent.trash import TRASH, Trash, report_left
from store.manifest import Artifact

_UNPACKING = 8  # children that unpack at once


class Artifacts:
    """The cache of one agent. `limit`: bytes that an artifact may unpack to; `timeout`: seconds that this may take."""

    def __init__(self, root: Path, downloads: Downloads, trash: Trash, *, limit: int, timeout: float) -> None:
        self._root = root
        self._downloads = downloads
        self._trash = trash
        self._limit = limit
        self._timeout = timeout
        self._fetching: dict[str, asyncio.Lock] = {}
        self._unpacking = asyncio.Semaphore(_UNPACKING)

    def path(self, sha256: str) -> Path:
        """Where the artifact is, or will be: a directory with the unpacked archive, or with the one file."""
        return self._root / sha256

    async def fetch(self, artifact: Artifact) -> Path:
        """Make sure that the artifact is here, and return its directory. Raises `BadArtifact`, `InstallFailed`."""
        path = self.path(artifact.sha256)
        lock = self._fetching.setdefault(artifact.sha256, asyncio.Lock())
        async with lock:
            if not path.exists():
                await self._install(artifact, path)
        os.utime(path)  # last use, for `prune`
        return path

    def clean(self) -> None:
        """Remove what an agent that was killed had begun."""
        self._discard(self._root / "tmp")

    def prune(self, used: Collection[str], *, keep: float) -> None:
        """Remove artifacts that are not in `used` and were not used for `keep` seconds. Raises `OSError`."""
        for entry in list(self._root.iterdir()):
            busy = (lock := self._fetching.get(entry.name)) and lock.locked()
            if entry.name in used or entry.name in ("tmp", TRASH) or busy or time.time() - entry.stat().st_mtime < keep:
                continue
            self._fetching.pop(entry.name, None)
            self._trash.put(entry)

    def _discard(self, path: Path) -> None:
        try:
            self._trash.put(path)
        except OSError as error:
            report_left(path, error)

    async def _install(self, artifact: Artifact, path: Path) -> None:
        try:
            work = Path(tempfile.mkdtemp(dir=self._temporary(), prefix=artifact.sha256[:12] + "-"))
            try:
                await self._install_in(work, artifact, path)
            finally:
                self._discard(work)
        except OSError as error:
            raise InstallFailed(f"artifact {shown(artifact.url)}: {describe_os_error(error, self._root)}") from error
        except BadArtifact as error:
            raise BadArtifact(f"artifact {shown(artifact.url)}: {error}") from error
        except InstallFailed as error:
            raise InstallFailed(f"artifact {shown(artifact.url)}: {error}") from error

    async def _install_in(self, work: Path, artifact: Artifact, path: Path) -> None:
        download, content, report = work / "download", work / "content", work / "report"
        if await self._downloads.fetch(artifact.url, download) != artifact.sha256:
            raise BadArtifact("its sha256 is not the one that the manifest names: it is another version, or damaged")
        report.unlink(missing_ok=True)
        content.mkdir(mode=0o700)
        async with self._unpacking:
            is_archive = await children.unpack(download, content, report, limit=self._limit, timeout=self._timeout)
        if not is_archive:
            name = PurePosixPath(unquote(urlsplit(artifact.url).path)).name
            program = content / (name if name not in ("", "..") else "artifact")
            os.rename(download, program)
            os.chmod(program, 0o755)
        os.chmod(content, 0o755)
        os.rename(content, path)

    def _temporary(self) -> Path:
        directory = self._root / "tmp"
        directory.mkdir(mode=0o700, exist_ok=True)
        return directory
