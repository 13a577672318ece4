"""The file of an embedded store: one SQLite database in WAL mode, and the lock that keeps it to one process.

One SQLite transaction per commit, made before the commit is applied in memory and acknowledged. What survives what:

- the process dies (`kill -9`, a crash, out of memory): every acknowledged write is there, and nothing by halves;
- the machine loses power or its kernel dies: the file is sound and holds whole commits in order, but the last ones,
  since the last checkpoint (at most some 4 MB of writes), may be missing. That is `synchronous=NORMAL`: an fsync per
  commit would stall the event loop for milliseconds each time;
- the disk is full or fails: the write is refused with `Unavailable`; file and memory stay as they were.

Every opening starts `INDEX_STEP` above the last index that the file knows, so that an index that was handed out and
then lost with the power is never given to something else: a CAS that relies on it fails, a watch above it wakes.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from pathlib import Path

import msgspec

from store.embedded_state import Commit, SessionRecord, State
from store.kv import Entry, Invalid, StoreError, Unavailable

INDEX_STEP = 1 << 20
_VERSION = 1
_BUSY_TIMEOUT = 1.0  # seconds; only a foreign program that writes to the file can make us wait
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
        try:
            self._connection = self._open()
        except BaseException:
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

    def close(self) -> None:
        """Fold the log into the file and give up the lock."""
        self._connection.close()
        os.close(self._lock)

    def _load(self) -> State:
        entries = [_entry(row) for row in self._connection.execute("SELECT * FROM entries")]
        records = self._connection.execute("SELECT record FROM sessions")
        sessions = [msgspec.json.decode(record, type=SessionRecord) for (record,) in records]
        (index,) = self._connection.execute("SELECT value FROM last WHERE name = 'index'").fetchone()
        return State(index=index, entries=entries, sessions=sessions)

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
        try:
            connection = sqlite3.connect(self.path, isolation_level=None, timeout=_BUSY_TIMEOUT)
        except sqlite3.Error as error:
            raise Unavailable(f"{self.path} can't be opened: {error}") from error
        try:
            _prepare(connection, self.path)
        except sqlite3.OperationalError as error:
            connection.close()
            raise Unavailable(f"{self.path} can't be opened: {error}") from error
        except sqlite3.DatabaseError as error:
            connection.close()
            raise Invalid(f"{self.path} is not a store of rcfarm: {error}") from error
        except StoreError:
            connection.close()
            raise
        return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in (0, _VERSION):
        raise Invalid(f"{path} has version {version}; this rcfarm reads version {_VERSION}")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    if version == 0:
        connection.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;")
    connection.execute("UPDATE last SET value = value + ? WHERE name = 'index'", (INDEX_STEP if version else 0,))


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
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _row(entry: Entry) -> _Row:
    # Consul's flags are unsigned and SQLite's integers are signed, both of 64 bits.
    flags = entry.flags - (1 << 64) if entry.flags >= 1 << 63 else entry.flags
    created, modified = entry.create_index, entry.modify_index
    return entry.key, entry.value, created, modified, entry.lock_index, flags, entry.session


def _entry(row: _Row) -> Entry:
    key, value, created, modified, lock_index, flags, session = row
    return Entry(key, value, created, modified, lock_index, flags % (1 << 64), session)
