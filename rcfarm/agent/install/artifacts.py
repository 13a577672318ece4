"""Artifacts: fetched once per digest, verified, unpacked, and kept for every pod that names them.

The model: an artifact's directory is the name of its digest, and appears by one rename when it is complete and
verified, so every directory present is whole. Downloads of different digests run concurrently; one digest is downloaded
only once. Unfinished downloads lie in `tmp/`, which goes into the trash at the start, as does a download that is
cancelled or fails. Files of unknown origin are read only by child processes with limits
(`rcfarm.agent.install.children`), of which a few run at once.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from rcfarm.agent.errors import BadArtifact, InstallFailed, describe_os_error
from rcfarm.agent.install import children
from rcfarm.agent.install.downloads import Downloads, shown
from rcfarm.agent.trash import TRASH, Trash, report_left
from store.schema.manifest import Artifact

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
        """Return the artifact's directory, which need not exist yet: it holds the unpacked archive, or the one file."""
        return self._root / sha256

    async def fetch(self, artifact: Artifact) -> Path:
        """Fetch the artifact unless it is cached. Return its directory. Raises `BadArtifact`, `InstallFailed`."""
        path = self.path(artifact.sha256)
        lock = self._fetching.setdefault(artifact.sha256, asyncio.Lock())
        async with lock:
            if not path.exists():
                try:
                    temporary = self._root / "tmp"
                    temporary.mkdir(mode=0o700, exist_ok=True)
                    work = Path(tempfile.mkdtemp(dir=temporary, prefix=artifact.sha256[:12] + "-"))
                    try:
                        await self._install_in(work, artifact, path)
                    finally:
                        self._discard(work)
                except OSError as error:
                    raise InstallFailed(
                        f"artifact {shown(artifact.url)}: {describe_os_error(error, self._root)}"
                    ) from error
                except BadArtifact as error:
                    raise BadArtifact(f"artifact {shown(artifact.url)}: {error}") from error
                except InstallFailed as error:
                    raise InstallFailed(f"artifact {shown(artifact.url)}: {error}") from error
        os.utime(path)  # last use, for `prune`
        return path

    def clean(self) -> None:
        """Remove the unfinished downloads of an agent that was killed."""
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
