"""Archives are unpacked as they are, or refused with the member that is at fault."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest

from rcfarm.agent.errors import BadArtifact
from rcfarm.agent.unpack import MAX_DEPTH, MAX_HEADER, MAX_NAME, unpack
from tests.support.agent.archives import Member, Mode, pack

LIMIT = 1_000_000


@pytest.mark.parametrize("mode", ["w:", "w:gz", "w:bz2", "w:xz"])
def test_an_archive_is_unpacked(tmp_path: Path, mode: Mode) -> None:
    """Files, directories, symbolic and hard links come out as packed, from plain and compressed archives."""
    archive = pack(
        tmp_path / "archive",
        Member("./"),
        Member("bin/", mode=0o700),
        Member("bin/run", b"#!/bin/sh\n", mode=0o4777),
        Member("bin/data", b"data", mode=0o400),
        Member("lib/current", symlink="../bin/run"),
        Member("lib/same", hardlink="bin/data"),
        mode=mode,
    )
    target = unpacked(tmp_path, archive)
    assert (target / "lib/current").read_bytes() == b"#!/bin/sh\n"
    assert (target / "lib/same").read_bytes() == b"data"
    assert stat.S_IMODE((target / "bin/run").stat().st_mode) == 0o755  # no setuid, not writable for other users
    assert stat.S_IMODE((target / "bin/data").stat().st_mode) == 0o644
    assert stat.S_IMODE((target / "bin").stat().st_mode) == 0o755


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([Member("/etc/passwd", b"x")], "outside of the archive"),
        ([Member("a/../../b", b"x")], "outside of the archive"),
        ([Member("link", symlink="/etc")], "could lead out"),
        ([Member("link", symlink="../up")], "could lead out"),
        ([Member("a/link", symlink="b/../../up")], "could lead out"),
        ([Member("link", symlink="a"), Member("link/b", b"x")], "not a directory"),
        ([Member("a", b"x"), Member("a/b", b"x")], "not a directory"),
        ([Member("a", b"x"), Member("a", b"y")], "occurs twice"),
        ([Member("a", symlink="b"), Member("./a", b"y")], "occurs twice"),
        ([Member("link", hardlink="/etc/passwd")], "outside of the archive"),
        ([Member("link", hardlink="later"), Member("later", b"x")], "no earlier file"),
        ([Member("s", symlink="a"), Member("link", hardlink="s")], "no earlier file"),
        ([Member("pipe", kind=tarfile.FIFOTYPE)], "a device, a pipe"),
        ([Member("disk", kind=tarfile.BLKTYPE)], "a device, a pipe"),
        ([Member("big", b"x" * (LIMIT + 1))], "more than 1000000 bytes"),
        ([Member("a/" * MAX_DEPTH + "b", b"x")], f"{MAX_DEPTH} levels at most"),
        ([Member("a" * (MAX_NAME + 1), b"x")], f"{MAX_NAME} bytes"),
        ([Member("a", b"x"), Member("link", symlink="a/../" * MAX_DEPTH)], f"{MAX_DEPTH} levels at most"),
        ([Member("a" * MAX_HEADER, b"x")], "an extended header of"),
    ],
)
def test_unsafe_members_are_refused(tmp_path: Path, members: list[Member], message: str) -> None:
    """Members that could write or lead outside of their directory, or fill the disk, are refused."""
    with pytest.raises(BadArtifact, match=message):
        unpacked(tmp_path, pack(tmp_path / "archive", *members))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "target"]


@pytest.mark.parametrize("mode", ["w:", "w:gz", "w:bz2", "w:xz"])
def test_a_damaged_archive_is_refused(tmp_path: Path, mode: Mode) -> None:
    """An archive that breaks off or has flipped bits is a bad artifact or none, not an error of the disk."""
    archive = pack(tmp_path / "archive", Member("a", os.urandom(100_000)), mode=mode)
    content = archive.read_bytes()
    archive.write_bytes(content[:50_000] + bytes(100) + content[50_100 : -(len(content) // 4)])
    with suppress(BadArtifact), open(archive, "rb") as file:
        assert not unpack(file, tmp_path, limit=LIMIT)  # of bzip2 not even the first block can be read


def test_other_files_are_no_archives(tmp_path: Path) -> None:
    """A file that is not a tar archive is taken as it is by the caller."""
    (tmp_path / "file").write_bytes(b"#!/bin/sh\n")
    with open(tmp_path / "file", "rb") as file:
        assert not unpack(file, tmp_path, limit=LIMIT)


def test_an_empty_archive_is_an_empty_directory(tmp_path: Path) -> None:
    """An archive without members is not an error."""
    with tarfile.open(tmp_path / "archive", "w", fileobj=io.BytesIO()):
        pass
    assert list(unpacked(tmp_path, pack(tmp_path / "archive")).iterdir()) == []


def unpacked(tmp_path: Path, archive: Path) -> Path:
    target = tmp_path / "target"
    target.mkdir()
    with open(archive, "rb") as file:
        assert unpack(file, target, limit=LIMIT)
    return target
