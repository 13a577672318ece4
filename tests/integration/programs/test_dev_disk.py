"""`rcfarm dev` on a full disk, or over a store that lost commits: one line that says what to do, and no empty fleet."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.programs.daemon import running
from tests.support.programs.disk import small_file_system

ROOT = Path(__file__).parents[3]


def dev(directory: Path) -> subprocess.CompletedProcess[str]:
    """Run an `rcfarm dev` that is expected to end on its own."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("RCFARM_", "CONSUL_"))}
    command = [sys.executable, "-m", "rcfarm", "dev", "--directory", str(directory), "--listen", "127.0.0.1:0"]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60, check=False)


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
    assert ended.returncode == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    [line] = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert str(small_disk) in line
    assert any(words in line for words in ("No space left on device", "KiB are free on its disk", "no space left"))


def test_a_store_that_lost_its_log_is_no_empty_fleet(tmp_path: Path) -> None:
    """After kill -9 the log holds the last writes; without it the start is refused, with instructions how to go on."""
    with running(tmp_path / "first", "dev", "--directory", str(tmp_path / "dev"), "--nodes", "1") as daemon:
        daemon.until_ready()
        daemon.process.kill()
        daemon.process.wait()
    (tmp_path / "dev" / "store.db-wal").unlink()
    ended = dev(tmp_path / "dev")
    assert ended.returncode == 1
    assert f"remove {tmp_path / 'dev' / 'store.db.mark'} and start again" in ended.stderr
    assert "Traceback" not in ended.stderr
