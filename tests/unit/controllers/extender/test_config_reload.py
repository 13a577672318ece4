"""A changed configuration file: what is applied, what is refused, and what is logged."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from controllers.extender.config_reload import ConfigChange, ConfigSource, ConfigWatcher, LoadedConfig, ReloadResult
from scheduler.hived.errors import InvalidConfig, PlatformError
from tests.support.waiting import until

APPLIED, UNCHANGED, INVALID, FAILED = ReloadResult

CONFIG = """\
physicalCluster:
  cellTypes:
    HOST: {childCellType: GPU, childCellNumber: 4, isNodeLevel: true}
    RACK: {childCellType: HOST, childCellNumber: 2}
  physicalCells:
  - {cellType: RACK, cellChildren: [{cellAddress: a0}, {cellAddress: a1, pinnedCellId: vision-a1}]}
  - {cellType: RACK, cellChildren: [{cellAddress: a2}, {cellAddress: a3}]}
virtualClusters:
  vision: {virtualCells: [{cellType: RACK.HOST, cellNumber: 1}], pinnedCells: [{pinnedCellId: vision-a1}]}
  nlp: {virtualCells: [{cellType: RACK.HOST, cellNumber: 1}]}
"""
MORE_FOR_NLP = CONFIG.replace(
    "nlp: {virtualCells: [{cellType: RACK.HOST, cellNumber: 1}]}",
    ("nlp: {virtualCells: [{cellType: RACK.HOST, cellNumber: 2}]}"),
)


class Watched:
    """A file, its watcher, and the configurations passed to the scheduler."""

    def __init__(self, path: Path) -> None:
        path.write_text(CONFIG)
        self.path = path
        source = ConfigSource(path, environ={}, home=path.parent)
        self.taken: list[tuple[LoadedConfig, ConfigChange]] = []
        self.results: list[ReloadResult] = []
        self.error: Exception | None = None
        self.watcher = ConfigWatcher(source, source.load(), self._take_over, interval=0.001, report=self.results.append)

    async def _take_over(self, loaded: LoadedConfig, change: ConfigChange) -> None:
        if self.error:
            raise self.error
        self.taken.append((loaded, change))

    async def looks(self, times: int = 2) -> list[ReloadResult]:
        """Read the file that often. Return the results."""
        before = len(self.results)
        for _ in range(times):
            await self.watcher.look()
        return self.results[before:]

    async def writes(self, text: str) -> list[ReloadResult]:
        self.path.write_text(text)
        return await self.looks()

    async def needs_restart(self, text: str) -> tuple[str, ...]:
        """Write the file. Return its settings that need a restart."""
        await self.writes(text)
        return self.watcher.needs_restart

    async def changes(self, old: str, new: str) -> ConfigChange:
        """Replace `old` by `new` in the file. Return the change."""
        assert await self.writes(CONFIG.replace(old, new)) == [APPLIED], self.watcher.problem
        return self.taken[-1][1] if self.taken else ConfigChange((), (), ())


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "hived.yaml")


async def test_a_change_is_applied_once(watched: Watched) -> None:
    """It comes with the new topology and a description of the differences."""
    assert await watched.looks(3) == []
    assert await watched.writes(MORE_FOR_NLP) == [APPLIED]
    assert await watched.looks(3) == []
    [(loaded, change)] = watched.taken
    assert loaded is watched.watcher.in_use
    assert len(loaded.topology.virtual_clusters["nlp"]) == 2
    assert change == ConfigChange(("virtual cluster nlp: RACK.HOST 1 -> 2",), (), ())


async def test_an_equivalent_file_changes_nothing(watched: Watched) -> None:
    """Comments, quotes, order of keys, an explicit default: the scheduler is not called."""
    text = "# a comment\nforcePodBindThreshold: 3\n" + CONFIG.replace("cellAddress: a0", "cellAddress: 'a0'")
    assert await watched.writes(text) == [UNCHANGED]
    assert watched.taken == []


@pytest.mark.parametrize("text", ["", "physicalCluster:", "{", CONFIG.replace("cellNumber: 1", "cellNumber: 9")])
async def test_an_invalid_file_leaves_the_old_one_in_use(watched: Watched, text: str) -> None:
    """It is logged once per content, nothing stops, and the problem ends when the file is valid again."""
    with capture_logs() as logs:
        assert await watched.writes(text) == [INVALID]
        assert await watched.looks(3) == []
    assert [entry["log_level"] for entry in logs] == ["error"]
    assert watched.watcher.problem == logs[0]["error"] != ""
    assert watched.taken == []
    assert await watched.writes(CONFIG) == [UNCHANGED]
    assert watched.watcher.problem == ""


async def test_several_mistakes_are_reported_in_one_line(watched: Watched) -> None:
    """Each line of the readiness report is a condition of its own."""
    assert await watched.writes(CONFIG.replace("a2", "a0").replace("cellNumber: 1", "cellNumber: 9")) == [INVALID]
    assert "; virtualClusters.vision." in watched.watcher.problem
    assert "\n" not in watched.watcher.problem


async def test_a_file_that_is_being_written_is_waited_for(watched: Watched) -> None:
    """A file truncated and written in pieces, at any speed, is used once it no longer changes."""
    for end in range(0, len(MORE_FOR_NLP), 97):
        watched.path.write_text(MORE_FOR_NLP[:end])
        assert await watched.looks(1) == []
    assert await watched.writes(MORE_FOR_NLP) == [APPLIED]


async def test_a_file_that_vanishes_is_reported(watched: Watched) -> None:
    """The configuration in use stays."""
    watched.path.unlink()
    assert await watched.looks() == [INVALID]
    assert watched.watcher.problem == "can't be read: No such file or directory"
    assert await watched.writes(MORE_FOR_NLP) == [APPLIED]


async def test_bytes_that_are_no_text_are_reported(watched: Watched) -> None:
    """As any other invalid file: it is not used, and the problem says why."""
    watched.path.write_bytes(b"\xff\xfe")
    assert await watched.looks() == [INVALID]
    assert "is not UTF-8" in watched.watcher.problem


async def test_a_file_that_is_replaced_atomically(watched: Watched) -> None:
    """A new file under the old name, with the same size and modification time."""
    new = watched.path.with_name("new")
    new.write_text(CONFIG.replace("cellAddress: a0", "cellAddress: b0"))
    stat = watched.path.stat()
    os.utime(new, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    new.rename(watched.path)
    assert await watched.looks() == [APPLIED]


async def test_a_config_map_mount(tmp_path: Path) -> None:
    """kubelet swaps the link of a directory, two links away from the file."""
    for number, text in enumerate((CONFIG, MORE_FOR_NLP)):
        (tmp_path / f"..{number}").mkdir()
        (tmp_path / f"..{number}" / "hived.yaml").write_text(text)
    (tmp_path / "..data").symlink_to("..0")
    (tmp_path / "link.yaml").symlink_to("..data/hived.yaml")
    watched = Watched(tmp_path / "link.yaml")
    (tmp_path / "..data_tmp").symlink_to("..1")
    (tmp_path / "..data_tmp").rename(tmp_path / "..data")
    assert await watched.looks() == [APPLIED]


async def test_a_failure_to_apply_is_reported(watched: Watched) -> None:
    """The scheduler refused: the old configuration stays in use, and the next content is compared with it."""
    watched.error = PlatformError("the cells can't be built")
    assert await watched.writes(MORE_FOR_NLP) == [FAILED]
    assert watched.watcher.problem == "the cells can't be built"
    watched.error = None
    assert await watched.writes(MORE_FOR_NLP + "# again\n") == [APPLIED]
    assert watched.watcher.problem == ""


async def test_settings_need_no_new_cells(watched: Watched) -> None:
    """They apply at once."""
    change = await watched.changes("physicalCluster:", "forcePodBindThreshold: 5\nphysicalCluster:")
    assert change == ConfigChange((), ("forcePodBindThreshold: 3 -> 5",), ())


async def test_addresses_need_a_restart(watched: Watched) -> None:
    """It is logged, and stays reported while the file has another address than at start-up."""
    with capture_logs() as logs:
        await watched.changes("physicalCluster:", 'webServerAddress: ":9097"\nphysicalCluster:')
    assert watched.taken == []
    assert [entry["settings"] for entry in logs] == [("webServerAddress: :9096 -> :9097",)]
    assert watched.watcher.needs_restart == ("webServerAddress: :9096 -> :9097",)
    both = MORE_FOR_NLP + 'webServerAddress: ":9097"\n'
    assert await watched.needs_restart(both) == ("webServerAddress: :9096 -> :9097",)
    with capture_logs() as logs:
        assert await watched.needs_restart(CONFIG) == ()
    assert [entry["event"].partition(":")[0] for entry in logs if "estart" in entry["event"]] == [
        "Restart no longer required"
    ]


async def test_the_end_of_a_problem_is_logged(watched: Watched) -> None:
    """Also if the file has the configuration in use again."""
    await watched.writes("physicalCluster: 7")
    with capture_logs() as logs:
        await watched.writes(CONFIG)
    assert [entry["event"] for entry in logs] == ["Configuration file is valid again"]


@pytest.mark.parametrize(
    ("old", "new", "differences"),
    [
        ("{cellAddress: a2}", "{cellAddress: b2}", ["chain RACK: without 1 node (a2); with 1 node (b2) more"]),
        (
            "  - {cellType: RACK, cellChildren: [{cellAddress: a2}, {cellAddress: a3}]}",
            "  - {cellType: RACK, cellChildren: [{cellAddress: a2}, {cellAddress: a3}]}\n"
            "  - {cellType: HOST, cellAddress: h0}",
            ["chain HOST: new, with 1 node (h0)"],
        ),
        (
            "childCellNumber: 4",
            "childCellNumber: 8",
            ["chain RACK: cell types RACK > 2x HOST > 4x GPU -> RACK > 2x HOST > 8x GPU"],
        ),
        (
            "{cellAddress: a2}, {cellAddress: a3}",
            "{cellAddress: a3}, {cellAddress: a2}",
            ["chain RACK: cells are rearranged"],
        ),
        ("nlp:", "speech:", ["virtual cluster nlp: gone", "virtual cluster speech: new"]),
        (
            "vision-a1",
            "vision-1",
            [
                "chain RACK: pinned cells vision-a1 -> vision-1",
                "virtual cluster vision: pinned cell vision-a1 1 -> 0",
                "virtual cluster vision: pinned cell vision-1 0 -> 1",
            ],
        ),
    ],
)
async def test_differences_are_described(watched: Watched, old: str, new: str, differences: list[str]) -> None:
    """By chain and virtual cluster, in the terms of the file."""
    assert list((await watched.changes(old, new)).cells) == differences


async def test_it_is_watched_until_cancelled(watched: Watched) -> None:
    """`run` reads the file repeatedly."""
    task = asyncio.create_task(watched.watcher.run())
    watched.path.write_text(MORE_FOR_NLP)
    await until(lambda: watched.taken)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_an_unreadable_file_at_the_start_is_a_configuration_error(tmp_path: Path) -> None:
    """There is no earlier configuration to keep."""
    with pytest.raises(InvalidConfig, match="can't be read: No such file or directory"):
        ConfigSource(tmp_path / "none.yaml", environ={}, home=tmp_path).load()
