"""The job server of the examples in this process, on one port, stopped and started again, and with faults."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from tests.support.modules import load_module

EXAMPLES = Path(__file__).parents[3] / "examples" / "tasks"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Fault = Callable[[web.Request, Handler], Awaitable[web.StreamResponse]]


def example(name: str) -> Any:
    """Return a module of the examples."""
    return load_module(EXAMPLES / f"{name}.py", f"example_{name}")


def example_task(**config: Any) -> dict[str, Any]:
    """Return the fields of the example's task, without its id. `config`: fields of its config to replace."""
    task: dict[str, Any] = yaml.safe_load((EXAMPLES / "http-job.yaml").read_text())
    del task["task"]
    own = task.pop("http")
    return task | {"type": "http", "config": own | config}


class Site:
    """The server at `url`. `faults`: what the next requests meet instead of, or around, their handler."""

    def __init__(self) -> None:
        self.server = example("job_server").JobServer()
        self.faults: list[Fault] = []
        self.requests: list[web.Request] = []
        self._port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        app = self.server.app()

        @web.middleware
        async def meet(request: web.Request, handler: Handler) -> web.StreamResponse:
            await request.read()  # kept with the request, for tests
            self.requests.append(request)
            return await (self.faults.pop(0)(request, handler) if self.faults else handler(request))

        app.middlewares.append(meet)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)  # 0 would be no limit
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()


def answer(status: int, text: str = "{}", **headers: str) -> Fault:
    """Return the fault of an answer without the handler."""

    async def fault(request: web.Request, handler: Handler) -> web.StreamResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(status=status, text=text, headers=named)

    return fault


async def lost_answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The request is applied, and the connection ends before the answer."""
    await handler(request)
    assert request.transport is not None
    request.transport.abort()
    return web.Response()
