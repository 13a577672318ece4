"""The state directory: one agent at a time, records whole or absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from rcfarm.agent.errors import StateError
from rcfarm.agent.state import LaunchRecord, NodeRecord, PodRecord, StateDir, write_atomically
from store.records import Exit

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
    """What was saved is what the next agent reads."""
    state.save_pod("web", RECORD)
    state.save_node(NodeRecord(labels={"a": "b"}, session="s"))
    state.close()
    following = StateDir(state.root)
    following.open()
    assert following.load_pods() == {"web": RECORD}
    assert following.load_node() == NodeRecord(labels={"a": "b"}, session="s")


def test_two_agents_never_share_a_directory(state: StateDir) -> None:
    """The second agent is told which directory is in use; once the first is gone it may have it."""
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
    assert not state.pod_dir("web").exists()
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
