"""The guarantees of an embedded store's file: no acknowledged write lost, no partial one, one owner at a time."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from store.embedded.sqlite import AlreadyOpen
from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.kv.protocol import Invalid, SessionExpired, SessionSpec, TxnConflict, Unavailable
from tests.support import require

KILLS = 8
WRITER = """
import asyncio, sys
from pathlib import Path
from store.kv import ops
from store.embedded.store import EmbeddedStore

async def main():
    store = EmbeddedStore(Path(sys.argv[1]))
    number = int(sys.argv[2])
    print("ready", flush=True)
    while True:
        number += 1
        await store.txn([ops.put(f"left/{number}", b"x" * 300), ops.put(f"right/{number}", b"x" * 300), ops.put("last", b"%d" % number)])
        print(number, flush=True)

asyncio.run(main())
"""  # noqa: E501 - a program of its own


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "store.db"


async def closed_store(path: Path, value: bytes = b"1") -> None:
    """Write one key, and close the store again."""
    store = EmbeddedStore(path)
    await store.put("key", value)
    await store.close()


@contextmanager
def writing(path: Path, after: int = 0) -> Iterator[subprocess.Popen[str]]:
    """Run a process that opens the store and writes; it prints the number of each transaction after `after`."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(after)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    yield writer
    writer.kill()
    writer.wait()
    writer.stdout.close()


@contextmanager
def no_room_beyond(size: int) -> Iterator[None]:
    """No file of this process grows above `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_everything_is_there_again_after_reopening(path: Path) -> None:
    """Values, indexes, flags of all 64 bits, locks and sessions outlive the process."""
    store = EmbeddedStore(path)
    session = await store.create_session(SessionSpec("holder", behavior="delete"))
    await store.put("plain", b"\x00\xff", flags=2**64 - 1)
    await store.put("gone", b"")
    await store.delete("gone")
    await store.txn([ops.lock("held", b"v", session.id)])
    before = (await store.list("")).entries
    await store.close()

    store = EmbeddedStore(path)
    assert (await store.list("")).entries == before
    info = require(await store.session_info(session.id))
    assert (info.name, info.ttl, info.behavior) == ("holder", 10.0, "delete")
    await store.destroy_session(session.id)
    assert await store.get("held") is None
    await store.close()


async def test_no_acknowledged_write_is_lost_to_kill_9(path: Path) -> None:
    """Killed at any moment, the store holds every transaction that it acknowledged, each one whole."""
    rng = random.Random(9)
    acknowledged = 0
    for _ in range(KILLS):
        with writing(path, acknowledged + 1000) as writer:
            assert writer.stdout is not None
            for _ in range(rng.randrange(1, 400)):
                acknowledged = int(writer.stdout.readline())
            writer.kill()
            acknowledged = max([acknowledged, *map(int, writer.stdout.read().split("\n")[:-1])])
        store = EmbeddedStore(path)
        left, right = await store.keys("left/"), await store.keys("right/")
        last = await store.get("last")
        await store.close()
        assert last is not None
        assert acknowledged <= int(last.value) <= acknowledged + 1
        assert f"left/{acknowledged}" in left
        assert [key.removeprefix("left/") for key in left] == [key.removeprefix("right/") for key in right]


async def test_a_second_process_learns_which_process_has_the_store(path: Path) -> None:
    """A store file belongs to one process at a time; the refusal names it, and its death frees the file."""
    with writing(path) as writer:
        with pytest.raises(AlreadyOpen, match=f"in use by process {writer.pid}") as refused:
            EmbeddedStore(path)
        assert refused.value.pid == writer.pid
    store = EmbeddedStore(path)
    with pytest.raises(AlreadyOpen, match=f"process {os.getpid()}"):
        EmbeddedStore(path)
    await store.close()


async def test_a_full_disk_refuses_the_write_and_changes_nothing(path: Path) -> None:
    """A write that finds no room is `Unavailable`, unseen by readers and watchers; with room again, all goes on."""
    store = EmbeddedStore(path)
    await store.put("a", b"old")
    index = (await store.list("")).index
    watch = asyncio.create_task(store.watch("", index, 60))
    await asyncio.sleep(0)
    with no_room_beyond(path.with_name("store.db-wal").stat().st_size):
        with pytest.raises(Unavailable, match=r"store\.db: .*nothing was changed"):
            await store.txn([ops.put("a", b"new"), ops.put("b", b"x" * 100_000)])
        assert [entry.value for entry in (await store.list("")).entries] == [b"old"]
        assert (await store.list("")).index == index
        assert not watch.done()
    await store.put("a", b"new")
    assert [entry.value for entry in (await watch).entries] == [b"new"]
    await store.close()
    store = EmbeddedStore(path)
    assert [entry.value for entry in (await store.list("")).entries] == [b"new"]
    await store.close()


@pytest.mark.looptime
async def test_a_session_that_cannot_be_ended_on_a_full_disk_is_ended_later(path: Path) -> None:
    """Its lease has ended all the same: it can't be renewed, and its keys are free once there is room."""
    store = EmbeddedStore(path)
    session = await store.create_session(SessionSpec("holder", check_ttl=3))
    await store.txn([ops.lock("k", b"", session.id)])
    with no_room_beyond(path.with_name("store.db-wal").stat().st_size):
        await asyncio.sleep(5)
        with pytest.raises(SessionExpired):
            await store.renew_session(session.id)
    await asyncio.sleep(1.1)
    entry = require(await store.get("k"))
    assert entry.session is None
    await store.close()


@pytest.mark.looptime
async def test_after_a_restart_a_holder_may_renew_or_is_released(path: Path) -> None:
    """Sessions come back with a full lease: a holder that renews keeps its lock, another loses it with the lease."""
    store = EmbeddedStore(path)
    alive = await store.create_session(SessionSpec("alive", check_ttl=3))
    dead = await store.create_session(SessionSpec("dead", check_ttl=3))
    await store.txn([ops.lock("a", b"", alive.id), ops.lock("d", b"", dead.id)])
    await store.close()
    await asyncio.sleep(1000)

    store = EmbeddedStore(path)
    await store.renew_session(alive.id)
    await asyncio.sleep(2.9)
    await store.renew_session(alive.id)
    assert [entry.session for entry in (await store.list("")).entries] == [alive.id, dead.id]
    await asyncio.sleep(0.2)
    assert [entry.session for entry in (await store.list("")).entries] == [alive.id, None]
    await store.close()


async def test_indexes_only_rise_across_restarts(path: Path) -> None:
    """No index is used twice, not even one that a power failure may have taken back; a watcher from before is woken."""
    store = EmbeddedStore(path)
    await store.put("a", b"")
    seen = (await store.list("a")).index
    await store.close()

    store = EmbeddedStore(path)
    listing = await store.watch("a", seen, 60)
    assert listing.index > seen
    await store.put("a", b"new")
    entry = require(await store.get("a"))
    assert entry.modify_index > listing.index
    with pytest.raises(TxnConflict):
        await store.txn([ops.cas("a", b"", seen)])
    await store.close()


async def test_the_file_is_private(path: Path) -> None:
    """Manifests may hold secrets: only the owner can read the directory and the files in it."""
    store = EmbeddedStore(path)
    await store.put("a", b"")
    modes = {each.name: each.stat().st_mode & 0o077 for each in [path.parent, *path.parent.iterdir()]}
    await store.close()
    assert not any(modes.values()), modes


async def test_a_file_of_something_else_is_refused(path: Path, tmp_path: Path) -> None:
    """A file that is not a store, or was written by a later version, is named and not changed."""
    path.parent.mkdir()
    path.write_bytes(b"something else entirely" * 100)
    with pytest.raises(Invalid, match=r"store\.db is not a store of rcfarm"):
        EmbeddedStore(path)
    path.unlink()
    sqlite3.connect(path).execute("PRAGMA user_version = 7").connection.close()
    with pytest.raises(Invalid, match="version 7"):
        EmbeddedStore(path)
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable, match="can't be opened"):
        EmbeddedStore(tmp_path / "file" / "store.db")


async def test_a_damaged_file_is_refused_and_let_go(path: Path) -> None:
    """A store with unreadable pages says so instead of starting with less than it should hold."""
    store = EmbeddedStore(path)
    for number in range(100):
        await store.put(f"key/{number}", b"x" * 1000)
    await store.close()
    sound = path.read_bytes()
    path.write_bytes(sound[:8192] + b"\x00" * (len(sound) - 8192))
    for _ in range(2):
        with pytest.raises(Invalid, match=r"store\.db is (damaged|not a store)"):
            EmbeddedStore(path)
    path.write_bytes(sound)
    store = EmbeddedStore(path)
    assert len(await store.keys("key/")) == 100
    await store.close()


@pytest.mark.parametrize("entry", [("a", 1 << 70), ("\ud800", 0)], ids=["flags", "key"])
async def test_what_cant_be_stored_does_not_stand_in_the_way_of_the_next_write(
    tmp_path: Path, entry: tuple[str, int]
) -> None:
    """A write that SQLite can't store is refused, is not seen, and leaves no transaction open."""
    key, flags = entry
    store = EmbeddedStore(tmp_path / "store.db")
    with pytest.raises(Invalid, match="nothing was changed"):
        await store.txn([ops.put("b", b""), ops.put(key, b"", flags=flags)])
    assert await store.keys("") == []
    await store.put("innocent", b"")
    await store.close()
    store = EmbeddedStore(tmp_path / "store.db")
    assert await store.keys("") == ["innocent"]
    await store.close()


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for place in random.Random(5).sample(range(200, len(content)), 20):
        content[place] ^= 1
    path.write_bytes(content)


def _halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGES = {
    "log removed": lambda path: path.with_name("store.db-wal").unlink(),
    "log of garbage": lambda path: path.with_name("store.db-wal").write_bytes(b"\x5a" * 65536),
    "log cut": lambda path: _halve(path.with_name("store.db-wal")),
    "bits of the log flipped": lambda path: _flip(path.with_name("store.db-wal")),
    "file emptied": lambda path: os.truncate(path, 0),
    "file and log removed": lambda path: [path.unlink(), path.with_name("store.db-wal").unlink()],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
async def test_a_store_that_lost_commits_never_starts_with_less(path: Path, damage: Callable[[Path], object]) -> None:
    """After a kill the commits lie in the log: without it, or with less of it, the store refuses, changes nothing, and
    names the file to remove by an operator who accepts the loss."""
    with writing(path) as writer:
        assert [int(require(writer.stdout).readline()) for _ in range(100)] == list(range(1, 101))
    damage(path)
    before = {each.name: each.read_bytes() for each in path.parent.iterdir() if each.suffix not in (".lock", ".db-shm")}
    for _ in range(2):
        with pytest.raises(Invalid, match=r"store\.db (is empty|ends at index \d+), but .* remove .*store\.db\.mark"):
            EmbeddedStore(path)
    after = {each.name: each.read_bytes() for each in path.parent.iterdir() if each.suffix not in (".lock", ".db-shm")}
    assert {name: after[name] for name in before} == before
    path.with_name("store.db.mark").unlink()
    store = EmbeddedStore(path)
    await store.put("on", b"")
    await store.close()


async def test_an_older_copy_of_the_file_is_refused(path: Path) -> None:
    """A file that was put back without its mark is older than what was acknowledged."""
    await closed_store(path)
    older = path.read_bytes()
    await closed_store(path, b"2")
    path.write_bytes(older)
    with pytest.raises(Invalid, match=r"ends at index \d+, but this store had reached index"):
        EmbeddedStore(path)


@pytest.mark.parametrize("boot", [None, b"00000000-0000-0000-0000-000000000000"], ids=["no mark", "another boot"])
async def test_a_store_whose_mark_proves_no_loss_is_opened(path: Path, boot: bytes | None) -> None:
    """An older rcfarm made no mark. A mark of another boot is ahead of a file that lost its last commits with the
    power. The store opens in both cases, and has a mark from then on."""
    await closed_store(path)
    mark = path.with_name("store.db.mark")
    if boot is None:
        mark.unlink()
    else:
        ahead = int(mark.read_bytes().split()[-1]) + 100
        mark.write_bytes(b"rcfarm store, boot %s, index %020d\n" % (boot, ahead))
    store = EmbeddedStore(path)
    assert await store.keys("") == ["key"]
    await store.close()
    assert mark.stat().st_mode & 0o777 == 0o600


async def test_a_mark_of_something_else_is_named(path: Path) -> None:
    """A malformed mark proves nothing; the operator decides."""
    await EmbeddedStore(path).close()
    path.with_name("store.db.mark").write_bytes(b"\xff\xfe")
    with pytest.raises(Invalid, match=r"store\.db\.mark is not a store's mark; remove it"):
        EmbeddedStore(path)
