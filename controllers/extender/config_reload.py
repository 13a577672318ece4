"""Reloading the configuration file of a running scheduler, which gets new cells without a restart.

The model: the file is read every `interval` seconds and compared by content alone, so it does not matter whether an
editor writes it in place, a tool renames a new one over it, or a ConfigMap mount swaps its links. A content counts once
two consecutive reads have found it, so that a partly written file is not used.

A content that counts is decided about once. If it means the same as the configuration in use, nothing changes. If it is
invalid, the earlier configuration stays in use and `problem` says why. Reading, parsing and resolving happen in a
thread, because a large file takes seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import structlog

from scheduler.hived.cells.topology import Topology
from scheduler.hived.config.diff import ConfigChange, config_change, needs_restart
from scheduler.hived.config.reader import read_config
from scheduler.hived.config.resolve import resolve
from scheduler.hived.config.types import HivedConfig
from scheduler.hived.errors import ConfigError, InvalidConfig

log = structlog.get_logger(__name__)

INTERVAL = 2.0  # seconds between two reads of the file


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

    `problem`: why the file's content is not in use, "" if it is. `needs_restart`: its settings that need a restart.
    `report`: called with each result.
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
        self._source, self._take_over, self._report_result, self._interval = source, take_over, report, interval
        self._in_use, self._started_with = in_use, in_use.config
        self._seen: bytes | str = in_use.content
        self._decided: bytes | str = in_use.content
        self.problem = ""
        self.needs_restart: tuple[str, ...] = ()

    @property
    def in_use(self) -> LoadedConfig:
        return self._in_use

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
            self._report_result(await self._decide(content))
        self._seen = content

    async def _decide(self, content: bytes | str) -> ReloadResult:
        if isinstance(content, str):
            return self._refuse(ReloadResult.INVALID, content)
        try:
            loaded = await asyncio.to_thread(self._source.parse, content)
        except InvalidConfig as error:
            return self._refuse(ReloadResult.INVALID, str(error))
        old = self._in_use
        change = await asyncio.to_thread(config_change, old.config, old.topology, loaded.config, loaded.topology)
        if change.cells or change.settings:
            try:
                await self._take_over(loaded, change)
            except Exception as error:  # whatever it is, the scheduler continues with the configuration in use
                log.exception("Could not apply the new configuration", file=str(self._source.path))
                return self._refuse(ReloadResult.FAILED, str(error) or type(error).__name__)
        healed, self.problem = bool(self.problem), ""
        self._in_use = loaded
        self.needs_restart = needs_restart(self._started_with, loaded.config)
        self._report(change, healed=healed)
        return ReloadResult.APPLIED if change else ReloadResult.UNCHANGED

    def _refuse(self, result: ReloadResult, reason: str) -> ReloadResult:
        self.problem = "; ".join(reason.splitlines())  # readiness and Events show one line
        log.error("Invalid configuration; keeping the previous one", file=str(self._source.path), error=self.problem)
        return result

    def _report(self, change: ConfigChange, *, healed: bool) -> None:
        file = str(self._source.path)
        if healed:
            log.info("Configuration file is valid again", file=file)
        if change.cells or change.settings:
            log.info("Configuration changed", file=file, cells=change.cells, settings=change.settings)
        if self.needs_restart and change.restart:
            log.warning("Restart required to apply settings", file=file, settings=self.needs_restart)
        elif change.restart:
            log.info("Restart no longer required: the file has the settings in use", file=file)
