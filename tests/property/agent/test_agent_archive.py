"""Unpacking: whatever the archive, no file leaves its directory."""

from __future__ import annotations

import os
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from rcfarm.agent.errors import BadArtifact
from rcfarm.agent.unpack import Members, unpack
from tests.support.agent.archives import Member, pack

LIMIT = 10_000
PARTS = st.sampled_from(["a", "b", "c", "..", "..", ".", "", "outside"])
NAMES = st.lists(PARTS, min_size=1, max_size=4).map("/".join)
INSIDE = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=3).map("/".join)
MEMBERS = st.one_of(
    st.builds(Member, NAMES, st.just(b"planted"), st.just(0o777)),
    st.builds(lambda name: Member(name + "/", mode=0o777), NAMES),
    st.builds(lambda name, target: Member(name, symlink=target), INSIDE, NAMES),
    st.builds(lambda name, target: Member(name, symlink=target), INSIDE, NAMES),
    st.builds(lambda name, target: Member(name, hardlink=target), INSIDE, NAMES),
)
ARCHIVES = st.lists(MEMBERS, min_size=1, max_size=6)


@settings(max_examples=300, deadline=None)
@given(ARCHIVES)
def test_nothing_is_written_or_reached_outside(members: list[Member]) -> None:
    """Safety: no member appears outside of the target, and no link leads out, whether the archive is refused or not."""
    with unpacking(members) as (archive, target), open(archive, "rb") as file, suppress(BadArtifact):
        unpack(file, target, limit=LIMIT)


@settings(max_examples=300, deadline=None)
@given(ARCHIVES)
def test_our_own_rules_suffice(members: list[Member]) -> None:
    """Safety does not depend on the standard library's filter: archives that pass our rules are safe without it."""
    with unpacking(members) as (archive, target), tarfile.open(archive) as tar:
        rules = Members(LIMIT)
        for member in tar:
            with suppress(BadArtifact):  # continues where `unpack` stops, so that more passes
                if (checked := rules.check(member)) is not None:
                    tar.extract(checked, target, filter="fully_trusted")


@contextmanager
def unpacking(members: list[Member]) -> Iterator[tuple[Path, Path]]:
    """Yield an archive of the members and a directory to unpack it in; check everything around it at the end."""
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory, "base")
        target = base / "x" / "y" / "target"
        target.mkdir(parents=True)
        secret = base / "outside"
        secret.write_text("secret")
        before = outside(base, target)
        yield pack(Path(directory, "archive.tar"), *members), target
        assert outside(base, target) == before
        assert secret.read_text() == "secret"
        assert secret.stat().st_nlink == 1
        for path in everything(target):
            assert leads_to(path).is_relative_to(target.resolve())


def leads_to(path: Path) -> Path:
    """Return where the path leads through all links; itself, when they form a circle."""
    try:
        return path.resolve(strict=True)
    except FileNotFoundError:
        return path.resolve()
    except (OSError, RuntimeError):
        return path


def everything(directory: Path) -> list[Path]:
    return [Path(root) / name for root, dirs, files in os.walk(directory) for name in (*dirs, *files)]


def outside(base: Path, target: Path) -> set[Path]:
    return {path for path in everything(base) if not path.is_relative_to(target) or path == target}
