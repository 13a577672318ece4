"""Pods that run without an agent, because the agent that started them has ended: which they are, and how to stop them.

They are found by the records in the agent's state directory, which stay as they are. So the next agent finds that the
processes have ended, as after a restart of the machine, and treats each by its restart policy.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from rcfarm.agent.cgroups import Groups
from rcfarm.agent.process import ENDED, ProcessIdentity, adopt, boot_id, end_group, kill_remains, stat
from rcfarm.agent.state import PodRecord, StateDir
from store.schema.manifest import BadManifest, Launchable, parse


class Survivor(NamedTuple):
    """A pod, of which at least one process runs. `pids`: by launchable."""

    node: str
    pod_id: str
    pids: Mapping[str, int]

    def __str__(self) -> str:
        return f"{self.node}/{self.pod_id} ({', '.join(f'{name}: pid {pid}' for name, pid in self.pids.items())})"


def survivors(nodes: Path) -> list[Survivor]:
    """Return the pods that run, by node and pod id. `nodes`: the folder of the nodes' state directories."""
    found = []
    for state in _states(nodes):
        for pod_id, record in state.load_pods().items():
            pids = {}  # not those that have ended and wait for init
            for name, launch in record.launchables.items():
                process = stat(launch.pid) if launch.pid > 0 and launch.boot_id == boot_id() else None
                if process and process.start_time == launch.start_time and process.state not in ENDED:
                    pids[name] = launch.pid
            if pids:
                found.append(Survivor(state.root.name, pod_id, pids))
    return found


async def stop_survivors(nodes: Path) -> list[Survivor]:
    """Stop all pods at the same time, each process as its manifest says. Return those that ran.

    Raises `StateError`, before anything is stopped, when an agent uses one of the state directories.
    """
    with ExitStack() as locks:
        states = [*_states(nodes)]
        for state in states:
            state.open()
            locks.callback(state.close)
        found = survivors(nodes)
        async with asyncio.TaskGroup() as stops:
            for state in states:
                groups = Groups.open(state.root, state.root.name, use=False)  # those that the pods are in
                locks.callback(groups.close)
                for pod_id, record in state.load_pods().items():
                    stops.create_task(_stop(state, pod_id, record, groups))
    return found


async def _stop(state: StateDir, pod_id: str, record: PodRecord, groups: Groups) -> None:
    """Stop the pod's processes by their manifest, then whatever else is in its control group."""
    launchables: dict[str, Launchable] = {}  # none if the manifest is lost
    with suppress(BadManifest):
        launchables = parse(state.load_manifest(record.manifest) or b"").launchables
    async with asyncio.TaskGroup() as stops:
        for name, launch in record.launchables.items():
            identity = ProcessIdentity(launch.pid, launch.start_time, launch.boot_id)
            if (process := adopt(identity, groups.of(pod_id, name))) is None:
                kill_remains(identity, groups.of(pod_id, name))
                continue
            launchable = launchables.get(name, Launchable(command=["false"]))
            number = signal.Signals[launchable.stop_signal]
            stops.create_task(process.terminate(number, launchable.stop_timeout))
    if (group := groups.of(pod_id)) is not None:
        await end_group(group)
        groups.remove(pod_id)


def _states(nodes: Path) -> Iterator[StateDir]:
    for directory in sorted(nodes.iterdir()) if nodes.is_dir() else ():
        state = StateDir(directory)
        if state.pods.is_dir():
            yield state
