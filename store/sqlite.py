"""The file of an embedded store: one SQLite database in WAL mode, and the lock that keeps it to one process.

One SQLite transaction per commit, made before the commit is applied in memory and acknowledged. What survives what:

- the process dies (`kill -9`, a crash, out of memory): every acknowledged write is there, and nothing by halves;
- the machine loses power or its kernel dies: the file is sound and holds whole commits in order, but the last ones,
  since the last checkpoint (at most some 4 MB of writes), may be missing. That is `synchronous=NORMAL`: an fsync per
  commit would stall the event loop for milliseconds each time;
- the disk is full or fails: the write is refused with `Unavailable`; file and memory stay as they were;

- the file or its log was removed, emptied, damaged or replaced by an older one: the store refuses to open and says so
  (`store.store_mark`), instead of serving an empty fleet.

Every opening starts `INDEX_STEP` above the last index that the file knows, so that an index that was handed out and
then lost with the power is never given to something else: a CAS that relies on it fails, a watch above it wakes.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import msgspec

from store.embedded_state import Commit, SessionRecord, State
from store.kv import Entry, Invalid, StoreError, Unavailable
from store.store_mark import StoreMark

INDEX_STEP = 1 << 20
_VERSION = 1
_BUSY_TIMEOUT = 1.0  # seconds; only a foreign program that writes to the file can make us wait
_ROOM = 1 << 20  # bytes; with less on the disk, opening may fail for want of it
_SCHEMA = """
CREATE TABLE entries (
  key TEXT PRIMARY KEY, value BLOB NOT NULL, create_index INTEGER NOT NULL, modify_index INTEGER NOT NULL,
  lock_index INTEGER NOT NULL, flags INTEGER NOT NULL, session TEXT
) WITHOUT ROWID;
CREATE TABLE sessions (id TEXT PRIMARY KEY, record TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE last (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO last VALUES ('index', 1);
"""
_Row = tuple[str, bytes, int, int, int, int, str | None]
_UPSERT = "INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?, ?)"


class AlreadyOpen(StoreError):
    """Another process has the file open; `pid` is its process id, or None when it can't be told."""

    def __init__(self, path: Path, pid: int | None) -> None:
        self.pid = pid
        holder = "another process" if pid is None else f"process {pid}"
        super().__init__(f"{path} is in use by {holder}: stop it first, or work through it")


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

    def load(self) -> State:
        """Everything that the file holds. Raises `Invalid`, with the file closed again, when it is damaged."""
        try:
            return self._load()
        except (sqlite3.Error, msgspec.MsgspecError, TypeError) as error:
            self.close()
            raise Invalid(f"{self.path} is damaged: {error}; restore it, or move it away to start anew") from error

    def write(self, commit: Commit) -> None:
        """Make the commit durable. Raises `Unavailable`, or `Invalid` for what SQLite has no form for; nothing is
        changed then, and the next write finds no transaction open.
        """
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            self._write(commit)
            self._connection.execute("COMMIT")
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
        """Fold the log into the file and give up the lock."""
        self._connection.close()
        self._mark.close()
        os.close(self._lock)

    def _load(self) -> State:
        entries = [_entry(row) for row in self._connection.execute("SELECT * FROM entries")]
        records = self._connection.execute("SELECT record FROM sessions")
        sessions = [msgspec.json.decode(record, type=SessionRecord) for (record,) in records]
        return State(index=_index(self._connection), entries=entries, sessions=sessions)

    def _write(self, commit: Commit) -> None:
        execute, executemany = self._connection.execute, self._connection.executemany
        written = [_row(entry) for entry in commit.writes.values() if entry is not None]
        deleted = [(key,) for key, entry in commit.writes.items() if entry is None]
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

    def _open(self) -> sqlite3.Connection:
        with ExitStack() as stack:
            try:
                self._check()
                connection = sqlite3.connect(self.path, isolation_level=None, timeout=_BUSY_TIMEOUT)
                stack.callback(connection.close)
                self._prepare(connection)
            except (sqlite3.OperationalError, OSError) as error:
                raise Unavailable(f"{self.path} can't be opened: {error}{_shortage(self.path)}") from error
            except sqlite3.DatabaseError as error:
                raise Invalid(f"{self.path} is not a store of rcfarm: {error}") from error
            stack.pop_all()
            return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        if version == 0:
            connection.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # what makes it a store is not left to the log
        step = INDEX_STEP if version else 0
        connection.execute("UPDATE last SET value = value + ? WHERE name = 'index'", (step,))
        self._mark.note(_index(connection))

    def _check(self) -> None:
        """Refuse a file that is not ours to open, or has lost commits. Read only: closing the last connection that may
        write would fold what is left of a damaged log into the file."""
        if self.path.stat().st_size == 0:  # SQLite would remove the log of an empty file
            self._mark.check(0)
            return
        connection = sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True, timeout=_BUSY_TIMEOUT)
        with closing(connection):
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version not in (0, _VERSION):
                raise Invalid(f"{self.path} has version {version}; this rcfarm reads version {_VERSION}")
            self._mark.check(_index(connection) if version else 0)


def _shortage(path: Path) -> str:
    """Name a lack of room: SQLite calls it "disk I/O error" where it maps its index of the log."""
    disk = os.statvfs(path.parent)
    free = disk.f_bavail * disk.f_frsize
    return f"; only {free // 1024} KiB are free on its disk: free some" if free < _ROOM else ""


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


def _row(entry: Entry) -> _Row:
    # Consul's flags are unsigned and SQLite's integers are signed, both of 64 bits.
    flags = entry.flags - (1 << 64) if entry.flags >= 1 << 63 else entry.flags
    created, modified = entry.create_index, entry.modify_index
    return entry.key, entry.value, created, modified, entry.lock_index, flags, entry.session


def _entry(row: _Row) -> Entry:
    key, value, created, modified, lock_index, flags, session = row
    return Entry(key, value, created, modified, lock_index, flags % (1 << 64), session)
