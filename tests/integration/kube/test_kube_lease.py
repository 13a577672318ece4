"""Leader election between processes on a real API server: killed, stopped and continued, released."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby

from store.kube.client.client import KubeClient
from store.kube.leaderelection.election import Election
from tests.support.kube.candidate import LEASE, RETRY, WRITERS
from tests.support.kube.control_plane import ControlPlane, until


class Candidate:
    """A process of `tests.support.kube.candidate`."""

    def __init__(self, plane: ControlPlane, namespace: str, identity: str) -> None:
        command = [sys.executable, "-m", "tests.support.kube.candidate", str(plane.kubeconfig), namespace, identity]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self._said = b""

    def leads(self) -> bool:
        """Return whether it has led at some time."""
        return self.has_said("leads")

    def has_said(self, line: str) -> bool:
        assert self.process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            self._said += os.read(self.process.stdout.fileno(), 4096)
        return line.encode() in self._said.splitlines()


@contextmanager
def candidates(plane: ControlPlane, namespace: str) -> Iterator[tuple[Candidate, Candidate]]:
    """Two candidates; the first already leads."""
    first = Candidate(plane, namespace, "a")
    made = [first]
    try:
        until(first.leads, "leading")
        made.append(Candidate(plane, namespace, "b"))
        until(lambda: made[1].has_said("sees a"), "seeing the leader")
        until(lambda: len(written(plane, namespace)) > 5 * WRITERS, "writing")  # each over a connection that is open
        yield first, made[1]
    finally:
        for candidate in made:
            candidate.process.kill()
            candidate.process.wait()
            assert candidate.process.stdout is not None
            candidate.process.stdout.close()


def written(plane: ControlPlane, namespace: str) -> list[str]:
    """Return who wrote, in the order in which the API server applied the writes."""
    items = plane.request("GET", f"/api/v1/namespaces/{namespace}/configmaps")["items"]
    items.sort(key=lambda item: int(item["metadata"]["resourceVersion"]))
    return [name for item in items if (name := item["metadata"]["name"].partition("-")[0]) in ("a", "b")]


def writers(plane: ControlPlane, namespace: str) -> list[str]:
    """Return who wrote, in order, with successive writes of one candidate counted once."""
    return [name for name, _ in groupby(written(plane, namespace))]


def test_another_leads_within_the_lease_after_a_crash(control_plane: ControlPlane, namespace: str) -> None:
    """The leader is killed in the middle of its writes: the other takes over when the lease has expired, not before."""
    with candidates(control_plane, namespace) as (first, second):
        first.process.kill()
        killed = time.monotonic()
        until(second.leads, "leading")
        assert time.monotonic() - killed >= LEASE - RETRY - 0.5
        until(lambda: writers(control_plane, namespace) == ["a", "b"], "writing")


def test_a_stopped_leader_writes_nothing_after_it_was_continued(control_plane: ControlPlane, namespace: str) -> None:
    """Stopped past the lease: the other leads and writes. Continued, the first exits without a single write."""
    with candidates(control_plane, namespace) as (first, second):
        first.process.send_signal(signal.SIGUSR1)
        until(second.leads, "leading")
        until(lambda: writers(control_plane, namespace) == ["a", "b"], "writing")
        first.process.send_signal(signal.SIGCONT)
        assert first.process.wait(20) == 0
        assert writers(control_plane, namespace) == ["a", "b"]


async def test_two_candidates_hand_over(control_plane: ControlPlane, namespace: str) -> None:
    """A leader that stops cleanly releases the lease; the API server accepts the lease object at each step."""
    async with await KubeClient.connect(str(control_plane.kubeconfig)) as api:
        turns: list[str] = []

        async def stand(identity: str) -> None:
            async def lead() -> None:
                turns.append(identity)
                await asyncio.sleep(1.0)

            await Election(
                api, namespace, "operator", identity,
                lease_duration=60.0, renew_deadline=30.0, retry_period=0.2, rng=random.Random(identity),
            ).run(lead)  # fmt: skip

        async with asyncio.timeout(30):
            await asyncio.gather(stand("a"), stand("b"))
    assert sorted(turns) == ["a", "b"]
    lease = control_plane.request("GET", f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/operator")
    assert lease["spec"]["leaseTransitions"] == 1
    assert "holderIdentity" not in lease["spec"]
