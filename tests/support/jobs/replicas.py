"""`rcfarm jobs` as processes that tests kill, stop, continue and start again."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from pathlib import Path

from tests.support import waiting
from tests.support.programs.daemon import DaemonLives

PATIENCE = 120.0  # seconds that a condition may take on a busy machine
LOOK = 0.2  # seconds between two polls: a poll costs the replica and us more than the wait
until = partial(waiting.until, within=PATIENCE, every=LOOK)
_LEADS = re.compile(r'^leader_election_master_status\{name="[^"]*"\} 1\.0$', re.MULTILINE)


class Replica(DaemonLives):
    """One replica for the Frameworks of a namespace. `lease` "off": without an election. `settings` as for --set."""

    def __init__(self, directory: Path, kubeconfig: Path, namespace: str, *, lease: str = "off", **settings: object):
        flags = [f"--set={section.replace('__', '.')}={value}" for section, value in settings.items()]
        super().__init__(directory, "jobs", "--kubeconfig", str(kubeconfig), "-n", namespace, "--lease", lease, *flags)

    def pause(self) -> None:
        """Send SIGSTOP: the process does nothing until `resume`, without noticing it."""
        self.process.pause()

    def resume(self) -> None:
        self.process.resume()

    async def is_ready(self) -> bool:
        return (await asyncio.to_thread(self.process.get, "/readyz"))[0] == 200

    async def leads(self) -> bool:
        """Return whether it runs and says that it is the leader."""
        if not self.is_running:
            return False
        return _LEADS.search((await asyncio.to_thread(self.process.get, "/metrics"))[1]) is not None

    async def until_ended(self) -> None:
        """Wait until the process has ended on its own."""
        await asyncio.to_thread(self.process.wait, PATIENCE)
