"""The barrier: waits in each pod of a Framework until the whole gang has addresses, and passes them to the containers.

It runs as an init container of every task. If the gang is not complete in time, the barrier exits with a code upon
which the operator retries the Framework after a random delay. So gangs that block each other release their resources,
and no task of a gang that can't run holds a device. The barrier also holds each pod until the operator has recorded it,
so that no container's outcome is lost.

The model: one asyncio task follows the Framework and judges each state as it arrives. All of it, connecting included,
ends by the deadline, whatever the network does. An error only delays the next read; at the deadline the last state that
was read decides, not the last error. Source: frameworkcontroller's FrameworkBarrier.

The states come from a list and then a watch of that one name. `FrameworkSource.follow` is one attempt; it ends with an
error, or when the server ends the watch, and is then called again. The next attempt resumes the watch at the last
resource version, and lists again only when the server has forgotten that version. Thousands of barriers may follow one
Framework, so each requests the object as rarely as possible. Where lists and watches are forbidden but a GET is not,
states come from one GET per interval, with a jitter. Only a GET, which the server answers with quorum, is proof that
the Framework does not exist.

There is no configuration file. The environment variables are those of frameworkcontroller's barrier, so that its
manifests work unchanged; the pod's identity comes from the variables that the operator sets in every container.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import NamedTuple

from controllers.framework.api.types import (
    CONTAINER_PERMANENT_FAILED,
    CONTAINER_TRANSIENT_CONFLICT_FAILED,
    FRAMEWORK_ATTEMPT_INSTANCE_UID,
    FRAMEWORK_NAME,
    FRAMEWORK_NAMESPACE,
    FRAMEWORK_UID,
    FRAMEWORKS,
    TASK_ATTEMPT_INSTANCE_UID,
    TASK_INDEX,
    TASK_ROLE_NAME,
)
from controllers.framework.api.wire import BadFramework
from controllers.framework.barrier.gang import (
    AttemptInstance,
    BadView,
    Identity,
    Look,
    decompressed,
    look_at,
    render,
    view_of,
    write_files,
)
from store.errors import RcfarmError
from store.kube.api.errors import Expired, Forbidden, KubeError, NoConfig, NotFound, Unauthorized
from store.kube.api.objects import Object, resource_version_of
from store.kube.api.protocol import KubeApi
from store.kube.client.client import KubeClient
from store.kube.client.transport import Limits
from store.timing import Backoff

COMPONENT_NAME = "frameworkbarrier"
ENV_NAME_BARRIER_CHECK_INTERVAL_SEC = "BARRIER_CHECK_INTERVAL_SEC"
ENV_NAME_BARRIER_CHECK_TIMEOUT_SEC = "BARRIER_CHECK_TIMEOUT_SEC"
ENV_NAME_KUBE_API_SERVER_ADDRESS = "KUBE_APISERVER_ADDRESS"
ENV_NAME_KUBE_CONFIG = "KUBECONFIG"

DEFAULT_INTERVAL_SEC = 10
MIN_INTERVAL_SEC = 5
DEFAULT_TIMEOUT_SEC = 600
MIN_TIMEOUT_SEC, MAX_TIMEOUT_SEC = 60, 1200

_INTEGER = re.compile(r"[+-]?[0-9]{1,19}", re.ASCII)

REFUSAL_GRACE = 30.0  # seconds after which a 401 or 403 is final: before, the RBAC rule may not be effective yet
LAST_LOOK = 2.0  # seconds before the deadline at which the watch is given up for a last GET
FIRST_PAUSE = 0.5  # seconds; doubles with each error, up to the interval
LIMITS = Limits(call_timeout=15.0, stream_silence=90.0)
NAMED = 5  # at most this many missing tasks are named in a line

MIN_WATCH, MAX_WATCH = 300.0, 600.0  # seconds of a watch, at random, so that reconnects are spread

Show = Callable[[Object], bool]


class BadConfig(RcfarmError, ValueError):
    """An environment variable is invalid; the message names the variable and a valid value."""


@dataclass(frozen=True, slots=True)
class Config:
    """`kube_api_server_address` replaces the server of the kubeconfig; with neither, the pod's service account is used.

    `barrier_check_interval_sec`: seconds between two reads where a watch is not allowed, and the longest pause after an
    error. `barrier_check_timeout_sec`: seconds until the barrier gives up.
    """

    framework_namespace: str
    framework_name: str
    kube_api_server_address: str = ""
    kube_config_file_path: str = ""
    barrier_check_interval_sec: int = DEFAULT_INTERVAL_SEC
    barrier_check_timeout_sec: int = DEFAULT_TIMEOUT_SEC
    identity: Identity = field(default_factory=Identity)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Config:
        """Read the settings from environment variables. Raises `BadConfig`."""
        index = environ.get(TASK_INDEX, "")
        config = cls(
            framework_namespace=environ.get(FRAMEWORK_NAMESPACE, ""),
            framework_name=environ.get(FRAMEWORK_NAME, ""),
            kube_api_server_address=environ.get(ENV_NAME_KUBE_API_SERVER_ADDRESS, ""),
            kube_config_file_path=environ.get(ENV_NAME_KUBE_CONFIG, ""),
            barrier_check_interval_sec=_integer(environ, ENV_NAME_BARRIER_CHECK_INTERVAL_SEC, DEFAULT_INTERVAL_SEC),
            barrier_check_timeout_sec=_integer(environ, ENV_NAME_BARRIER_CHECK_TIMEOUT_SEC, DEFAULT_TIMEOUT_SEC),
            identity=Identity(
                framework_uid=environ.get(FRAMEWORK_UID, ""),
                framework_attempt=AttemptInstance.parse(environ.get(FRAMEWORK_ATTEMPT_INSTANCE_UID)),
                task_role=environ.get(TASK_ROLE_NAME, ""),
                task_index=int(index) if _INTEGER.fullmatch(index) else None,
                task_attempt=AttemptInstance.parse(environ.get(TASK_ATTEMPT_INSTANCE_UID)),
            ),
        )
        for name, value in (
            (FRAMEWORK_NAMESPACE, config.framework_namespace),
            (FRAMEWORK_NAME, config.framework_name),
        ):
            if not value:
                raise BadConfig(f"{name} is not set; the operator sets it in every container of a Framework's pods")
        interval, timeout = config.barrier_check_interval_sec, config.barrier_check_timeout_sec
        if interval < MIN_INTERVAL_SEC:
            raise BadConfig(
                f"{ENV_NAME_BARRIER_CHECK_INTERVAL_SEC} is {interval}; set it to {MIN_INTERVAL_SEC} or more"
            )
        if not MIN_TIMEOUT_SEC <= timeout <= MAX_TIMEOUT_SEC:
            raise BadConfig(
                f"{ENV_NAME_BARRIER_CHECK_TIMEOUT_SEC} is {timeout}; "
                f"set it between {MIN_TIMEOUT_SEC} and {MAX_TIMEOUT_SEC}"
            )
        return config


def _integer(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    if not _INTEGER.fullmatch(text):
        raise BadConfig(f"{name} is {text!r}; set it to whole seconds, without a unit")
    return int(text)


class Exit(IntEnum):
    PASSED = 0
    """The gang is complete, the files are written."""

    FAILED = 1
    """The state of the gang could not be read, or the files could not be written."""

    CRASHED = 2
    """A defect of the barrier."""

    TRANSIENT = CONTAINER_TRANSIENT_CONFLICT_FAILED
    """The gang is not complete. With a fancy policy the Framework is retried after a random delay."""

    PERMANENT = CONTAINER_PERMANENT_FAILED
    """The gang will never be complete for this pod. With a fancy policy nothing is retried."""


_MEANINGS = {
    Exit.PASSED: "passed",
    Exit.FAILED: "failed, for another reason than the gang's",
    Exit.CRASHED: "a defect of the barrier",
    Exit.TRANSIENT: "transient conflict, the Framework may be retried after a delay",
    Exit.PERMANENT: "permanent, a retry would not help",
}


class Outcome(NamedTuple):
    """An exit code and its reason."""

    exit: Exit
    reason: str

    def __str__(self) -> str:
        """The last line of the log."""
        return f"exit {self.exit.value} ({_MEANINGS[self.exit]}): {self.reason}"


class FrameworkBarrier:
    """Holds this pod until its gang is complete. Use once: `await FrameworkBarrier(config).run()`.

    `api`: used instead of a client of the configured server. `output_dir`: an existing directory for the files.
    `redact`: see `render`. `say`: called with each line of the log.
    """

    def __init__(
        self,
        config: Config,
        *,
        api: KubeApi | None = None,
        output_dir: Path | None = None,
        redact: bool = False,
        rng: random.Random | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._config, self._given_api = config, api
        self._output_dir, self._redact = output_dir or Path(), redact
        self._rng = rng or random.Random()
        self._say = say or partial(print, f"{COMPONENT_NAME}:", file=sys.stderr, flush=True)
        self._outcome: Outcome | None = None
        self._look: Look | None = None
        self._error = "no answer came"
        longest = float(config.barrier_check_interval_sec)
        self._backoff, self._retry_after = Backoff(FIRST_PAUSE, longest, rng=self._rng), 0.0
        self._refused_since: float | None = None

    async def run(self) -> Exit:
        """Wait for the gang, until the deadline at the latest, and write the files. Log and return the outcome."""
        config, who = self._config, self._config.identity
        member = f"{who.task_role}-{who.task_index}" if who.task_role else "a pod without task variables"
        self._say(
            f"{member} waits for the gang of the Framework {config.framework_namespace}/{config.framework_name}, "
            f"for up to {config.barrier_check_timeout_sec} s; "
            f"server: {config.kube_api_server_address or config.kube_config_file_path or 'in-cluster configuration'}"
        )
        if os.access(self._output_dir, os.W_OK | os.X_OK):
            outcome = await self._waited()
        else:
            text = f"cannot write to {self._output_dir.absolute()}; set another --output-dir"
            outcome = Outcome(Exit.FAILED, text)
        self._say(str(outcome))
        return outcome.exit

    async def _waited(self) -> Outcome:
        config, interval = self._config, float(self._config.barrier_check_interval_sec)
        deadline = asyncio.get_running_loop().time() + config.barrier_check_timeout_sec
        try:
            async with asyncio.timeout_at(deadline), AsyncExitStack() as stack:
                api = self._given_api
                if api is None:
                    kubeconfig, server = config.kube_config_file_path or None, config.kube_api_server_address or None
                    api = await KubeClient.connect(kubeconfig, server=server, limits=LIMITS, user_agent=COMPONENT_NAME)
                    await stack.enter_async_context(api)
                namespace, name = config.framework_namespace, config.framework_name
                source = FrameworkSource(api, namespace, name, interval=interval, rng=self._rng)
                await self._follow(source, deadline - LAST_LOOK)
        except NoConfig as error:
            return Outcome(Exit.FAILED, str(error))
        except TimeoutError:
            pass  # the last state that was read decides
        if self._outcome is not None:
            return self._outcome
        waited = f"after {config.barrier_check_timeout_sec} s"
        if self._look is None:
            return Outcome(Exit.FAILED, f"{waited} the state of the gang is unknown: {self._error}")
        return Outcome(Exit.TRANSIENT, f"{waited} {_progress(self._look)}")

    async def _follow(self, source: FrameworkSource, until: float) -> None:
        """Judge states until the outcome is known or the loop's time `until` is reached; then read the state once."""
        try:
            async with asyncio.timeout_at(until):
                while self._outcome is None:
                    try:
                        await source.follow(self._judge)
                    except KubeError as error:
                        self._failed(error)
                    if self._outcome is None:
                        await asyncio.sleep(max(self._backoff.delay(), self._retry_after))
        except TimeoutError:
            try:
                self._judge(await source.get())
            except KubeError as error:
                self._note(str(error))

    def _judge(self, state: Object) -> bool:
        """Judge a state of the Framework. Return whether the outcome is known."""
        try:
            framework = decompressed(state)
            look = look_at(view_of(framework), self._config.identity)
            if self._look is None or (look.missing, look.total) != (self._look.missing, self._look.total):
                self._say(_progress(look))
            self._look = look
            outcome: Outcome | None = None
            if look.foreign:
                outcome = Outcome(Exit.PERMANENT, look.foreign)
            elif look.lost:
                outcome = Outcome(Exit.TRANSIENT, look.lost)
            elif look.is_whole:
                files, directory = render(framework, look, redact=self._redact), self._output_dir.absolute()
                try:
                    write_files(self._output_dir, files)
                    outcome = Outcome(Exit.PASSED, f"{look.total} tasks are ready; the files are in {directory}")
                except OSError as error:
                    outcome = Outcome(Exit.FAILED, f"cannot write to {directory}: {error}")
            self._outcome = outcome
        except (BadView, BadFramework) as error:
            self._note(f"cannot read the Framework: {error}")
            return False
        self._backoff.reset()
        self._retry_after, self._refused_since = 0.0, None
        return self._outcome is not None

    def _failed(self, error: KubeError) -> None:
        is_refusal = isinstance(error, Unauthorized | Forbidden)
        if is_refusal and self._refused_since is None:
            self._backoff.reset()  # the server answers again, and may still be loading its permissions
        self._backoff.failures += 1
        self._retry_after = error.retry_after or 0.0
        self._note(str(error))
        if isinstance(error, NotFound):
            self._outcome = Outcome(Exit.PERMANENT, f"the Framework does not exist: {error}")
        elif not is_refusal:
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = asyncio.get_running_loop().time()
        elif asyncio.get_running_loop().time() - self._refused_since >= REFUSAL_GRACE:
            needs = "accept the pod's token" if isinstance(error, Unauthorized) else "allow get, list and watch"
            self._outcome = Outcome(Exit.FAILED, f"refused for {REFUSAL_GRACE:g} s: {error}; the server must {needs}")

    def _note(self, error: str) -> None:
        if error != self._error:
            self._say(error)
        self._error = error


def _progress(look: Look) -> str:
    more = len(look.missing) - NAMED
    missing = ", ".join(look.missing[:NAMED]) + (f" and {more} more" if more > 0 else "")
    return f"{look.ready}/{look.total} ready" + (f"; missing: {missing}" if missing else "")


class FrameworkSource:
    """Follows the Framework `name`. `interval`: seconds between two GETs, where watches are forbidden."""

    def __init__(self, api: KubeApi, namespace: str, name: str, *, interval: float, rng: random.Random) -> None:
        self._api, self._namespace, self._name = api, namespace, name
        self._interval, self._rng = interval, rng
        self._version = ""
        self._may_watch = True

    async def get(self) -> Object:
        """Return the Framework as it is now. Raises `KubeError`; `NotFound` when it does not exist."""
        return await self._api.get(FRAMEWORKS, self._name, self._namespace)

    async def follow(self, show: Show) -> None:
        """Call `show` with each state, from the current one on, until `show` returns true. May return earlier, when the
        server ended the watch or expired its resource version. Raises `KubeError`."""
        if not self._may_watch:
            while True:
                if show(await self.get()):
                    return
                await asyncio.sleep(self._interval * self._rng.uniform(0.5, 1.5))
        name = f"metadata.name={self._name}"
        try:
            if not self._version:
                page = await self._api.list(FRAMEWORKS, self._namespace, field_selector=name)
                if not page.items:
                    raise NotFound("the list is empty")
                if show(page.items[0]):
                    return
                self._version = page.resource_version
            timeout = self._rng.uniform(MIN_WATCH, MAX_WATCH)
            async with self._api.watch(
                FRAMEWORKS, self._namespace, resource_version=self._version, field_selector=name, timeout=timeout
            ) as events:
                async for event in events:
                    if event.type == "DELETED":
                        raise NotFound("the Framework was deleted")
                    if event.type != "BOOKMARK" and show(event.object):
                        return
                    self._version = resource_version_of(event.object)
        except Expired:
            self._version = ""
        except NotFound:
            self._version = ""
            show(await self.get())  # its NotFound is final
        except Forbidden:
            state = await self.get()  # may be forbidden, too; then that error is reported
            self._may_watch = False
            show(state)
