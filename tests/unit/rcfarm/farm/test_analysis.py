"""The runner of analyses against a real HTTP server and real processes: outcomes, bounds, and what is left behind."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
from aiohttp import web
from aiohttp.test_utils import TestServer

from rcfarm.config.settings import FarmSettings
from rcfarm.farm import analysis as runner
from rcfarm.farm.analysis import Analyses
from rcfarm.farm.analysis_http import MOST_READ
from rcfarm.telemetry.prometheus import FarmMetrics
from store.schema.records import Analysis, AnalysisResult, HttpAnalysis, PrometheusAnalysis, Rollout
from tests.support.waiting import until

ROLLOUT = Rollout(
    revision=7, manifest="f" * 64, stable="0" * 64, state="canary", since="s", started="s", progressed="s"
)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Farm:
    """A runner with settings, and the RCs that it woke."""

    def __init__(self, **settings: Any) -> None:
        self.woken: list[str] = []
        self.metrics = FarmMetrics()
        log = structlog.get_logger()
        self.analyses = Analyses(FarmSettings(**settings), self.woken.append, self.metrics, log)
        self._running = asyncio.create_task(self.analyses.run())

    async def started(self) -> Farm:
        await asyncio.sleep(0)
        return self

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.wait([self._running])

    async def result(self, analysis: Analysis, rollout: Rollout = ROLLOUT) -> AnalysisResult:
        """Run an analysis once."""
        woken = len(self.woken)
        self.analyses.follow("web", rollout, [analysis])
        await until(lambda: len(self.woken) > woken)
        found = self.analyses.results("web", rollout)[analysis.name]
        self.analyses.drop("web")
        return found


@pytest.fixture(autouse=True)
def _short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "SHORTEST", 0.01)


@pytest.fixture
async def farm() -> AsyncIterator[Farm]:
    made = await Farm().started()
    yield made
    await made.close()


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Handler], Awaitable[str]]]:
    """Start servers that answer every request with a handler. Return their URLs."""
    servers: list[TestServer] = []

    async def start(handler: Handler) -> str:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        servers.append(server := TestServer(app))
        await server.start_server()
        return f"http://127.0.0.1:{server.port}"

    yield start
    for server in servers:
        await server.close()


def http(url: str, status: int | None = None, **fields: Any) -> Analysis:
    return Analysis(name="a", http=HttpAnalysis(url=url, status=status), **fields)


def command(name: str = "check", **fields: Any) -> Analysis:
    return Analysis(name="a", command=name, **fields)


def outcome(result: AnalysisResult) -> tuple[str, str]:
    return result.outcome, result.value


@pytest.mark.parametrize(
    ("path", "wanted", "expected"),
    [
        ("200", None, ("success", "200")),
        ("204", None, ("no_data", "204")),
        ("204", 204, ("success", "204")),
        ("204", 200, ("no_data", "204")),
        ("302", None, ("failure", "302")),
        ("404", 404, ("success", "404")),
        ("503", None, ("failure", "503")),
    ],
)
async def test_the_status_of_http_decides(
    farm: Farm, serve: Any, path: str, wanted: int | None, expected: tuple[str, str]
) -> None:
    """No redirection is followed, and nothing of this farm is sent along."""
    seen: list[web.Request] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request)
        return web.Response(status=int(request.path[1:]), headers={"Location": "/200", "Set-Cookie": "a=b"})

    url = await serve(answer)
    assert outcome(await farm.result(http(f"{url}/{path}", wanted))) == expected
    assert outcome(await farm.result(http(f"{url}/{path}", wanted))) == expected
    assert len(seen) == 2
    assert not {"Cookie", "Authorization"} & set(seen[1].headers)


def vector(*values: object) -> dict[str, Any]:
    result = [{"metric": {}, "value": [1.0, value]} for value in values]
    return {"status": "success", "data": {"resultType": "vector", "result": result}}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (vector("0.001"), ("success", "0.001")),
        (vector("0.25"), ("failure", "0.25")),
        (vector("+Inf"), ("failure", "inf")),
        (vector("NaN"), ("no_data", "NaN")),
        (vector(), ("no_data", "no series")),
        (vector("1", "2"), ("error", "2 series; the query must return one")),
        ({"status": "success", "data": {"resultType": "scalar", "result": [1.0, "0"]}}, ("success", "0")),
        (
            {"status": "success", "data": {"resultType": "matrix", "result": [1]}},
            ("error", "the query returns no number"),
        ),
        ({"status": "error", "error": "secret"}, ("error", "the query failed")),
        (vector(10**400), ("error", "not an answer of Prometheus")),
        (vector("secret"), ("error", "not an answer of Prometheus")),
        (["secret"], ("error", "not an answer of Prometheus")),
        (None, ("error", "not an answer of Prometheus")),
    ],
)
async def test_the_number_of_prometheus_decides(farm: Farm, serve: Any, answer: Any, expected: tuple[str, str]) -> None:
    asked: list[tuple[str, str]] = []

    async def prometheus(request: web.Request) -> web.Response:
        asked.append((request.path, request.query["query"]))
        return web.json_response(answer)

    url = await serve(prometheus)
    query = 'sum(rate(errors{job="web"}[5m])) & +1'
    asks = PrometheusAnalysis(url=f"{url}/prefix/", query=query, condition="< 0.01")
    assert outcome(await farm.result(Analysis(name="a", prometheus=asks))) == expected
    assert asked == [("/prefix/api/v1/query", query)]


async def test_what_is_no_answer_is_an_error_of_which_nothing_is_kept(farm: Farm, serve: Any) -> None:
    """A hang, a flood, another protocol, a bad status, nobody there, an unknown host: each ends soon, with its cause in
    our words."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if "hang" in request.path:
            await asyncio.sleep(60)
        if "flood" in request.path:
            response = web.StreamResponse()
            await response.prepare(request)
            while True:
                await response.write(b"x" * 65536)
        return web.Response(status=502, text="secret")

    async def other_protocol(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 secret\r\nsecret\r\n\r\n")
        writer.close()

    url = await serve(answer)
    raw = await asyncio.start_server(other_protocol, "127.0.0.1", 0)
    port = raw.sockets[0].getsockname()[1]
    for place, value in (
        (f"{url}/hang", "no answer within 0.3 s"),
        (f"{url}/bad", "status 502"),
        (f"{url}/flood", f"an answer of more than {MOST_READ // 1024} KiB"),
        (f"http://127.0.0.1:{port}", "not a valid HTTP answer"),
        ("http://127.0.0.1:1", "Connection refused"),
    ):
        timeout = 0.3 if "hang" in place else 10.0
        asks = PrometheusAnalysis(url=place, query="up", condition="> 0")
        assert outcome(await farm.result(Analysis(name="a", prometheus=asks, timeout=timeout))) == ("error", value)
    assert outcome(await farm.result(http("http://host.invalid/"))) == ("error", "the host's name is not known")
    assert outcome(await farm.result(http(f"{url.replace('127.0.0.1', 'localhost')}/200"))) == ("failure", "502")
    assert (await farm.result(http(f"{url}/flood"))).outcome == "success", "of plain HTTP only the status is read"
    raw.close()


async def test_only_listed_hosts_are_called(serve: Any) -> None:
    called: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        called.append(request.path)
        return web.Response()

    url = await serve(answer)
    farm = await Farm(analysis_hosts=("*.example.com", "127.0.0.1:9")).started()
    result = await farm.result(http(url))
    assert (result.outcome, called) == ("error", [])
    assert result.value == f"farm.analysis_hosts does not allow {url.removeprefix('http://')}"
    await farm.close()
    farm = await Farm(analysis_hosts=("127.0.0.*",)).started()
    assert outcome(await farm.result(http(url))) == ("success", "200")
    await farm.close()


def farm_with(*argv: str) -> Farm:
    return Farm(analysis_commands={"check": argv})


@pytest.mark.parametrize(
    ("code", "expected"),
    [(0, "success"), (1, "failure"), (2, "no_data"), (3, "error"), (127, "error")],
)
async def test_the_exit_code_of_a_command_decides(code: int, expected: str) -> None:
    farm = await farm_with("/bin/sh", "-c", f"exit {code}").started()
    assert outcome(await farm.result(command())) == (expected, f"exit code {code}")
    await farm.close()


async def test_a_command_has_the_rollout_in_its_environment_and_nothing_of_the_farm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONSUL_HTTP_TOKEN", "secret")
    farm = await farm_with("/bin/sh", "-c", f"env | sort > {tmp_path}/env; pwd >> {tmp_path}/env; cat").started()
    assert outcome(await farm.result(command())) == ("success", "exit code 0")
    text = (tmp_path / "env").read_text()
    assert "secret" not in text
    for line in ("RCFARM_ANALYSIS=a", f"RCFARM_MANIFEST={'f' * 64}", "RCFARM_RC=web", "RCFARM_REVISION=7"):
        assert line in text.splitlines()
    await farm.close()


STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(60)
"""


async def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    """At the time limit, although both ignore SIGTERM; and when the RC is released."""
    farm = await farm_with(sys.executable, "-c", STUBBORN, str(tmp_path / "pid")).started()
    assert outcome(await farm.result(command(timeout=1.0))) == ("error", "no answer within 1 s")
    await until(lambda: not is_running(tmp_path / "pid"))
    (tmp_path / "pid").unlink()
    farm.analyses.follow("web", ROLLOUT, [command(timeout=60.0)])
    await until(lambda: is_running(tmp_path / "pid"))
    farm.analyses.drop("web")
    await until(lambda: not is_running(tmp_path / "pid"))
    (tmp_path / "pid").unlink()
    farm.analyses.follow("web", ROLLOUT, [command(timeout=60.0)])
    await until(lambda: is_running(tmp_path / "pid"))
    await farm.close()
    await until(lambda: not is_running(tmp_path / "pid"))


def is_running(pid_file: Path) -> bool:
    try:
        state = Path(f"/proc/{int(pid_file.read_text())}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, ValueError):
        return False
    return state != "Z"


async def test_what_a_command_leaves_behind_is_killed_and_its_output_discarded(tmp_path: Path) -> None:
    """A gigabyte of output needs no memory; a child that keeps the output open delays nothing."""
    script = f"sleep 60 & echo $! > {tmp_path}/pid; head -c 1000000000 /dev/zero; exit 0"
    farm = await farm_with("/bin/sh", "-c", script).started()
    began = time.monotonic()
    assert outcome(await farm.result(command(timeout=30.0))) == ("success", "exit code 0")
    assert time.monotonic() - began < 20.0
    await until(lambda: not is_running(tmp_path / "pid"))
    await farm.close()


async def test_a_command_that_is_missing_or_not_listed_is_an_error() -> None:
    farm = await farm_with("/nowhere/check").started()
    assert outcome(await farm.result(command())) == ("error", "No such file or directory")
    assert outcome(await farm.result(command("other"))) == ("error", "farm.analysis_commands has no other")
    assert outcome(await farm.result(Analysis(name="a"))) == ("error", "there is nothing to run")
    await farm.close()


async def test_a_command_that_is_ended_by_a_signal_is_an_error() -> None:
    farm = await farm_with("/bin/sh", "-c", "kill -9 $$").started()
    assert outcome(await farm.result(command())) == ("error", "ended by signal 9")
    await farm.close()


async def test_runs_at_once_are_bounded_and_counted(farm: Farm, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for their turn, and each runs. A released RC's run is cancelled. The metric counts outcomes."""
    at_once, most, served = 0, 0, 0
    gate = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        nonlocal at_once, most, served
        at_once, served = at_once + 1, served + 1
        most = max(most, at_once)
        await gate.wait()
        at_once -= 1
        return web.Response()

    url = await serve(answer)
    for number in range(runner.AT_ONCE + 20):
        farm.analyses.follow(f"rc-{number}", ROLLOUT, [http(url)])
    await until(lambda: at_once == runner.AT_ONCE)
    farm.analyses.drop("rc-0")
    gate.set()
    await until(lambda: len(farm.woken) == runner.AT_ONCE + 19)
    assert most <= runner.AT_ONCE + 1
    assert "rc-0" not in farm.woken
    value = farm.metrics.registry.get_sample_value("rcfarm_analysis_runs_total", {"outcome": "success"})
    assert value == len(farm.woken)


async def test_an_analysis_never_runs_twice_at_once(farm: Farm, serve: Any) -> None:
    """However often the RC is reconciled, and although a run takes longer than the interval."""
    at_once, most, served = 0, 0, 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal at_once, most, served
        at_once, served = at_once + 1, served + 1
        most = max(most, at_once)
        await asyncio.sleep(0.05)
        at_once -= 1
        return web.Response()

    url = await serve(answer)
    rollout = ROLLOUT
    while served < 4:
        farm.analyses.follow("web", rollout, [http(url, interval=0.01)])
        states = {"canary": "rolling", "rolling": "canary"}
        rollout = msgspec.structs.replace(rollout, state=states[rollout.state])
        await asyncio.sleep(0.01)
    assert most == 1


async def test_a_result_that_repeats_the_last_wakes_nothing(
    farm: Farm, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that many rollouts with short intervals do not occupy the farm. The value is shown from time to time."""
    statuses = iter([200, 200, 200, 404, 404, 204, 204, 200, 200, 200, 200, 200])
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(status=next(statuses, 200))

    url = await serve(answer)
    farm.analyses.follow("web", ROLLOUT, [http(url, interval=0.01)])
    await until(lambda: len(asked) > 12)
    assert len(farm.woken) == 5, "the first success, two failures, no data, and a success"
    monkeypatch.setattr(runner, "SHOW_EVERY", 0.0)
    await until(lambda: len(farm.woken) > 6)


async def test_a_result_is_of_the_state_in_which_the_run_began(farm: Farm, serve: Any) -> None:
    """A success that arrives after the state has changed is none of the new one; a failure counts all the same. A run
    of a former rollout does not count at all."""
    gate, began = asyncio.Event(), list[str]()
    statuses = iter([200, *[500] * 100])

    async def answer(request: web.Request) -> web.Response:
        began.append(request.path)
        await gate.wait()
        return web.Response(status=next(statuses))

    url = await serve(answer)
    rolling = msgspec.structs.replace(ROLLOUT, state="rolling")
    farm.analyses.follow("web", ROLLOUT, [http(url, interval=0.05)])
    await until(lambda: began)
    farm.analyses.follow("web", rolling, [http(url, interval=0.05)])
    assert farm.analyses.results("web", rolling) == {}
    gate.set()
    await until(lambda: len(farm.woken) == 1)
    result = farm.analyses.results("web", rolling)["a"]
    assert (result.outcome, result.passed) == ("success", 0)
    await until(lambda: len(farm.woken) > 1)
    assert farm.analyses.results("web", ROLLOUT)["a"].failures > 0
    later = msgspec.structs.replace(ROLLOUT, revision=8)
    assert farm.analyses.results("web", later) == {}


async def test_another_owner_counts_on(farm: Farm) -> None:
    """It begins with what the rollout's record says."""
    recorded = AnalysisResult(name="a", outcome="failure", failures=2, passed=1)
    rollout = msgspec.structs.replace(ROLLOUT, analysis=(recorded,))
    result = await farm.result(command(), rollout)
    assert (result.outcome, result.failures, result.errors, result.passed) == ("error", 2, 1, 1)
