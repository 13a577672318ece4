"""The configuration file of a scheduler that runs: who changes it gets the new cells without a restart.

The model: the file is read every `interval` seconds and told apart by its content alone, so it does not matter whether
an editor writes it in place, a tool renames a new one over it, or a ConfigMap mount swaps its links. A content counts
once two looks in a row have found it, so that one that is still being written is not taken for its beginning.

A content that counts is decided about once. One that says the same as the configuration in use changes nothing. One
that can't be used leaves the earlier configuration in use and is told of in `problem`. Reading, parsing and resolving
happen in a thread, for a large file takes seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import structlog

from scheduler.hived.config import HivedConfig
from scheduler.hived.config_diff import ConfigChange, config_change, needs_restart
from scheduler.hived.config_file import read_config
from scheduler.hived.errors import ConfigError, InvalidConfig
from scheduler.hived.resolving import resolve
from scheduler.hived.topology import Topology

log = structlog.get_logger(__name__)

INTERVAL = 2.0  # seconds between two looks at the file


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration that can be used. `content`: the file's bytes."""

    content: bytes
    config: HivedConfig
    topology: Topology


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """Where the file is, and what its defaults depend on."""

    path: Path
    environ: Mapping[str, str]
    home: Path

    def load(self) -> LoadedConfig:
        """Read it now. Raises `InvalidConfig`, also for a file that can't be read."""
        try:
            return self.parse(self.path.read_bytes())
        except OSError as error:
            raise InvalidConfig([ConfigError("", _unreadable(error))]) from error

    def parse(self, content: bytes) -> LoadedConfig:
        """Raises `InvalidConfig`."""
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise InvalidConfig([ConfigError("", f"is not UTF-8: {error}")]) from error
        config = read_config(text, environ=self.environ, home=self.home)
        return LoadedConfig(content, config, resolve(config))

    def content(self) -> bytes | str:
        """What is in the file, or why it can't be read."""
        try:
            return self.path.read_bytes()
        except OSError as error:
            return _unreadable(error)


def _unreadable(error: OSError) -> str:
    return f"can't be read: {error.strerror or error}"


class ReloadResult(StrEnum):
    """What became of a content that was new."""

    APPLIED = "applied"
    UNCHANGED = "unchanged"
    INVALID = "invalid"
    FAILED = "failed"


TakeOver = Callable[[LoadedConfig, ConfigChange], Awaitable[None]]


def _ignored(result: ReloadResult) -> None:
    """For those who don't count."""


class ConfigWatcher:
    """Keeps to what the file says. `take_over` gets each configuration that differs from the one in use.

    `problem`: why the file's content is not in use, "" if it is. `needs_restart`: what of it only a restart brings.
    `told`: hears of each result.
    """

    def __init__(
        self,
        source: ConfigSource,
        in_use: LoadedConfig,
        take_over: TakeOver,
        *,
        interval: float = INTERVAL,
        told: Callable[[ReloadResult], None] = _ignored,
    ) -> None:
        self._source, self._take_over, self._told, self._interval = source, take_over, told, interval
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
        """Look once."""
        content = await asyncio.to_thread(self._source.content)
        if content == self._seen and content != self._decided:
            self._decided = content
            self._told(await self._decide(content))
        self._seen = content

    async def _decide(self, content: bytes | str) -> ReloadResult:
        if isinstance(content, str):
            return self._refuse(ReloadResult.INVALID, content)
        try:
            loaded = await asyncio.to_thread(self._source.parse, content)
        except InvalidConfig as error:
            return self._refuse(ReloadResult.INVALID, str(error))
        change = await asyncio.to_thread(_change, self._in_use, loaded)
        if change.cells or change.settings:
            try:
                await self._take_over(loaded, change)
            except Exception as error:  # whatever it is, the scheduler goes on with what it has
                log.exception("The new configuration can't take over", file=str(self._source.path))
                return self._refuse(ReloadResult.FAILED, str(error) or type(error).__name__)
        healed, self.problem = bool(self.problem), ""
        self._in_use = loaded
        self.needs_restart = needs_restart(self._started_with, loaded.config)
        self._tell(change, healed=healed)
        return ReloadResult.APPLIED if change else ReloadResult.UNCHANGED

    def _refuse(self, result: ReloadResult, reason: str) -> ReloadResult:
        self.problem = "; ".join(reason.splitlines())  # readiness and Events have a line for it
        log.error(
            "The configuration file is not used; the earlier one stays", file=str(self._source.path), error=self.problem
        )
        return result

    def _tell(self, change: ConfigChange, *, healed: bool) -> None:
        file = str(self._source.path)
        if healed:
            log.info("The configuration file can be used again", file=file)
        if change.cells or change.settings:
            log.info("The configuration has changed", file=file, cells=change.cells, settings=change.settings)
        if self.needs_restart and change.restart:
            log.warning("Restart to use these settings", file=file, settings=self.needs_restart)
        elif change.restart:
            log.info("No restart is needed any more: the file has the settings that are in use", file=file)


def _change(old: LoadedConfig, new: LoadedConfig) -> ConfigChange:
    return config_change(old.config, old.topology, new.config, new.topology)
