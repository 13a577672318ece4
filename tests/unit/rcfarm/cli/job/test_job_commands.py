"""`rcfarm job scale | logs` on an in-memory API server: what is written and said, and logs whose reading fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from controllers.training.pytorch import PYTORCH_JOBS
from rcfarm.cli.job import change, logs
from rcfarm.cli.kit import container_logs
from rcfarm.cli.kit.command import KubeCli
from rcfarm.cli.kit.output import Format, Output
from store.kube.api.errors import Forbidden, KubeError, ServerError, TooManyRequests
from store.kube.memory.kube import MemoryKube
from tests.support.training.manifests import pytorch_job

STARTED = {"status": {"startTime": "2026-01-01T00:00:00Z", "conditions": []}}
FINISHED = {"status": {"conditions": [{"type": "Succeeded", "status": "True"}]}}
TIME = b"2026-01-01T00:00:00.000000001Z "


class LoggingKube(MemoryKube):
    """Answers reads of logs, in turn, with chunks of bytes or an error."""

    answers: list[list[bytes] | KubeError]

    @asynccontextmanager
    async def log(self, pod: str, namespace: str, **options: Any) -> AsyncIterator[Callable[[], Awaitable[bytes]]]:
        answer = self.answers.pop(0)
        if isinstance(answer, KubeError):
            raise answer
        chunks = iter(answer)

        async def read() -> bytes:
            return next(chunks, b"")

        yield read


@pytest.fixture
def api() -> LoggingKube:
    found = LoggingKube()
    found.register(PYTORCH_JOBS, has_status=True)
    found.answers = []
    return found


def on(api: MemoryKube) -> KubeCli:
    return KubeCli(api, "default", Output(Format.table))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("annotations", "said"),
    [({}, "keep the numbers they started with"), ({"rcfarm.dev/restart": "job"}, "all pods are restarted")],
)
async def test_scaling_says_what_happens_to_pods_that_run(
    api: LoggingKube, capsys: pytest.CaptureFixture[str], annotations: dict[str, str], said: str
) -> None:
    """A job that restarts as a whole does so with its new size; the pods of another one keep the former numbers."""
    job = pytorch_job("train", Master=1, Worker=2)
    job["metadata"]["annotations"] = annotations
    await api.create(PYTORCH_JOBS, job, "default")
    await api.patch(PYTORCH_JOBS, "train", "default", STARTED, subresource="status")
    assert await change.scale(on(api), "train", ["worker=3"], detach=True) == 0
    assert said in capsys.readouterr().err


async def test_a_line_longer_than_the_limit_is_shown_in_whole_parts(
    api: LoggingKube, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A progress bar without line ends loses no word, and the time of the last line stays a time."""
    monkeypatch.setattr(container_logs, "MAX_LINE", 40)
    await api.create(PYTORCH_JOBS, pytorch_job("train", Master=1), "default")
    api.answers = [[TIME + b"step one ...", b"zero two\n" + TIME + b"done\n"]]
    assert await logs.logs(on(api), "train") == 0
    assert capsys.readouterr().out.splitlines() == ["step one ...", "zero two", "done"]


@pytest.mark.parametrize("error", [ServerError("no route to 10.0.0.7:10250"), TooManyRequests("busy")])
async def test_following_outlives_a_node_that_does_not_answer(
    api: LoggingKube, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: KubeError
) -> None:
    """The error is noted once, the log is read again, and other replicas are not affected."""
    monkeypatch.setattr(container_logs, "RETRY_PERIOD", 0.01)
    await api.create(PYTORCH_JOBS, pytorch_job("train", Master=1), "default")
    api.answers = [error, error, [TIME + b"back\n"], [], []]
    following = asyncio.create_task(logs.logs(on(api), "train", follow=True))
    while len(api.answers) > 2 and not following.done():
        await asyncio.sleep(0.01)
    api.answers = [[]] * 1000
    await api.patch(PYTORCH_JOBS, "train", "default", FINISHED, subresource="status")
    assert await asyncio.wait_for(following, 10) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == ["back"]
    assert printed.err.count(str(error)) == 1


async def test_following_without_the_right_to_logs_is_one_error(api: LoggingKube) -> None:
    """It ends the command as it ends every other one, not as a group with a traceback."""
    await api.create(PYTORCH_JOBS, pytorch_job("train", Master=1, Worker=1), "default")
    api.answers = [Forbidden("pods/log"), Forbidden("pods/log")]
    with pytest.raises(Forbidden, match="pods/log"):
        await logs.logs(on(api), "train", follow=True)
