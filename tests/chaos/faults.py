"""The faults: what can happen to machines, programs, network, and Consul's data.

A fault begins, lasts until the end of its round, and ends; all rules of the network end together. `targets` are the
programs that it stops or signals: two faults of a round never have one in common. A *rewind* takes the tree back; a
round has one at most.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.network import Rule, cut, partition
from tests.chaos.site import FARMS, NODES, SERVERS, Site, local_agent


async def nothing() -> None:
    """Do nothing."""


Step = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, ready to begin."""

    name: str
    begin: Step
    end: Step = nothing
    targets: frozenset[str] = frozenset()


Build = Callable[[Site, random.Random], Fault]
_MACHINES = (*SERVERS, *FARMS, *NODES)


def _kill(kind: Sequence[str], count: int = 1) -> Build:
    """Kill programs (SIGKILL); restart them at the end of the round, or at once."""

    def build(site: Site, rng: random.Random) -> Fault:
        names = rng.sample(kind, count)
        at_once = rng.random() < 0.3

        async def begin() -> None:
            for name in names:
                site.programs[name].kill()
                if at_once:
                    site.programs[name].start()

        async def end() -> None:
            for name in names:
                site.programs[name].start()

        return Fault(f"kill {' '.join(names)}", begin, end, frozenset(names))

    return build


def _restart(kind: Sequence[str]) -> Build:
    """Stop programs (SIGTERM), and start them again when they have stopped."""

    def build(site: Site, rng: random.Random) -> Fault:
        program = site.programs[rng.choice(kind)]

        async def begin() -> None:
            await program.stop()
            program.start()

        return Fault(f"restart {program.name}", begin, nothing, frozenset({program.name}))

    return build


def _pause(kind: Sequence[str]) -> Build:
    def build(site: Site, rng: random.Random) -> Fault:
        program = site.programs[rng.choice(kind)]

        async def begin() -> None:
            program.pause()

        async def end() -> None:
            program.resume()

        return Fault(f"pause {program.name}", begin, end, frozenset({program.name}))

    return build


def _blink(kind: Sequence[str]) -> Build:
    """Pause programs for a second or less, repeatedly."""

    def build(site: Site, rng: random.Random) -> Fault:
        program = site.programs[rng.choice(kind)]
        tasks: list[asyncio.Task[None]] = []

        async def stutter() -> None:
            while True:
                program.pause()
                await asyncio.sleep(rng.uniform(0.1, 1.0))
                program.resume()
                await asyncio.sleep(rng.uniform(0.05, 0.5))

        async def begin() -> None:
            tasks.append(asyncio.create_task(stutter()))

        async def end() -> None:
            tasks.pop().cancel()
            program.resume()

        return Fault(f"stutter {program.name}", begin, end, frozenset({program.name}))

    return build


def _leader(act: str) -> Build:
    """Kill, pause or cut off the server that leads."""

    def build(site: Site, rng: random.Random) -> Fault:
        hurt: list[str] = []

        async def begin() -> None:
            leader = await site.leader() or rng.choice(SERVERS)
            hurt.append(leader)
            if act == "kill":
                site.programs[leader].kill()
            elif act == "pause":
                site.programs[leader].pause()
            else:
                await site.network.add(partition([leader], [name for name in SERVERS if name != leader]))

        async def end() -> None:
            if act == "kill":
                site.programs[hurt[0]].start()
            elif act == "pause":
                site.programs[hurt[0]].resume()

        return Fault(f"{act} leader", begin, end, frozenset() if act == "cut" else frozenset(SERVERS))

    return build


def _network(name: str, rules: Callable[[random.Random], tuple[str, list[Rule]]]) -> Build:
    def build(site: Site, rng: random.Random) -> Fault:
        where, chosen = rules(rng)

        async def begin() -> None:
            await site.network.add(chosen)

        return Fault(f"{name} {where}", begin)

    return build


def _isolation(kind: Sequence[str], count: int = 1) -> Callable[[random.Random], tuple[str, list[Rule]]]:
    """Cut machines off from all machines and from each other."""

    def rules(rng: random.Random) -> tuple[str, list[Rule]]:
        chosen = rng.sample(kind, count)
        return " ".join(chosen), partition(chosen, _MACHINES)

    return rules


def _one_way(some: Sequence[str], others: Sequence[str]) -> Callable[[random.Random], tuple[str, list[Rule]]]:
    """Lose one machine's packets to the others, or theirs to it."""

    def rules(rng: random.Random) -> tuple[str, list[Rule]]:
        chosen = rng.choice(some)
        if rng.random() < 0.5:
            return f"from {chosen}", cut([chosen], others)
        return f"to {chosen}", cut(others, [chosen])

    return rules


def _slowness(some: Sequence[str], others: Sequence[str]) -> Callable[[random.Random], tuple[str, list[Rule]]]:
    def rules(rng: random.Random) -> tuple[str, list[Rule]]:
        delay, jitter = rng.uniform(0.02, 0.25), rng.uniform(0.0, 0.1)
        links = [(one, other) for one in some for other in others if one != other]
        found = [Rule(one, other, delay=delay, jitter=jitter) for one, other in links]
        found += [Rule(other, one, delay=delay, jitter=jitter) for one, other in links if some != others]
        return f"{1000 * delay:.0f} ms", found

    return rules


def _lateness(some: Sequence[str]) -> Callable[[random.Random], tuple[str, list[Rule]]]:
    """Delay one machine's packets until its lease has ended."""

    def rules(rng: random.Random) -> tuple[str, list[Rule]]:
        chosen, delay = rng.choice(some), rng.uniform(3.5, 8.0)
        return f"{chosen} by {delay:.0f} s", [Rule(chosen, server, delay=delay) for server in SERVERS]

    return rules


def _losses(rng: random.Random) -> tuple[str, list[Rule]]:
    loss = rng.uniform(0.05, 0.3)
    links = [(one, other) for one in _MACHINES for other in _MACHINES if one != other]
    return f"{100 * loss:.0f}%", [Rule(one, other, loss=loss) for one, other in links]


def _kill_pods(site: Site, rng: random.Random) -> Fault:
    """Kill processes of pods, which the agents start again."""

    async def begin() -> None:
        processes = site.pod_processes()
        for process in rng.sample(processes, min(3, len(processes))):
            site.kill_pod(process)

    return Fault("kill pods", begin)


CATALOGUE: dict[str, Build] = {
    "kill-server": _kill(SERVERS),
    "kill-two-servers": _kill(SERVERS, 2),
    "kill-servers": _kill(SERVERS, 3),
    "restart-server": _restart(SERVERS),
    "pause-server": _pause(SERVERS),
    "stutter-server": _blink(SERVERS),
    "kill-leader": _leader("kill"),
    "pause-leader": _leader("pause"),
    "cut-leader": _leader("cut"),
    "isolate-server": _network("isolate", _isolation(SERVERS)),
    "isolate-two-servers": _network("isolate", _isolation(SERVERS, 2)),
    "one-way-server": _network("lose packets", _one_way(SERVERS, SERVERS)),
    "slow-servers": _network("servers slow by", _slowness(SERVERS, SERVERS)),
    "kill-farm": _kill(FARMS),
    "kill-farms": _kill(FARMS, 3),
    "restart-farm": _restart(FARMS),
    "pause-farm": _pause(FARMS),
    "stutter-farm": _blink(FARMS),
    "isolate-farm": _network("isolate", _isolation(FARMS)),
    "one-way-farm": _network("lose packets", _one_way(FARMS, SERVERS)),
    "slow-farms": _network("farms slow by", _slowness(FARMS, SERVERS)),
    "late-farm": _network("late", _lateness(FARMS)),
    "kill-agent": _kill(NODES),
    "kill-agents": _kill(NODES, 4),
    "restart-agent": _restart(NODES),
    "pause-agent": _pause(NODES),
    "isolate-agent": _network("isolate", _isolation(NODES)),
    "one-way-agent": _network("lose packets", _one_way(NODES, SERVERS)),
    "slow-agents": _network("agents slow by", _slowness(NODES, SERVERS)),
    "late-agent": _network("late", _lateness(NODES)),
    "loss": _network("lose", _losses),
    "kill-pods": _kill_pods,
}
REWINDS = ("snapshot-restore", "older-data", "rcs-deleted", "all-deleted")


LOCAL_AGENTS: dict[str, Build] = {  # only where Consul agents run beside farms and node agents
    "kill-consul-agent": _kill([local_agent(name) for name in (*FARMS, *NODES)]),
    "pause-consul-agent": _pause([local_agent(name) for name in (*FARMS, *NODES)]),
    "restart-consul-agent": _restart([local_agent(name) for name in (*FARMS, *NODES)]),
}


class Saves:
    """Saved data of Consul to rewind to later: snapshots, and copies of the data directories."""

    def __init__(self, site: Site, directory: Path) -> None:
        self._site, self._directory = site, directory
        self._snapshots: list[Path] = []
        self._copies: list[Path] = []
        directory.mkdir(parents=True)

    async def save(self, number: int) -> None:
        """Save both ways; the four newest are kept."""
        snapshot, copy = self._directory / f"{number}.snapshot", self._directory / f"{number}.data"
        ran = await self._site.consul("snapshot", "save", str(snapshot), server=SERVERS[0])
        if ran.code == 0:
            self._snapshots.append(snapshot)
        await asyncio.to_thread(self._site.save_data, copy)
        self._copies.append(copy)
        for old in self._copies[:-4]:
            shutil.rmtree(old)
        self._snapshots, self._copies = self._snapshots[-4:], self._copies[-4:]

    def choose(self, kind: str, rng: random.Random) -> Path:
        return rng.choice(self._snapshots if kind == "snapshot-restore" else self._copies)
