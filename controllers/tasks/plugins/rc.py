"""`rc`: a deploy step. It gives an RC the desired state of its entry, and ends when a farm reports it converged.

The entry is written once, as `rcfarm rc apply` does, with an audit event; from then on the farm works and the plugin
only looks. It looks again when anything in the RC's folder changes: a watch of that folder, which ends with the first
change, or after `LOOK_AGAIN` seconds. If another client changes what the entry asks for, the step has failed: neither
undoes the other's change.

`verdict` is the pure decision. How an entry is checked and written belongs to the layer above, see `Deployer`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from controllers.tasks.api.errors import BadConfig
from controllers.tasks.api.phase import (
    ExternalResource,
    Phase,
    PhaseInfo,
    TaskInfo,
    Transition,
    do_transition,
    phase_info_failure,
    phase_info_retryable_failure,
    phase_info_running,
    phase_info_success,
)
from controllers.tasks.api.plugin import PluginEntry, PluginProperties, SetupContext, SignalAsync, TaskExecutionContext
from controllers.tasks.plugins.fence import attempt_of, fence_of
from controllers.tasks.template import Parameters, render
from store.kv.protocol import Op, Store, StoreError
from store.schema.keys import Keys
from store.schema.records import RCSpec, RCStatus, decode

PLUGIN_ID = "rc"
LOOK_AGAIN = 60.0  # seconds between looks at an RC in which nothing changes
TROUBLE = frozenset(
    {"crashing", "blocked", "disk_full", "unhealthy", "failed"}
)  # reasons of a farm that fail the step if they last


class DeployConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The task's own part. `rc`: an entry of an RC file; its texts are templates.

    `patience`: seconds for which pods may crash, fail or be unhealthy before the step fails. `on_abort`: what an abort,
    a deadline or a retry does to the RC: leave it as it is, or disable it, so that no farm goes on changing its pods.
    """

    rc: dict[str, Any]
    patience: float = 60.0
    on_abort: Literal["leave", "disable"] = "leave"


class DeployState(msgspec.Struct, frozen=True):
    """What the plugin keeps between rounds. `trouble_since`: since when a reason of `TROUBLE` is reported, in seconds
    since the epoch; None while there is none."""

    applied: bool = False
    trouble_since: float | None = None


class Deployer(Protocol):
    """Checks and writes entries of RC files. `entry`: one, decoded. All raise `BadConfig` for an entry that can't be
    applied."""

    def rc_id(self, entry: Mapping[str, Any]) -> str:
        """Return the id of the entry's RC."""

    def changed(self, entry: Mapping[str, Any], spec: RCSpec) -> RCSpec:
        """Return the spec with what the entry asks for; an equal one if it has that already."""

    async def apply(self, entry: Mapping[str, Any], *, by: str, fence: Op) -> None:
        """Write the entry, with an audit event of `by`, in one transaction with `fence`. Writes nothing if the RC has
        what the entry asks for. Raises `TaskError` if the RC can't be changed now, and the store's errors."""

    async def disable(self, rc_id: str, *, by: str) -> None:
        """Disable the RC, if it exists. Raises as `apply`."""


class Verdict(NamedTuple):
    """What a look at the RC says. `look_again`: in seconds, at the latest."""

    info: PhaseInfo
    state: DeployState
    look_again: float = LOOK_AGAIN


class DeployPlugin:
    """Runs `rc` tasks. Run `run()` as a task: it holds the watches. `clock`: seconds since the epoch."""

    def __init__(self, store: Store, keys: Keys, deployer: Deployer, *, clock: Callable[[], float] = time.time) -> None:
        self._store, self._keys, self._deployer, self._clock = store, keys, deployer, clock
        self._group: asyncio.TaskGroup | None = None
        self._watched: set[str] = set()  # executions with a watch

    async def run(self) -> None:
        """Hold the watches until cancelled."""
        async with asyncio.TaskGroup() as self._group:
            try:
                await asyncio.Future()
            finally:
                self._group = None

    def get_id(self) -> str:
        """Return the plugin's id."""
        return PLUGIN_ID

    def get_properties(self) -> PluginProperties:
        """Return that results are not cached: an RC that converged once may have changed."""
        return PluginProperties(disable_node_level_caching=True)

    async def handle(self, context: TaskExecutionContext) -> Transition:
        """Write the entry, or report how far the farm is. Raises `BadConfig`, `TaskError`."""
        config = (await context.task_reader.read()).config_as(DeployConfig)
        entry: dict[str, Any] = await _rendered(config.rc, Parameters.of(context))
        rc_id, attempt = self._deployer.rc_id(entry), attempt_of(context)
        state, _ = context.plugin_state_reader.get(DeployState)
        if not state.applied:
            await context.intent.declare(rc_id)
            fence = await fence_of(self._store, self._keys, attempt, rc_id)
            await self._deployer.apply(entry, by=f"task {attempt.execution}", fence=fence.op)
            state = DeployState(applied=True)
        folder = await self._store.list(self._keys.rc(rc_id), consistent=True)
        records = {found.key: found.value for found in folder.entries}
        spec, status = self._keys.spec(rc_id), self._keys.status(rc_id)
        found = verdict(
            decode(RCSpec, spec, records[spec]) if spec in records else None,
            decode(RCStatus, status, records[status]) if status in records else None,
            lambda spec: self._deployer.changed(entry, spec) == spec,
            state,
            config,
            self._clock(),
        )
        context.plugin_state_writer.put(1, found.state)
        is_over = found.info.phase.is_terminal()
        if self._group is not None and not is_over and attempt.execution not in self._watched:
            self._watched.add(attempt.execution)
            self._group.create_task(
                self._watch(attempt.execution, self._keys.rc(rc_id), folder.index, context.task_refresh_indicator)
            )
        return do_transition(found.info, poll_after=found.look_again)

    async def abort(self, context: TaskExecutionContext) -> None:
        """Leave the RC as it is, or disable it. Raises `TaskError`."""
        config = (await context.task_reader.read()).config_as(DeployConfig)
        if context.intent.key is not None and config.on_abort == "disable":
            await self._deployer.disable(context.intent.key, by=f"task {attempt_of(context).execution}")

    async def finalize(self, context: TaskExecutionContext) -> None:
        """Do nothing: a watch ends after `LOOK_AGAIN` seconds."""

    async def _watch(self, execution: str, prefix: str, index: int, signal: SignalAsync) -> None:
        """Signal the next change under `prefix` after `index`, once."""
        try:
            with suppress(StoreError):  # the plugin looks again anyway
                await self._store.watch(prefix, index, LOOK_AGAIN)
        finally:
            self._watched.discard(execution)
        signal()


def check_deploy(config: DeployConfig) -> None:
    """Check the fields beside the entry. Raises `BadConfig`."""
    if not 0 <= config.patience < float("inf"):
        raise BadConfig(f"config.patience: {config.patience:g} is not a number of seconds from 0 on")


def deploy_entry(plugin: DeployPlugin) -> PluginEntry:
    """Return the entry of the plugin. The caller runs it."""

    async def load(setup: SetupContext) -> DeployPlugin:
        return plugin

    return PluginEntry(PLUGIN_ID, (PLUGIN_ID,), load)


def verdict(
    spec: RCSpec | None,
    status: RCStatus | None,
    has_what_was_asked: Callable[[RCSpec], bool],
    state: DeployState,
    config: DeployConfig,
    now: float,
) -> Verdict:
    """Decide how far an applied entry is. `now`: seconds since the epoch."""
    if spec is None or spec.deleting:
        return Verdict(phase_info_failure("RCDeleted", "the RC was deleted by another client"), state)
    if not has_what_was_asked(spec):
        text = f"rc {spec.id} was changed by another client, at generation {spec.generation}"
        return Verdict(phase_info_failure("RCChanged", text), state)
    running = phase_info_running(0, _info(spec, status, Phase.RUNNING))
    untroubled = msgspec.structs.replace(state, trouble_since=None)
    if status is None or status.generation < spec.generation:
        return Verdict(running, untroubled)
    if status.state == "converged" or (status.state == "disabled" and spec.disabled):
        return Verdict(phase_info_success(_info(spec, status, Phase.SUCCESS)), state)
    reasons = "; ".join(reason.message for reason in status.reasons) or status.state
    failure = _info(spec, status, Phase.RETRYABLE_FAILURE)
    if status.state == "quarantined":
        return Verdict(phase_info_retryable_failure("RCQuarantined", f"rc {spec.id}: {reasons}", failure), state)
    if not any(reason.code in TROUBLE for reason in status.reasons):
        return Verdict(running, untroubled)
    since = now if state.trouble_since is None else state.trouble_since
    left = since + config.patience - now
    if left <= 0:
        text = f"rc {spec.id} has had trouble for {config.patience:g} s: {reasons}"
        return Verdict(phase_info_retryable_failure("RCUnhealthy", text, failure), state)
    return Verdict(running, msgspec.structs.replace(state, trouble_since=since), min(left, LOOK_AGAIN))


def _info(spec: RCSpec, status: RCStatus | None, phase: Phase) -> TaskInfo:
    details: dict[str, Any] = {"rc": spec.id, "generation": spec.generation}
    if status is not None:
        details |= {
            "state": status.state,
            "placed": status.placed,
            "healthy": status.healthy,
            "desired": status.desired,
        }
        details["reasons"] = [reason.message for reason in status.reasons]
    return TaskInfo(custom_info=details, external_resources=(ExternalResource(f"rc/{spec.id}", phase=phase),))


async def _rendered(value: Any, parameters: Parameters) -> Any:
    """Return an entry, or a part of one, with its texts rendered as templates. Raises `BadTemplate`."""
    if isinstance(value, str):
        return (await render([value], parameters))[0]
    if isinstance(value, dict):
        return {key: await _rendered(each, parameters) for key, each in value.items()}
    return [await _rendered(each, parameters) for each in value] if isinstance(value, list) else value
