"""`rcfarm dev` in another directory, on a full disk, or over a store that lost commits: it says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.programs.cli import Ran, run_process
from tests.support.programs.daemon import running
from tests.support.programs.disk import small_file_system


def dev(directory: Path) -> Ran:
    """Run an `rcfarm dev` that is expected to end on its own."""
    return run_process("dev", "--directory", str(directory), "--listen", "127.0.0.1:0")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with small_file_system(tmp_path / "disk", "1m") as disk:
        yield disk


@pytest.mark.parametrize("room", [0, 4, 12, 20, 32, 48])  # KiB: the disk becomes full at other steps of the start
def test_a_full_disk_is_named_at_the_start(small_disk: Path, room: int) -> None:
    """Whichever file can't be written: one line names it, the exit code is 1, and no traceback is shown."""
    (small_disk / "filler").write_bytes(bytes(1024 * 1024 - 1024 * room))
    ended = dev(small_disk / "dev")
    assert ended.code == 1, ended.err
    assert "Traceback" not in ended.err
    [line] = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert str(small_disk) in line
    assert any(words in line for words in ("No space left on device", "KiB are free on its disk", "no space left"))


def test_commands_reach_a_fleet_in_another_directory(tmp_path: Path) -> None:
    """The variable that `rcfarm dev --directory` prints leads a command to its store."""
    with running(tmp_path / "log", "dev", "--directory", str(tmp_path / "dev"), "--nodes", "1") as daemon:
        daemon.until_ready()
        assert f"need RCFARM_STORE=embedded:{tmp_path / 'dev'}\n" in daemon.log()
        listed = run_process("node", "list", env={"RCFARM_STORE": f"embedded:{tmp_path / 'dev'}"})
        assert (listed.code, "node-1" in listed.out) == (0, True), listed.err


def test_a_store_that_lost_its_log_is_no_empty_fleet(tmp_path: Path) -> None:
    """After kill -9 the log holds the last writes; without it the start is refused, with instructions how to go on."""
    with running(tmp_path / "first", "dev", "--directory", str(tmp_path / "dev"), "--nodes", "1") as daemon:
        daemon.until_ready()
        daemon.kill()
    (tmp_path / "dev" / "store.db-wal").unlink()
    ended = dev(tmp_path / "dev")
    assert ended.code == 1
    assert f"remove {tmp_path / 'dev' / 'store.db.mark'} and start again" in ended.err
    assert "Traceback" not in ended.err
