"""A small job API to try `http` tasks with: `python job_server.py --port 8085`.

POST   /jobs        {"seconds": 2, "number": 6, "push_url": "…"}; the same Idempotency-Key creates one job only
GET    /jobs/ID     {"id", "status", "progress", "result", "message"}; status: running, done, failed, cancelled
GET    /jobs?ids=A,B
DELETE /jobs/ID

A job computes the square of its number, which must not be negative.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from aiohttp import ClientSession, web


@dataclass
class Job:
    """One job."""

    seconds: float
    number: int
    push_url: str = ""
    id: str = field(default_factory=lambda: uuid4().hex[:12])
    began: float = field(default_factory=time.monotonic)
    cancelled: bool = False

    def shown(self) -> dict[str, Any]:
        """Return the job as clients see it."""
        progress = min(1.0, (time.monotonic() - self.began) / self.seconds if self.seconds else 1.0)
        job: dict[str, Any] = {"id": self.id, "status": "running", "progress": round(progress, 1)}
        if self.cancelled:
            return job | {"status": "cancelled", "message": "cancelled by its client"}
        if progress < 1:
            return job
        if self.number < 0:
            return job | {"status": "failed", "message": f"{self.number} is negative"}
        return job | {"status": "done", "result": {"square": self.number**2}}


class JobServer:
    """The jobs, and the routes to them."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.by_key: dict[str, Job] = {}
        self._pushes: set[asyncio.Task[None]] = set()

    def app(self) -> web.Application:
        """Return an application; several may serve the same jobs."""
        app = web.Application()
        app.add_routes(
            [
                web.post("/jobs", self.create),
                web.get("/jobs", self.list),
                web.get("/jobs/{id}", self.get),
                web.delete("/jobs/{id}", self.delete),
            ]
        )
        return app

    async def create(self, request: web.Request) -> web.Response:
        """Create a job, unless the key has created one."""
        asked = await request.json()
        key = request.headers.get("Idempotency-Key", uuid4().hex)
        if key not in self.by_key:
            if not isinstance(asked.get("number"), int):
                return web.json_response({"message": "number must be an integer"}, status=422)
            job = Job(float(asked.get("seconds", 1.0)), asked["number"], asked.get("push_url", ""))
            self.jobs[job.id] = self.by_key[key] = job
            if job.push_url:
                task = asyncio.create_task(self._push(job))
                self._pushes.add(task)
                task.add_done_callback(self._pushes.discard)
        return web.json_response(self.by_key[key].shown(), status=201)

    async def get(self, request: web.Request) -> web.Response:
        """Show a job."""
        job = self.jobs.get(request.match_info["id"])
        return web.json_response(job.shown()) if job else web.json_response({"message": "no such job"}, status=404)

    async def list(self, request: web.Request) -> web.Response:
        """Show the jobs that the query names."""
        asked = request.query.get("ids", "").split(",")
        return web.json_response({"jobs": [self.jobs[each].shown() for each in asked if each in self.jobs]})

    async def delete(self, request: web.Request) -> web.Response:
        """Cancel a job."""
        job = self.jobs.get(request.match_info["id"])
        if job is None:
            return web.json_response({"message": "no such job"}, status=404)
        job.cancelled = job.cancelled or job.shown()["status"] == "running"
        return web.json_response(job.shown())

    async def _push(self, job: Job) -> None:
        """Tell the client that the job has ended."""
        await asyncio.sleep(job.seconds + 0.01)
        async with ClientSession() as session:
            await session.post(job.push_url)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8085)
    web.run_app(JobServer().app(), host="127.0.0.1", port=parser.parse_args().port)
