"""The barrier: waits in each pod of a Framework until the whole gang has addresses, and hands these to the containers.

It runs as init container of every task. If the gang is not whole in time, it ends with a code upon which the operator
retries the Framework after a random delay: so gangs that block each other let go, and no task of a gang that can't run
holds a device. It also holds each pod until the operator has recorded it, so that no outcome of a container is lost.

The model: one task follows the Framework (`FrameworkSource`) and judges each state as it comes; all of it, with
connecting, ends by the deadline, whatever the network does. An error only delays the next look; at the deadline the
last state that could be read decides, not the last error. Source: frameworkcontroller's FrameworkBarrier.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from controllers.barrier_config import COMPONENT_NAME, Config
from controllers.barrier_exit import Exit, Outcome
from controllers.barrier_files import render, write_files
from controllers.barrier_readiness import Look, look_at
from controllers.barrier_source import FrameworkSource
from controllers.barrier_view import BadView, decompressed, view_of
from controllers.framework.wire import BadFramework
from store.kube.api import KubeApi
from store.kube.client import KubeClient
from store.kube.errors import Forbidden, KubeError, NoConfig, NotFound, Unauthorized
from store.kube.limits import Limits
from store.kube.objects import Object

REFUSAL_GRACE = 30.0  # seconds for which a refusal may be a permission that is still on its way
LAST_LOOK = 2.0  # seconds before the deadline at which the watch is not waited for any more
FIRST_PAUSE = 0.5  # seconds; doubles with each error, up to the interval
LIMITS = Limits(call_timeout=15.0, stream_silence=90.0)
NAMED = 5  # how many of those who are missing a line names


class FrameworkBarrier:
    """Holds this pod until its gang is whole. Use once: `await FrameworkBarrier(config).run()`.

    `api`: instead of a client of the server that is configured. `output_dir`: an existing directory for the files.
    `redact`: see `render`. `say`: is given each line of the log.
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
        self._rng, self._say = rng or random.Random(), say or _to_stderr
        self._outcome: Outcome | None = None
        self._look: Look | None = None
        self._error = "no answer came"
        self._failures, self._retry_after = 0, 0.0
        self._refused_since: float | None = None

    async def run(self) -> Exit:
        """Wait, and write the files when the gang is whole; ends by the deadline. Its last line tells the outcome."""
        self._say(_described(self._config))
        outcome = self._cant_write() or await self._waited()
        self._say(str(outcome))
        return outcome.exit

    async def _waited(self) -> Outcome:
        deadline = asyncio.get_running_loop().time() + self._config.barrier_check_timeout_sec
        try:
            async with asyncio.timeout_at(deadline), self._connected() as api:
                await self._follow(self._source(api), deadline - LAST_LOOK)
        except NoConfig as error:
            return Outcome(Exit.FAILED, str(error))
        except TimeoutError:
            pass  # what is known by now decides
        return self._outcome or self._given_up()

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[KubeApi]:
        if self._given_api is not None:
            yield self._given_api
            return
        kubeconfig, server = self._config.kube_config_file_path, self._config.kube_api_server_address
        client = await KubeClient.connect(
            kubeconfig or None, server=server or None, limits=LIMITS, user_agent=COMPONENT_NAME
        )
        async with client:
            yield client

    def _source(self, api: KubeApi) -> FrameworkSource:
        config, interval = self._config, float(self._config.barrier_check_interval_sec)
        return FrameworkSource(api, config.framework_namespace, config.framework_name, interval=interval, rng=self._rng)

    async def _follow(self, source: FrameworkSource, until: float) -> None:
        """Judge states until the outcome is known, or until the loop's time `until`; then have one last look."""
        try:
            async with asyncio.timeout_at(until):
                while self._outcome is None:
                    await self._follow_once(source)
        except TimeoutError:
            try:
                self._judge(await source.get())
            except KubeError as error:
                self._note(str(error))

    async def _follow_once(self, source: FrameworkSource) -> None:
        try:
            await source.follow(self._judge)
        except KubeError as error:
            self._failed(error)
        if self._outcome is None:
            await asyncio.sleep(self._pause())

    def _judge(self, state: Object) -> bool:
        """Look at a state of the Framework; whether the outcome is known."""
        try:
            framework = decompressed(state)
            look = look_at(view_of(framework), self._config.identity)
            self._report(look)
            self._outcome = self._outcome_of(look, framework)
        except (BadView, BadFramework) as error:
            self._note(f"the Framework can't be read: {error}")
            return False
        self._failures, self._retry_after, self._refused_since = 0, 0.0, None
        return self._outcome is not None

    def _outcome_of(self, look: Look, framework: Object) -> Outcome | None:
        if look.foreign:
            return Outcome(Exit.PERMANENT, look.foreign)
        if look.lost:
            return Outcome(Exit.TRANSIENT, look.lost)
        if not look.is_whole:
            return None
        files = render(framework, look, redact=self._redact)
        try:
            write_files(self._output_dir, files)
        except OSError as error:
            return Outcome(Exit.FAILED, f"can't write into {self._output_dir.absolute()}: {error}")
        return Outcome(Exit.PASSED, f"{look.total} tasks are ready; the files are in {self._output_dir.absolute()}")

    def _failed(self, error: KubeError) -> None:
        self._failures += 1
        self._retry_after = error.retry_after or 0.0
        self._note(str(error))
        if isinstance(error, NotFound):
            self._outcome = Outcome(Exit.PERMANENT, f"the Framework does not exist: {error}")
        elif not isinstance(error, Unauthorized | Forbidden):
            self._refused_since = None
        elif self._is_refused_for_good():
            needs = "accept the pod's token" if isinstance(error, Unauthorized) else "let it get, list and watch it"
            self._outcome = Outcome(Exit.FAILED, f"refused for {REFUSAL_GRACE:g} s: {error}; the server must {needs}")

    def _is_refused_for_good(self) -> bool:
        now = asyncio.get_running_loop().time()
        if self._refused_since is None:
            self._refused_since = now
        return now - self._refused_since >= REFUSAL_GRACE

    def _pause(self) -> float:
        longest = float(self._config.barrier_check_interval_sec)
        pause = min(longest, FIRST_PAUSE * 2.0 ** min(self._failures, 10)) * self._rng.uniform(0.5, 1.0)
        return max(pause, self._retry_after)

    def _report(self, look: Look) -> None:
        """Say how far the gang is, when that changed."""
        if self._look is None or look.missing != self._look.missing or look.total != self._look.total:
            self._say(_progress(look))
        self._look = look

    def _note(self, error: str) -> None:
        if error != self._error:
            self._say(error)
        self._error = error

    def _cant_write(self) -> Outcome | None:
        if os.access(self._output_dir, os.W_OK | os.X_OK):
            return None
        return Outcome(Exit.FAILED, f"can't write into {self._output_dir.absolute()}; name another --output-dir")

    def _given_up(self) -> Outcome:
        waited = f"after {self._config.barrier_check_timeout_sec} s"
        if self._look is None:
            return Outcome(Exit.FAILED, f"{waited} nothing is known of the gang: {self._error}")
        return Outcome(Exit.TRANSIENT, f"{waited} {_progress(self._look)}")


def _progress(look: Look) -> str:
    more = len(look.missing) - NAMED
    missing = ", ".join(look.missing[:NAMED]) + (f" and {more} more" if more > 0 else "")
    return f"{look.ready}/{look.total} ready" + (f"; missing: {missing}" if missing else "")


def _described(config: Config) -> str:
    who = config.identity
    member = f"{who.task_role}-{who.task_index}" if who.task_role else "a pod that does not know which task it is"
    return (
        f"{member} waits for the gang of the Framework {config.framework_namespace}/{config.framework_name}, "
        f"for up to {config.barrier_check_timeout_sec} s; "
        f"server: {config.kube_api_server_address or config.kube_config_file_path or 'as this pod is told'}"
    )


def _to_stderr(line: str) -> None:
    print(f"{COMPONENT_NAME}: {line}", file=sys.stderr, flush=True)
