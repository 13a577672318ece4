"""Positions and times of logs, and what a client reads of them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rcfarm.agent.errors import NoSuchLog
from rcfarm.agent.log_files import LogRecord, LogRecords
from rcfarm.agent.log_rotation import rotate
from rcfarm.agent.log_streams import LogQuery, LogStream
from rcfarm.operations.pod_wire import FrameReader, LogFrame

BLOCK = 4096
ALPHABET = b"abcdefghijklmnopqrstuvwxyz"


def append(path: Path, data: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        file.write(data)


def everything(record: LogRecord, position: int = 0) -> tuple[int, bytes]:
    """Return what is kept from a position on, and where it begins."""
    found = first = record.read(position, 1000)
    data = found.data
    while found.data:
        found = record.read(found.position + len(found.data), 1000)
        data += found.data
    return first.position, data


def read(records: LogRecords, **query: object) -> list[tuple[LogFrame, bytes]]:
    """Return the frames of the pod `web`."""
    asked = LogQuery(**query)  # type: ignore[arg-type]
    stream, reader, found = LogStream(lambda: records.sources("web"), asked), FrameReader(), []
    while data := stream.batch():
        found += reader.feed(data)
    return found


def text(frames: list[tuple[LogFrame, bytes]]) -> bytes:
    return b"".join(data for _, data in frames)


@settings(max_examples=40)
@given(st.lists(st.one_of(st.integers(1, 3 * BLOCK), st.just(0)), max_size=12))
def test_rotation_changes_no_position(steps: list[int]) -> None:
    """Whatever is written and rotated (0), a byte keeps its position, also for an agent that starts again; what is
    kept is the end of what was written, without a gap."""
    with tempfile.TemporaryDirectory() as directory:
        path, written = Path(directory) / "web.log", b""
        record = LogRecord(path)
        for step in steps:
            if step:
                data = (ALPHABET * (step // 26 + 2))[len(written) % 26 :][:step]
                append(path, data)
                written += data
                record.observe(1)
            elif path.exists() and path.stat().st_size > BLOCK:
                rotate(path, BLOCK, 3, record)
        for each in (record, LogRecord(path)):
            first, kept = everything(each)
            assert written[first:] == kept
            assert each.bounds() == (first, len(written))
            assert len(kept) >= min(len(written), 3 * BLOCK)


def test_lines_have_the_times_at_which_they_were_seen(tmp_path: Path) -> None:
    """`since` begins with a whole line; the times survive the agent."""
    path = tmp_path / "web" / "main.log"
    for number, data in enumerate((b"one\n", b"two\nhal", b"f\nthree\n")):
        append(path, data)
        LogRecord(path).observe(1000 * (number + 1))
    record = LogRecord(path)
    assert [record.time_at(position)[0] for position in (0, 3, 4, 10, 11)] == [1000, 1000, 2000, 2000, 3000]
    assert everything(record, record.since(2000))[1] == b"two\nhalf\nthree\n"
    assert everything(record, record.since(3000))[1] == b"three\n"
    assert everything(record, record.since(3001))[1] == b""


@pytest.mark.parametrize(
    ("lines", "expected"), [(0, b""), (1, b"c"), (2, b"bb\nc"), (3, b"a\nbb\nc"), (9, b"a\nbb\nc")]
)
def test_the_tail_counts_lines(tmp_path: Path, lines: int, expected: bytes) -> None:
    """With and without a line feed at the end; over several files and blocks."""
    record = LogRecord(tmp_path / "main.log")
    append(record.path, b"a\nbb\nc")
    assert everything(record, record.tail(lines, 0, record.bounds()[1]))[1] == expected
    append(record.path, b"\n")
    assert everything(record, record.tail(lines, 0, record.bounds()[1]))[1] == expected + (b"\n" if lines else b"")
    append(record.path, b"x" * 200_000 + b"\n" + b"".join(b"%d\n" % number for number in range(40_000)))
    rotate(record.path, 64 * 1024, 4, record)
    assert everything(record, record.tail(3, 0, record.bounds()[1]))[1] == b"39997\n39998\n39999\n"


def test_a_record_is_read_whatever_is_in_its_file(tmp_path: Path) -> None:
    """Half lines, foreign words and huge numbers are left out; a log that was cut by another program goes on."""
    path = tmp_path / "main.log"
    append(path, b"old\n")
    path.with_suffix(".times").write_bytes(
        b"m 4 1000\nm x 1\n\xff\xfe\nm 99999999999999999999999999999999999 1\ns 4 10"
    )
    record = LogRecord(path)
    os.truncate(path, 0)
    record.observe(2000)
    append(path, b"new\n")
    assert record.observe(3000)
    assert record.read(record.bounds()[1] - 4, 100).data == b"new\n"


def test_nothing_outside_of_the_pods_logs_is_read(tmp_path: Path) -> None:
    """A log that is a link, a device or a directory has no content."""
    secret = tmp_path / "secret"
    secret.write_text("secret\n")
    logs = tmp_path / "logs" / "web"
    logs.mkdir(parents=True)
    (logs / "link.log").symlink_to(secret)
    (logs / "folder.log").mkdir()
    os.mkfifo(logs / "pipe.log")
    (logs / "other.name.log").write_text("no launchable's")
    records = LogRecords(tmp_path / "logs")
    assert {name for name, _ in records.sources("web")} == {"link", "folder", "pipe"}
    assert read(records) == []


def test_streams_are_merged_by_time(tmp_path: Path) -> None:
    """Each stream stays in order; between them, what was seen earlier comes first."""
    records = LogRecords(tmp_path)
    for number, name in enumerate(("main.log", "main.stderr.log", "side.log", "main.log")):
        append(tmp_path / "web" / name, f"{number}\n".encode())
        records.of(tmp_path / "web" / name).observe(1000 + number)
    frames = read(records)
    assert text(frames) == b"0\n1\n2\n3\n"
    assert [frame.source for frame, _ in frames] == ["main/stdout", "main/stderr", "side/stdout", "main/stdout"]
    assert text(read(records, launchable="side")) == b"2\n"
    with pytest.raises(NoSuchLog, match="no log of a launchable 'web'; it has main, side"):
        read(records, launchable="web")


def test_runs_are_distinguished(tmp_path: Path) -> None:
    """A restart is an event at its place; `previous` is the run before the last start, on both streams."""
    records = LogRecords(tmp_path)
    paths = tmp_path / "web" / "main.log", tmp_path / "web" / "main.stderr.log"
    for run in range(3):
        records.started(*paths)
        for path in paths:
            append(path, f"{path.name} {run}\n".encode())
    frames = read(records, launchable="main")
    assert [frame.event or data.decode() for frame, data in frames if frame.source == "main/stdout"] == [
        "main.log 0\n", "started", "main.log 1\n", "started", "main.log 2\n",
    ]  # fmt: skip
    assert sorted(text(read(records, previous=True)).splitlines()) == [b"main.log 1", b"main.stderr.log 1"]
    assert sorted(text(read(records, previous=True, tail=0)).splitlines()) == []
    fresh = LogRecords(tmp_path / "fresh")
    fresh.started(tmp_path / "fresh" / "web" / "main.log", tmp_path / "fresh" / "web" / "main.stderr.log")
    append(tmp_path / "fresh" / "web" / "main.log", b"once\n")
    with pytest.raises(NoSuchLog, match="leave out --previous"):
        read(fresh, previous=True)


def test_a_reader_that_is_too_slow_gets_a_note(tmp_path: Path) -> None:
    """What was rotated away before it was read is counted; the rest follows. Positions continue a lost connection."""
    records, path = LogRecords(tmp_path), tmp_path / "web" / "main.log"
    append(path, b"first\n")
    stream, reader = LogStream(lambda: records.sources("web"), LogQuery()), FrameReader()
    assert text(reader.feed(stream.batch())) == b"first\n"
    for _ in range(3):
        append(path, b"x" * 10 * BLOCK)
        rotate(path, BLOCK, 2, records.of(path))
    append(path, b"last\n")
    frames = reader.feed(stream.batch())
    first, kept = everything(records.of(path))
    assert frames[0][0].event == "skipped"
    assert frames[0][0].text.startswith(f"{first - 6} bytes skipped: the reader is too slow")
    assert text(frames) == kept
    assert text(read(records, positions={"main/stdout": records.of(path).bounds()[1] - 5})) == b"last\n"


def test_frames_come_whole_however_they_are_cut() -> None:
    """The client's half of the protocol; a stream that is none is refused."""
    sent = LogFrame(source="main/stdout", time=1, size=5).encoded(b"a\n{\nb") + LogFrame(event="end").encoded()
    for step in range(1, len(sent) + 1):
        reader = FrameReader()
        found = [frame for at in range(0, len(sent), step) for frame in reader.feed(sent[at : at + step])]
        assert [(frame.event, data) for frame, data in found] == [("", b"a\n{\nb"), ("end", b"")]
    for hostile in (b'{"size":-1}\n', b'{"size":99999999}\n', b"<html>\n", b"x" * (1 << 21)):
        with pytest.raises(Exception, match=r"frame|JSON|malformed|invalid|not"):
            FrameReader().feed(hostile)
