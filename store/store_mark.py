"""The mark beside an embedded store's file: how far the store had come when it was last written.

SQLite drops, without a word, whatever part of its log does not check out, and takes an empty file for a new database.
So after each commit its index is noted in a small file beside the database, overwritten in place and never synced: it
costs a microsecond, and it survives whatever a killed process survives. At the next start the database must have come
as far as its mark says. If it has not, commits that were acknowledged are gone: the log was removed or damaged, or the
file was replaced by an older one. An operator decides then, not the program.

A machine that lost its power may have lost the last commits, as `store.sqlite` says. The mark names the boot, so that
such a loss is a warning and no refusal, as long as the database is not empty.
"""

from __future__ import annotations

import os
from pathlib import Path

import structlog

from store.kv import Invalid, Unavailable

log = structlog.get_logger(__name__)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_FORM = b"rcfarm store, boot %36s, index %020d\n"


class StoreMark:
    """The mark of the database at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path.with_name(path.name + ".mark")
        self._database = path
        self._boot = _boot_id()
        self._descriptor = -1

    def check(self, index: int) -> None:
        """Compare the database, which has come to `index` (0 or 1: it holds nothing), with the mark.

        Raises `Invalid` when acknowledged commits are gone, `Unavailable` for a mark that can't be read.
        """
        boot, marked = self._read()
        if marked <= index:
            return
        if index > 1 and boot != self._boot:
            log.warning(
                "The machine stopped before the store's last writes were on the disk; those are lost",
                file=str(self._database),
                index=index,
                was=marked,
            )
            return
        lost = "is empty" if index <= 1 else f"ends at index {index}"
        raise Invalid(
            f"{self._database} {lost}, but this store had come to index {marked}: the file or its log "
            f"({self._database.name}-wal) was removed, replaced or damaged. Restore both from one backup; or, to go on "
            f"with what is there and lose the rest, remove {self.path} and start again"
        )

    def note(self, index: int) -> None:
        """Note that the database has come to `index`. Raises `OSError`."""
        if self._descriptor < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._descriptor = os.open(self.path, flags, 0o600)
        os.pwrite(self._descriptor, _FORM % (self._boot, index), 0)

    def close(self) -> None:
        """Give up the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _read(self) -> tuple[bytes, int]:
        try:
            line = self.path.read_bytes()
        except FileNotFoundError:
            return b"", 0  # a new store, or one of an rcfarm that wrote no marks
        except OSError as error:
            raise Unavailable(f"{self.path} can't be read: {error.strerror}") from error
        words = line.replace(b",", b"").split()
        if len(words) != 6 or not words[5].isdigit():
            raise Invalid(f"{self.path} is no mark of a store; remove it to go on with what {self._database} holds")
        return words[3], int(words[5])


def _boot_id() -> bytes:
    try:
        return _BOOT_ID.read_bytes().strip()
    except OSError:
        return b"unknown"
