"""Log files: bounded although their writers never close them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from pathlib import Path

import pytest

from rcfarm.agent.log_rotation import LogKeeper, rotate

WRITER = "import itertools, sys, time\nfor n in itertools.count():\n    print(n, flush=True)\n    time.sleep(0.0002)\n"


def keeper(root: Path, size: int = 100, files: int = 2, keep: float = 60) -> LogKeeper:
    return LogKeeper(root, size=size, files=files, keep=keep)


def log_file(root: Path) -> Path:
    (root / "web").mkdir()
    return root / "web" / "main.log"


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no copy be made."""

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rcfarm.agent.log_rotation._data", full)


def test_a_large_file_is_rotated_under_its_writer(tmp_path: Path) -> None:
    """The writer keeps its descriptor and continues in the emptied file; only `files` older files are kept."""
    log = log_file(tmp_path)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in range(5):
        os.write(descriptor, f"{number}".encode() * 101)
        keeper(tmp_path).rotate_all()
        assert log.read_text() == ""
    os.write(descriptor, b"last")
    keeper(tmp_path).rotate_all()
    os.close(descriptor)
    assert log.read_text() == "last"
    assert log.with_name("main.log.1").read_text() == "4" * 101
    assert log.with_name("main.log.2").read_text() == "3" * 101
    assert sorted(path.name for path in log.parent.glob("main.log*")) == ["main.log", "main.log.1", "main.log.2"]


def test_a_busy_writer_loses_next_to_nothing(tmp_path: Path) -> None:
    """Rotation under a program that writes all the time loses at most the lines of an instant."""
    log = log_file(tmp_path)
    with open(log, "ab") as output, subprocess.Popen(["python3", "-c", WRITER], stdout=output) as writer:
        try:
            while len(list(log.parent.glob("main.log.*"))) < 20:
                time.sleep(0.05)
                keeper(tmp_path, size=500, files=1000).rotate_all()
        finally:
            writer.kill()
    older = sorted(log.parent.glob("main.log.*"), key=lambda path: -int(path.suffix[1:]))
    lines = "".join(path.read_text() for path in (*older, log)).split()
    numbers = [int(line) for line in lines if line]
    assert numbers == sorted(numbers)
    assert len(numbers) >= 0.98 * (numbers[-1] + 1)


@pytest.mark.usefixtures("full_disk")
def test_a_file_that_can_not_be_copied_stays_whole(tmp_path: Path) -> None:
    """When the disk is full nothing is truncated, and no half copy is left."""
    log = log_file(tmp_path)
    log.write_bytes(b"x" * 200)
    with pytest.raises(OSError, match="No space left"):
        rotate(log, 100, 2)
    keeper(tmp_path).rotate_all()  # reports it, and goes on with the others
    assert log.read_bytes() == b"x" * 200
    assert [path.name for path in log.parent.glob("main.log*")] == ["main.log"]


def test_logs_of_pods_that_are_gone_are_kept_for_a_while(tmp_path: Path) -> None:
    """Logs of known pods stay; others expire once nothing was written there for the time to keep."""
    for pod in ("known", "recent", "old"):
        (tmp_path / pod).mkdir()
        (tmp_path / pod / "main.log").write_text("x")
    os.utime(tmp_path / "old" / "main.log", (0, 0))
    os.utime(tmp_path / "known" / "main.log", (0, 0))
    assert keeper(tmp_path).expired({"known"}) == [tmp_path / "old"]


@pytest.mark.looptime
async def test_files_are_looked_at_every_interval(tmp_path: Path) -> None:
    """`run` rotates at its interval until it is cancelled."""
    log = log_file(tmp_path)
    running = asyncio.create_task(keeper(tmp_path).run(5.0))
    await asyncio.sleep(1)
    log.write_bytes(b"x" * 200)
    await asyncio.sleep(5)
    running.cancel()
    assert log.read_bytes() == b""


@pytest.mark.parametrize("written", [100, 199, 250, 399, 400, 5000])
def test_what_is_kept_does_not_depend_on_when_the_agent_looks(tmp_path: Path, written: int) -> None:
    """However much was written between two looks, the end of it is kept, as much as all files may hold, in order."""
    content = "".join(f"{number:09}\n" for number in range(written // 10)).encode() + b"x" * (written % 10)
    log = log_file(tmp_path)
    log.write_bytes(content)
    rotate(log, 100, 4)
    older = sorted(log.parent.glob("main.log.*"), key=lambda path: -int(path.suffix[1:]))
    kept = b"".join(path.read_bytes() for path in (*older, log))
    assert content.endswith(kept)
    assert 400 <= len(kept) + 400 - min(400, written) < 400 + 4096
    assert all(path.stat().st_size < 200 for path in older)


def test_holes_are_not_copied(tmp_path: Path) -> None:
    """A file that was made 8 GiB long is truncated without a copy of its nothing, and what lies in it is kept."""
    log = log_file(tmp_path)
    log.write_bytes(b"begin\n")
    os.truncate(log, 8 << 30)
    with open(log, "ab") as file:
        file.write(b"end\n")
    assert keeper(tmp_path, size=1 << 20, files=4).rotate_all() == 1
    assert log.stat().st_size == 0
    assert log.with_name("main.log.1").read_bytes().strip(b"\0") == b"end\n"
    assert log.with_name("main.log.1").stat().st_size < 100_000


def test_reserved_blocks_count(tmp_path: Path) -> None:
    """Blocks that a process reserves behind the end of its log are given back."""
    log = log_file(tmp_path)
    log.write_bytes(b"hello\n")
    if subprocess.run(["fallocate", "--keep-size", "-l", "200M", log], check=False, capture_output=True).returncode:
        pytest.skip("this file system reserves nothing")
    keeper(tmp_path, size=1 << 20).rotate_all()
    assert log.stat().st_blocks == 0
    assert log.with_name("main.log.1").read_bytes() == b"hello\n"


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_does_not_keep_what_may_not_be_kept(tmp_path: Path) -> None:
    """Where there is no room for a copy, a file that has outgrown all that may be kept is cut to its end."""
    log = log_file(tmp_path)
    log.write_bytes(b"x" * 1000 + b"end")
    keeper(tmp_path).rotate_all()
    assert log.read_bytes() == b""
    assert log.with_name("main.log.1").read_bytes() == b"x" * 97 + b"end"


def test_the_output_of_a_check_is_bounded(tmp_path: Path) -> None:
    """A check that writes without end does not fill the disk either."""
    check = log_file(tmp_path).with_name("main.check")
    check.write_bytes(b"x" * 1000)
    keeper(tmp_path).rotate_all()
    assert check.read_bytes() == b""
