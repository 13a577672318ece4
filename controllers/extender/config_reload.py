"""Reloading the configuration file of a running scheduler, which gets new cells without a restart.

The model: the file is read every `interval` seconds and compared by content alone, so it does not matter whether an
editor writes it in place, a tool renames a new one over it, or a ConfigMap mount swaps its links. A content counts once
two consecutive reads have found it, so that a partly written file is not used.

A content that counts is decided about once. If it means the same as the configuration in use, nothing changes. If it is
invalid, the earlier configuration stays in use and `problem` says why. Reading, parsing and resolving happen in a
thread, because a large file takes seconds. `config_change` puts the differences into words.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import structlog

from scheduler.hived.cells.topology import ChainTopology, PreassignedCell, Topology
from scheduler.hived.config.file import HivedConfig, read_config
from scheduler.hived.config.resolve import resolve
from scheduler.hived.errors import ConfigError, InvalidConfig

INTERVAL = 2.0  # seconds between two reads of the file
NAMES_SHOWN = 8

_AT_ONCE = {
    "force_pod_bind_threshold": "forcePodBindThreshold",
    "waiting_pod_scheduling_block_milli_sec": "waitingPodSchedulingBlockMilliSec",
}
_AT_START = {
    "kube_api_server_address": "kubeApiServerAddress",
    "kube_config_file_path": "kubeConfigFilePath",
    "web_server_address": "webServerAddress",
}


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """`cells`: changes for which cells are rebuilt. `settings`: applied at once. `restart`: applied after a restart."""

    cells: tuple[str, ...]
    settings: tuple[str, ...]
    restart: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.cells or self.settings or self.restart)


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A valid configuration. `content`: the file's bytes."""

    content: bytes
    config: HivedConfig
    topology: Topology


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """The path of the file, and what its defaults depend on."""

    path: Path
    environ: Mapping[str, str]
    home: Path

    def load(self) -> LoadedConfig:
        """Read the file. Raises `InvalidConfig`, also if it is unreadable."""
        try:
            return self.parse(self.path.read_bytes())
        except OSError as error:
            raise InvalidConfig([ConfigError("", _unreadable(error))]) from error

    def parse(self, content: bytes) -> LoadedConfig:
        """Parse a content. Raises `InvalidConfig`."""
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise InvalidConfig([ConfigError("", f"is not UTF-8: {error}")]) from error
        config = read_config(text, environ=self.environ, home=self.home)
        return LoadedConfig(content, config, resolve(config))

    def content(self) -> bytes | str:
        """Return the content of the file, or why it can't be read."""
        try:
            return self.path.read_bytes()
        except OSError as error:
            return _unreadable(error)


def _unreadable(error: OSError) -> str:
    return f"can't be read: {error.strerror or error}"


class ReloadResult(StrEnum):
    """The result for a new content."""

    APPLIED = "applied"
    UNCHANGED = "unchanged"
    INVALID = "invalid"
    FAILED = "failed"


TakeOver = Callable[[LoadedConfig, ConfigChange], Awaitable[None]]


class ConfigWatcher:
    """Applies changes of the file. `take_over` gets each configuration that differs from the one in use.

    `in_use`: the configuration in use. `problem`: why the file's content is not in use, "" if it is. `needs_restart`:
    its settings that need a restart. `report`: called with each result.
    """

    def __init__(
        self,
        source: ConfigSource,
        in_use: LoadedConfig,
        take_over: TakeOver,
        *,
        interval: float = INTERVAL,
        report: Callable[[ReloadResult], None] = lambda result: None,
    ) -> None:
        self._source, self._take_over, self._report, self._interval = source, take_over, report, interval
        self.in_use, self._started_with = in_use, in_use.config
        self._seen: bytes | str = in_use.content
        self._decided: bytes | str = in_use.content
        self.problem = ""
        self.needs_restart: tuple[str, ...] = ()

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(self._interval)
            await self.look()

    async def look(self) -> None:
        """Read the file once, and apply a new content that the previous read found, too."""
        content = await asyncio.to_thread(self._source.content)
        if content == self._seen and content != self._decided:
            self._decided = content
            self._report(await self._decide(content))
        self._seen = content

    async def _decide(self, content: bytes | str) -> ReloadResult:
        if isinstance(content, str):
            return self._refuse(ReloadResult.INVALID, content)
        try:
            loaded = await asyncio.to_thread(self._source.parse, content)
        except InvalidConfig as error:
            return self._refuse(ReloadResult.INVALID, str(error))
        old = self.in_use
        change = await asyncio.to_thread(config_change, old.config, old.topology, loaded.config, loaded.topology)
        if change.cells or change.settings:
            try:
                await self._take_over(loaded, change)
            except Exception as error:  # whatever it is, the scheduler continues with the configuration in use
                log.exception("Could not apply the new configuration", file=str(self._source.path))
                return self._refuse(ReloadResult.FAILED, str(error) or type(error).__name__)
        healed, self.problem = bool(self.problem), ""
        self.in_use = loaded
        self.needs_restart = needs_restart(self._started_with, loaded.config)
        file = str(self._source.path)
        if healed:
            log.info("Configuration file is valid again", file=file)
        if change.cells or change.settings:
            log.info("Configuration changed", file=file, cells=change.cells, settings=change.settings)
        if self.needs_restart and change.restart:
            log.warning("Restart required to apply settings", file=file, settings=self.needs_restart)
        elif change.restart:
            log.info("Restart no longer required: the file has the settings in use", file=file)
        return ReloadResult.APPLIED if change else ReloadResult.UNCHANGED

    def _refuse(self, result: ReloadResult, reason: str) -> ReloadResult:
        self.problem = "; ".join(reason.splitlines())  # readiness and Events show one line
        log.error("Invalid configuration; keeping the previous one", file=str(self._source.path), error=self.problem)
        return result


def config_change(old: HivedConfig, old_topology: Topology, new: HivedConfig, new_topology: Topology) -> ConfigChange:
    """Return the differences between two valid configurations; none if only formatting differs."""
    cells = [*_differences(old_topology, new_topology)]
    if not cells and old_topology != new_topology:
        cells = ["the order of chains, cells or virtual clusters"]
    return ConfigChange(tuple(cells), tuple(_fields(_AT_ONCE, old, new)), needs_restart(old, new))


def needs_restart(old: HivedConfig, new: HivedConfig) -> tuple[str, ...]:
    """Return the changed settings that a scheduler started with `old` can't apply without a restart."""
    return tuple(_fields(_AT_START, old, new))


def _fields(names: Mapping[str, str], old: HivedConfig, new: HivedConfig) -> Iterator[str]:
    for field, name in names.items():
        before, after = getattr(old, field), getattr(new, field)
        if before != after:
            yield f"{name}: {before} -> {after}"


def _differences(old: Topology, new: Topology) -> Iterator[str]:
    """Yield the differences of the chains, then those of the quotas."""
    for name in old.chains.keys() - new.chains.keys():
        yield f"chain {name}: gone, with {_names(old.chains[name].nodes, 'node')}"
    for name, chain in new.chains.items():
        if name not in old.chains:
            yield f"chain {name}: new, with {_names(chain.nodes, 'node')}"
        elif old.chains[name] != chain:
            before, changes = old.chains[name], []
            if gone := _missing(before.nodes, chain.nodes):
                changes.append(f"without {_names(gone, 'node')}")
            if added := _missing(chain.nodes, before.nodes):
                changes.append(f"with {_names(added, 'node')} more")
            shapes = (before.cell_types, before.fanouts, before.node_level)
            if shapes != (chain.cell_types, chain.fanouts, chain.node_level):
                changes.append(f"cell types {_shape(before)} -> {_shape(chain)}")
            if before.pinned.keys() != chain.pinned.keys():
                changes.append(f"pinned cells {_listed(sorted(before.pinned))} -> {_listed(sorted(chain.pinned))}")
            yield f"chain {name}: {'; '.join(changes) or 'cells are rearranged'}"
    for name in old.virtual_clusters.keys() - new.virtual_clusters.keys():
        yield f"virtual cluster {name}: gone"
    for name, cells in new.virtual_clusters.items():
        if name not in old.virtual_clusters:
            yield f"virtual cluster {name}: new"
            continue
        had, has = _quota(old, old.virtual_clusters[name]), _quota(new, cells)
        for kind in dict.fromkeys([*had, *has]):
            if had[kind] != has[kind]:
                yield f"virtual cluster {name}: {kind} {had[kind]} -> {has[kind]}"


def _shape(chain: ChainTopology) -> str:
    parts = [f"{fanout}x {below}" for below, fanout in zip(chain.cell_types, chain.fanouts[1:], strict=False)]
    return " > ".join([chain.name, *reversed(parts)])


def _missing(nodes: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return the nodes not in `others`, in the order of `nodes`."""
    present = set(others)
    return [node for node in dict.fromkeys(nodes) if node not in present]


def _quota(topology: Topology, cells: Sequence[PreassignedCell]) -> Counter[str]:
    """Count the quota's cells by kind."""
    return Counter(
        f"pinned cell {cell.pinned_cell_id}"
        if cell.pinned_cell_id
        else f"{cell.chain}.{topology.chains[cell.chain].cell_types[cell.level - 1]}"
        for cell in cells
    )


def _names(names: Sequence[str], kind: str) -> str:
    distinct = list(dict.fromkeys(names))
    return f"{len(distinct)} {kind}{'' if len(distinct) == 1 else 's'} ({_listed(distinct)})"


def _listed(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more or "none"


log = structlog.get_logger(__name__)
