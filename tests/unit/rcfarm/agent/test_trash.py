"""Removal: of anything, at any depth, but never of the target of a link."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rcfarm.agent.state import TRASH, Trash, remove

NEST = "import os\nfor _ in range(3000):\n    open('file', 'w').close()\n    os.mkdir('d', 0o700)\n    os.chdir('d')\n"
TREES = st.recursive(
    st.sampled_from(["file", "link", "locked"]),
    lambda children: st.dictionaries(st.sampled_from("abcd"), children, max_size=4),
    max_leaves=30,
)


def grow(path: Path, tree: object, outside: Path) -> None:
    """Make the tree: files, links to a directory outside, directories without any permission."""
    if isinstance(tree, dict):
        path.mkdir()
        for name, below in tree.items():
            grow(path / name, below, outside)
        if len(tree) % 2:
            path.chmod(0o000)
    elif tree == "link":
        path.symlink_to(outside)
    elif tree == "locked":
        path.mkdir()
        (path / "file").touch()
        path.chmod(0o400)
    else:
        path.touch()


@settings(max_examples=100, deadline=None)
@given(TREES)
def test_all_is_removed_and_nothing_beside_it(tmp_path_factory: pytest.TempPathFactory, tree: object) -> None:
    """Safety: everything in a pod's directory is removed, and the targets of its links stay."""
    base = tmp_path_factory.mktemp("base")
    outside = base / "outside"
    outside.mkdir()
    (outside / "file").touch()
    grow(base / "tree", tree, outside)
    assert remove(base / "tree")
    assert sorted(path.name for path in base.rglob("*")) == ["file", "outside"]


def test_a_very_deep_directory_is_removed(tmp_path: Path) -> None:
    """3,000 levels are more than the recursion and the path length of any system function allow; no directory stays
    open."""
    (tmp_path / "top").mkdir()
    subprocess.run([sys.executable, "-c", NEST], cwd=tmp_path / "top", check=True)
    opened = len(os.listdir("/proc/self/fd"))
    assert remove(tmp_path / "top")
    assert len(os.listdir("/proc/self/fd")) == opened
    assert list(tmp_path.iterdir()) == []


def test_what_can_not_be_removed_is_reported_and_keeps_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry that the system does not give up is left behind, alone."""
    unlink = os.unlink

    def held(path: str, *, dir_fd: int | None = None) -> None:
        if path == "held":
            raise PermissionError(1, "Operation not permitted")
        unlink(path, dir_fd=dir_fd)

    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("held", "x", "b/held", "b/x"):
        (tmp_path / "a" / name).touch()
    monkeypatch.setattr("rcfarm.agent.state.os.unlink", held)
    with pytest.raises(PermissionError):
        remove(tmp_path / "a")
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"held"}


def test_a_turn_can_end_before_the_work_does(tmp_path: Path) -> None:
    """A directory that takes long does not delay others; the rest of it is removed in its next turn."""
    (tmp_path / "large").mkdir()
    for number in range(20):
        (tmp_path / "large" / str(number)).touch()
    looks = iter([False] * 10 + [True] * 5)
    assert not remove(tmp_path / "large", lambda: next(looks))
    assert 0 < len(list((tmp_path / "large").iterdir())) < 20
    assert remove(tmp_path / "large")


async def test_what_is_put_there_is_gone_at_once_and_removed_soon(tmp_path: Path) -> None:
    """`put` frees the name, for a path that is not there, too; `run` empties the trash, also of earlier agents."""
    left = tmp_path / TRASH / "left"
    left.mkdir(parents=True)
    (tmp_path / "pod" / "data").mkdir(parents=True)
    bin_ = Trash((tmp_path,))
    running = asyncio.create_task(bin_.run())
    bin_.put(tmp_path / "pod")
    bin_.put(tmp_path / "pod")
    assert not (tmp_path / "pod").exists()
    while any((tmp_path / TRASH).iterdir()):
        await asyncio.sleep(0.01)
    running.cancel()
