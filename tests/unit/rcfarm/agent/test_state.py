"""The state directory: one agent at a time, records whole or absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rcfarm.agent.errors import StateError
from rcfarm.agent.state import TRASH, LaunchRecord, NodeRecord, PodRecord, StateDir, write_atomically
from store.schema.records import Exit

RECORD = PodRecord(
    manifest="m1",
    rc="rc-1",
    ports={"http": 8080},
    launchables={"main": LaunchRecord(pid=7, start_time=9, boot_id="b", restarts=2, last_exit=Exit(at="now", code=1))},
)


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    state = StateDir(tmp_path / "state")
    state.open()
    return state


def test_records_survive(state: StateDir) -> None:
    """The next agent reads the saved records."""
    state.save_pod("web", RECORD)
    state.save_node(NodeRecord(labels={"a": "b"}, session="s"))
    state.close()
    following = StateDir(state.root)
    following.open()
    assert following.load_pods() == {"web": RECORD}
    assert following.load_node() == NodeRecord(labels={"a": "b"}, session="s")


def test_two_agents_never_share_a_directory(state: StateDir) -> None:
    """The second agent's error names the directory in use; once the first has ended, it can open it."""
    with pytest.raises(StateError, match=f"agent.state_dir: {state.root} is in use by another agent"):
        StateDir(state.root).open()
    state.close()
    StateDir(state.root).open()


def test_an_unreadable_record_hides_no_other(state: StateDir) -> None:
    """A damaged record is left out, its neighbours are read."""
    state.save_pod("web", RECORD)
    for pod_id, content in (("bad", b"{"), ("other", b'{"manifest": 1}')):
        (state.pods / pod_id).mkdir()
        (state.pods / pod_id / "pod.json").write_bytes(content)
    assert state.load_pods() == {"web": RECORD}


def test_a_removed_pod_leaves_its_logs(state: StateDir) -> None:
    """Removing a pod removes its record and directories, not what it logged; doing it twice is no error."""
    state.save_pod("web", RECORD)
    paths = state.paths("web", "main")
    for path in (paths.directory / "data", paths.log):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    state.remove_pod("web")
    state.remove_pod("web")
    assert not (state.pods / "web").exists()
    assert paths.log.exists()


def test_a_failed_write_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record is replaced whole or stays as it was, and no half file is left."""
    path = tmp_path / "record"
    path.write_bytes(b"old")

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rcfarm.agent.state.os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["record"]


def test_a_directory_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    """The setting and the path are in the message."""
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match=r"agent.state_dir: .*/file"):
        StateDir(tmp_path / "file" / "state").open()


def test_others_can_not_look_around(state: StateDir) -> None:
    """Pods of other users can reach their own paths; only the agent's user can list anything, also in a directory that
    an earlier agent made readable for all."""
    state.close()
    for directory in (state.artifacts, state.manifests, state.pods, state.logs):
        directory.chmod(0o755)
    StateDir(state.root).open()
    passable = 0o711 if os.geteuid() == 0 else 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in state.root.iterdir() if path.is_dir()} == {
        "artifacts": passable,
        "pods": passable,
        "manifests": 0o700,
        "logs": 0o700,
    }


def test_what_a_killed_agent_had_begun_to_remove_goes(state: StateDir) -> None:
    """Directories of pods without a record, which nothing runs in, are removed by the next agent."""
    state.save_pod("web", RECORD)
    (state.pods / "half" / "main").mkdir(parents=True)
    state.discard_remains()
    assert sorted(path.name for path in state.pods.iterdir()) == [TRASH, "web"]
    assert state.trash.empty()
    assert list((state.pods / TRASH).iterdir()) == []
