"""Pods that run without an agent, because the agent that started them has ended: which they are, and how to stop them.

They are found by the records in the agent's state directory, which stay as they are. So the next agent finds that the
processes have ended, as after a restart of the machine, and treats each by its restart policy.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from rcfarm.agent.process import ProcessHandle, ProcessIdentity, adopt, kill_remains
from rcfarm.agent.state import PodRecord, StateDir
from store.schema.manifest import BadManifest, Launchable, Manifest, parse


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
            if running := _processes(record):
                found.append(Survivor(state.root.name, pod_id, {name: each.pid for name, each in running.items()}))
                for process in running.values():
                    process.release()
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
                for record in state.load_pods().values():
                    launchables = _manifest(state, record).launchables
                    for name, process in _processes(record, kill_rest=True).items():
                        launchable = launchables.get(name, Launchable(command=["false"]))
                        number = signal.Signals[launchable.stop_signal]
                        stops.create_task(process.terminate(number, launchable.stop_timeout))
    return found


def _states(nodes: Path) -> Iterator[StateDir]:
    for directory in sorted(nodes.iterdir()) if nodes.is_dir() else ():
        state = StateDir(directory)
        if state.pods.is_dir():
            yield state


def _processes(record: PodRecord, *, kill_rest: bool = False) -> dict[str, ProcessHandle]:
    """Return the processes of the pod that run, by launchable; the caller releases them."""
    running = {}
    for name, launch in record.launchables.items():
        identity = ProcessIdentity(launch.pid, launch.start_time, launch.boot_id)
        if (process := adopt(identity)) is not None:
            running[name] = process
        elif kill_rest:
            kill_remains(identity)
    return running


def _manifest(state: StateDir, record: PodRecord) -> Manifest:
    """Return the pod's manifest; one without launchables if it is lost."""
    try:
        return parse(state.load_manifest(record.manifest) or b"")
    except BadManifest:
        return Manifest(id="lost", launchables={})
