"""Programs for hollow containers: real processes, with the environment that the container has."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from store.kube.api.objects import uid_of
from tests.support.kube.hollow.behaviour import Ended
from tests.support.kube.hollow.pod import ContainerRun, Program

_MESSAGE_BYTES = 2048  # of the log's end, as with the policy FallbackToLogsOnError
_STOP_SECONDS = 5.0


def process(command: Sequence[str] = (), *, directory: Path, environ: Mapping[str, str] | None = None) -> Program:
    """Run `command`, by default the container's own. It works in `directory`/POD-UID, which containers of a pod share
    like a volume. Its environment is the container's, `environ`, and the PATH of the tests."""

    async def run(container: ContainerRun) -> Ended:
        argv = command or [*container.container.get("command", ()), *container.container.get("args", ())]
        workplace = directory / uid_of(container.pod)
        workplace.mkdir(parents=True, exist_ok=True)
        started = await asyncio.create_subprocess_exec(
            *argv,
            cwd=workplace,
            env={"PATH": os.environ["PATH"], **(environ or {}), **container.env},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            output, _ = await started.communicate()
        finally:
            await _stop(started)
        code = started.returncode or 0
        message = output[-_MESSAGE_BYTES:].decode(errors="replace") if code else ""
        return Ended(128 - code if code < 0 else code, message=message)

    return run


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(_STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
