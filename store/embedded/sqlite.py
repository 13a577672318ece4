"""The file of an embedded store: one SQLite database in WAL mode, the lock that keeps it to one process, and the mark.

One SQLite transaction per commit, made before the commit is applied in memory and acknowledged. Durability:

- the process dies (`kill -9`, a crash, out of memory): every acknowledged write is kept, and no write is partial;
- the machine loses power or its kernel dies: the file is sound and holds whole commits in order, but the last ones,
  since the last checkpoint (at most some 4 MB of writes), may be missing. That is `synchronous=NORMAL`: an fsync per
  commit would stall the event loop for milliseconds each time;
- the disk is full or fails: the write is refused with `Unavailable`; file and memory stay as they were;
- the file or its log was removed, emptied, damaged or replaced by an older one: the store refuses to open and says so,
  instead of serving an empty fleet.

The last is what the mark is for. SQLite silently drops the parts of its log whose checksums do not match, and takes an
empty file for a new database. So after each commit its index is written to a small file beside the database,
overwritten in place and never synced: it costs a microsecond, and it survives the death of the process. At the next
start the database must have reached its mark's index. If it has not, acknowledged commits are gone, and an operator
must decide, not the program. The mark names the boot, so that the loss of the last commits in a power failure is only a
warning, as long as the database is not empty.

Every opening starts `INDEX_STEP` above the last index in the file, so that an index that was returned to a caller and
then lost in a power failure is never used for other data: a CAS that relies on it fails, a watch above it wakes.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import msgspec
import structlog

from store.embedded.state import Commit, SessionRecord, StoreState
from store.kv.protocol import Entry, Invalid, StoreError, Unavailable

log = structlog.get_logger(__name__)

INDEX_STEP = 1 << 20
_VERSION = 1
_BUSY_TIMEOUT = 1.0  # seconds; only another program that writes to the file can cause a wait
_ROOM = 1 << 20  # bytes; with less free space on the disk, opening may fail
_SCHEMA = """
CREATE TABLE entries (
  key TEXT PRIMARY KEY, value BLOB NOT NULL, create_index INTEGER NOT NULL, modify_index INTEGER NOT NULL,
  lock_index INTEGER NOT NULL, flags INTEGER NOT NULL, session TEXT
) WITHOUT ROWID;
CREATE TABLE sessions (id TEXT PRIMARY KEY, record TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE last (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO last VALUES ('index', 1);
"""
_UPSERT = "INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?, ?)"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_FORM = b"rcfarm store, boot %36s, index %020d\n"


class AlreadyOpen(StoreError):
    """Another process has the file open; `pid` is its process id, or None when it is unknown."""

    def __init__(self, path: Path, pid: int | None) -> None:
        self.pid = pid
        holder = "another process" if pid is None else f"process {pid}"
        super().__init__(f"{path} is in use by {holder}: stop it first, or use the store through its API")


class SqliteFile:
    """An open store file. Raises `AlreadyOpen`, `Invalid` (not such a file) or `Unavailable` (can't be opened)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = _lock(path)
        self._mark = StoreMark(path)
        try:
            self._connection = self._open()
        except BaseException:
            self._mark.close()
            os.close(self._lock)
            raise

    def load(self) -> StoreState:
        """Return the whole content of the file. Raises `Invalid`, with the file closed again, when it is damaged."""
        try:
            entries = [
                Entry(key, value, created, modified, lock_index, flags % (1 << 64), session)
                for key, value, created, modified, lock_index, flags, session in self._connection.execute(
                    "SELECT * FROM entries"
                )
            ]
            records = self._connection.execute("SELECT record FROM sessions")
            sessions = [msgspec.json.decode(record, type=SessionRecord) for (record,) in records]
            return StoreState(index=_index(self._connection), entries=entries, sessions=sessions)
        except (sqlite3.Error, msgspec.MsgspecError, TypeError) as error:
            self.close()
            raise Invalid(
                f"{self.path} is damaged: {error}; restore it, or move it away to start with an empty store"
            ) from error

    def write(self, commit: Commit) -> None:
        """Make the commit durable. Raises `Unavailable`, or `Invalid` for data that SQLite can't store; the file is
        then unchanged, and no transaction is left open.
        """
        execute, executemany = self._connection.execute, self._connection.executemany
        # Consul's flags are unsigned and SQLite's integers are signed, both of 64 bits.
        written = [
            (
                entry.key,
                entry.value,
                entry.create_index,
                entry.modify_index,
                entry.lock_index,
                entry.flags - (1 << 64 if entry.flags >= 1 << 63 else 0),
                entry.session,
            )
            for entry in commit.writes.values()
            if entry is not None
        ]
        deleted = [(key,) for key, entry in commit.writes.items() if entry is None]
        try:
            execute("BEGIN IMMEDIATE")
            if written:
                executemany(_UPSERT, written)
            if deleted:
                executemany("DELETE FROM entries WHERE key = ?", deleted)
            if commit.opened is not None:
                record = msgspec.json.encode(commit.opened).decode()
                execute("INSERT OR REPLACE INTO sessions VALUES (?, ?)", (commit.opened.id, record))
            if commit.closed is not None:
                execute("DELETE FROM sessions WHERE id = ?", (commit.closed,))
            execute("UPDATE last SET value = ? WHERE name = 'index'", (commit.index,))
            execute("COMMIT")
        except BaseException as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise Unavailable(f"{self.path}: {error}; nothing was changed") from error
            if isinstance(error, OverflowError | ValueError):
                raise Invalid(f"the write can't be stored: {error}; nothing was changed") from error
            raise
        with suppress(OSError):  # the commit is durable; the mark lags behind until the next one
            self._mark.note(commit.index)

    def close(self) -> None:
        """Fold the log into the file and release the lock."""
        self._connection.close()
        self._mark.close()
        os.close(self._lock)

    def _open(self) -> sqlite3.Connection:
        with ExitStack() as stack:
            try:
                self._check()
                connection = sqlite3.connect(self.path, isolation_level=None, timeout=_BUSY_TIMEOUT)
                stack.callback(connection.close)
                (version,) = connection.execute("PRAGMA user_version").fetchone()
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = NORMAL")
                if version == 0:
                    connection.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;")
                    # The schema must be in the file, not only in the log.
                    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                step = INDEX_STEP if version else 0
                connection.execute("UPDATE last SET value = value + ? WHERE name = 'index'", (step,))
                self._mark.note(_index(connection))
            except (sqlite3.OperationalError, OSError) as error:
                # SQLite reports a full disk as "disk I/O error" when it maps the log's index
                disk = os.statvfs(self.path.parent)
                free = disk.f_bavail * disk.f_frsize
                note = f"; only {free // 1024} KiB are free on its disk: free some" if free < _ROOM else ""
                raise Unavailable(f"{self.path} can't be opened: {error}{note}") from error
            except sqlite3.DatabaseError as error:
                raise Invalid(f"{self.path} is not a store of rcfarm: {error}") from error
            stack.pop_all()
            return connection

    def _check(self) -> None:
        """Refuse a file that is not a store, or has lost commits. Read only: closing the last connection that may write
        would fold the rest of a damaged log into the file."""
        if self.path.stat().st_size == 0:  # SQLite would remove the log of an empty file
            self._mark.check(0)
            return
        connection = sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True, timeout=_BUSY_TIMEOUT)
        with closing(connection):
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version not in (0, _VERSION):
                raise Invalid(f"{self.path} has version {version}; this rcfarm reads version {_VERSION}")
            self._mark.check(_index(connection) if version else 0)


class StoreMark:
    """The mark of the database at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path.with_name(path.name + ".mark")
        self._database = path
        try:
            self._boot = _BOOT_ID.read_bytes().strip()
        except OSError:
            self._boot = b"unknown"
        self._descriptor = -1

    def check(self, index: int) -> None:
        """Compare the database, which has reached `index` (0 or 1: it is empty), with the mark.

        Raises `Invalid` when acknowledged commits are gone, `Unavailable` for a mark that can't be read.
        """
        boot, marked = self._read()
        if marked <= index:
            return
        if index > 1 and boot != self._boot:
            log.warning(
                "The machine stopped before the store's last writes reached the disk; they are lost",
                file=str(self._database),
                index=index,
                was=marked,
            )
            return
        lost = "is empty" if index <= 1 else f"ends at index {index}"
        raise Invalid(
            f"{self._database} {lost}, but this store had reached index {marked}: the file or its log "
            f"({self._database.name}-wal) was removed, replaced or damaged. Restore both from one backup; or, to "
            f"continue with the remaining data and lose the rest, remove {self.path} and start again"
        )

    def note(self, index: int) -> None:
        """Record that the database has reached `index`. Raises `OSError`."""
        if self._descriptor < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._descriptor = os.open(self.path, flags, 0o600)
        os.pwrite(self._descriptor, _FORM % (self._boot, index), 0)

    def close(self) -> None:
        """Close the file."""
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
            raise Invalid(f"{self.path} is not a store's mark; remove it to continue with the data in {self._database}")
        return words[3], int(words[5])


def _index(connection: sqlite3.Connection) -> int:
    (index,) = connection.execute("SELECT value FROM last WHERE name = 'index'").fetchone()
    return int(index)


def _lock(path: Path) -> int:
    lock_path = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for each in (path, lock_path):
            os.close(os.open(each, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        lock = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise Unavailable(f"{path} can't be opened: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
        os.close(lock)
        raise AlreadyOpen(path, int(holder) if holder.isdigit() else None) from None
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        os.close(lock)
        raise Unavailable(f"{lock_path} can't be written: {error.strerror}") from error
    return lock
