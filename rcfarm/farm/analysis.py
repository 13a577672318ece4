"""Runs the analyses of rollouts: GETs of HTTP servers, queries to Prometheus, and commands.

The model: one task per analysis of an RC whose rollout asks for it, from `follow` until `drop`, or until `run` ends. It
runs the analysis, notes what came of it, and sleeps for the interval: no analysis runs twice at once. A result that may
change something has the RC reconciled at once (`wake`); one that only repeats the last, every `SHOW_EVERY`. At most
`AT_ONCE` runs of all RCs go on at a time; the others wait for their turn. The step of the rollout, which is pure, reads
the results and decides; nothing here stops or promotes anything.

RC files are written by tenants; for requests, see `rcfarm.farm.analysis_http`. A command is one of those in the farm's
settings; it runs without a shell, without the farm's environment and in a process group of its own, which is killed
when the command has ended, at the time limit, and when the RC is released. Its output is discarded.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from rcfarm.config.settings import FarmSettings
from rcfarm.operations.analysis import (
    INTERVAL,
    MOST,
    TIMEOUT,
    Measured,
    counted,
    is_news,
    of_exit,
    renewed,
)
from rcfarm.telemetry.prometheus import FarmMetrics
from store.schema.records import Analysis, AnalysisResult, Rollout, utc_now

if TYPE_CHECKING:
    from rcfarm.farm.analysis_http import AnalysisHttp

AT_ONCE = 50  # runs of one farm
SHORTEST = INTERVAL[0]  # seconds, also for an RC that was written past the checks of `apply`
SHOW_EVERY = 30.0  # seconds
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Stage(NamedTuple):
    """The state of a rollout, in which each analysis must succeed. Results are of one rollout until it is resumed."""

    revision: int
    request: str
    state: str
    since: str

    @classmethod
    def of(cls, rollout: Rollout) -> Stage:
        return cls(rollout.revision, rollout.request, rollout.state, rollout.since)


class Results:
    """The results for one RC's rollout, of its state and those before. No clock, no I/O."""

    def __init__(self) -> None:
        self.rollout: Rollout | None = None
        self._known: dict[str, AnalysisResult] = {}

    @property
    def stage(self) -> Stage | None:
        return Stage.of(self.rollout) if self.rollout else None

    def enter(self, rollout: Rollout) -> bool:
        """Continue for the rollout as it is recorded. Return False if it is the same as before, else begin with the
        results that its record has."""
        before, self.rollout = self.stage, rollout
        if not _is_same(before, self.stage):
            self._known = {each.name: each for each in rollout.analysis}
            return True
        if before != self.stage:
            recorded = {each.name: each for each in rollout.analysis}
            self._known = recorded | {each.name: each for each in renewed(self._known.values())}
        return False

    def note(self, name: str, measured: Measured, at: str, stage: Stage | None) -> bool:
        """Count a run that began in `stage`, unless that was another rollout. Return whether it may change anything."""
        if not _is_same(self.stage, stage):
            return False
        before = self._known.get(name)
        self._known[name] = counted(before, name, measured, at, counts=self.stage == stage)
        return is_news(before, self._known[name])

    def of(self, rollout: Rollout | None) -> dict[str, AnalysisResult]:
        """Return the results for the rollout as it is recorded, by analysis; none if they are about another one."""
        stage = Stage.of(rollout) if rollout else None
        if not _is_same(self.stage, stage):
            return {}
        results = list(self._known.values())
        return {each.name: each for each in (results if self.stage == stage else renewed(results))}


def _is_same(one: Stage | None, other: Stage | None) -> bool:
    """Return whether both are stages of one rollout, which was not resumed in between."""
    return one is not None and other is not None and one[:2] == other[:2]


class _Followed:
    """One RC: its results, and what runs."""

    def __init__(self) -> None:
        self.results = Results()
        self.running: dict[str, tuple[Analysis, asyncio.Task[None]]] = {}

    def stop(self) -> None:
        for _, task in self.running.values():
            task.cancel()
        self.running.clear()


class Analyses:
    """The analyses of the RCs that a farm owns. Use every method from the event loop of `run`.

    `wake(rc_id)` has an RC reconciled, as it has a new result.
    """

    def __init__(self, settings: FarmSettings, wake: Callable[[str], None], metrics: FarmMetrics, log: Any) -> None:
        self._settings, self._wake, self._metrics, self._log = settings, wake, metrics, log
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._followed: dict[str, _Followed] = {}
        self._group: asyncio.TaskGroup | None = None
        self._resources = AsyncExitStack()  # of `run`
        self._http: AnalysisHttp | None = None

    async def run(self) -> None:
        """Run what is followed until cancelled; then no request and no process is left."""
        async with AsyncExitStack() as self._resources:
            try:
                async with asyncio.TaskGroup() as self._group:
                    await asyncio.Event().wait()
            finally:
                self._group = None
                self._followed.clear()

    def follow(self, rc_id: str, rollout: Rollout, analyses: Sequence[Analysis]) -> None:
        """Run exactly these analyses of an RC from now on. `rollout`: its record as it is in the store."""
        if not analyses or self._group is None:
            self.drop(rc_id)
            return
        followed = self._followed.setdefault(rc_id, _Followed())
        if followed.results.enter(rollout):
            followed.stop()  # so that each runs at once
        wanted = {analysis.name: analysis for analysis in analyses[:MOST]}
        for name in [name for name, (analysis, _) in followed.running.items() if wanted.get(name) != analysis]:
            followed.running.pop(name)[1].cancel()
        for name in wanted.keys() - followed.running.keys():
            task = self._group.create_task(self._repeat(rc_id, followed, wanted[name]))
            followed.running[name] = wanted[name], task

    def drop(self, rc_id: str) -> None:
        """Run nothing of this RC any more."""
        if (followed := self._followed.pop(rc_id, None)) is not None:
            followed.stop()

    def results(self, rc_id: str, rollout: Rollout | None) -> Mapping[str, AnalysisResult]:
        """Return the results for the rollout as it is recorded, by analysis; none if they are about another one."""
        followed = self._followed.get(rc_id)
        return followed.results.of(rollout) if followed else {}

    async def _repeat(self, rc_id: str, followed: _Followed, analysis: Analysis) -> None:
        shown, clock = 0.0, asyncio.get_running_loop().time
        while True:
            async with self._slots:
                stage, rollout = followed.results.stage, followed.results.rollout
                assert rollout is not None, "it has one before its tasks begin"
                measured = await self._measured(rc_id, analysis, rollout)
            self._metrics.analysed(measured.outcome)
            if followed.results.note(analysis.name, measured, utc_now(), stage) or clock() - shown >= SHOW_EVERY:
                shown = clock()
                self._wake(rc_id)
            await asyncio.sleep(max(SHORTEST, analysis.interval))

    async def _measured(self, rc_id: str, analysis: Analysis, rollout: Rollout) -> Measured:
        """Run an analysis once. An error of any kind is an outcome, and no other exception leaves this method."""
        try:
            async with asyncio.timeout(min(analysis.timeout, TIMEOUT[1])):
                if analysis.command:
                    return await self._execute(rc_id, analysis, rollout)
                return await self._get(analysis)
        except TimeoutError:
            return Measured("error", f"no answer within {analysis.timeout:g} s")
        except OSError as error:
            return Measured("error", error.strerror or "an error of the system")
        except Exception:
            self._log.exception("Analysis could not be run", rc=rc_id, analysis=analysis.name)
            return Measured("error", "an unexpected error; the farm's log has it")

    async def _get(self, analysis: Analysis) -> Measured:
        if self._http is None:
            from rcfarm.farm.analysis_http import AnalysisHttp  # aiohttp takes 0.1 s, and few farms have such analyses

            self._http = await self._resources.enter_async_context(AnalysisHttp(self._settings.analysis_hosts, AT_ONCE))
        return await self._http.measure(analysis)

    async def _execute(self, rc_id: str, analysis: Analysis, rollout: Rollout) -> Measured:
        argv = self._settings.analysis_commands.get(analysis.command)
        if argv is None:
            return Measured("error", f"farm.analysis_commands has no {analysis.command}")
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            env={
                "PATH": SEARCH_PATH,
                "RCFARM_RC": rc_id,
                "RCFARM_MANIFEST": rollout.manifest,
                "RCFARM_REVISION": str(rollout.revision),
                "RCFARM_ANALYSIS": analysis.name,
            },
        )
        try:
            return of_exit(await process.wait())
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # also what it started, and left behind
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
