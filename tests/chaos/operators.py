"""Operators: they change the fleet at random, by commands and by the functions behind them.

Results of changes are counted, and acknowledged changes are passed to the checker. A change may fail while a fault is
on; an unexpected error is a violation.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rcfarm.operations.errors import RCError
from rcfarm.operations.nodes import NodeError, Nodes
from rcfarm.operations.rcs import ReplicationControllers, Verb
from store.consul.store import ConsulSettings, ConsulStore
from store.kv.protocol import BadRecord, StoreError
from store.schema.keys import Keys
from store.schema.records import ALL_NODES, RCSpec, UpdatePolicy
from tests.chaos.checker import Acknowledged, Checker
from tests.chaos.site import NODES, PROGRAM, SERVERS, Site
from tests.chaos.snapshot import Snapshot

_ACTOR = "operator"
_PODS = {f"web-{number}": f"web-{number}" for number in range(8)} | {
    f"{pod_id}-{letter}": pod_id for pod_id in ("twin", "dup") for letter in ("a", "b", "c")
}  # pod id by RC: twins and dups want the same places
_RIVALS = [rc for rc, pod_id in _PODS.items() if rc != pod_id]
_DAEMON_SETS = {"every-a": "every", "every-b": "every", "all": "all"}  # on all nodes, with a number now and then
_PODS |= _DAEMON_SETS
_SELECTORS = ("", "", "pool=web", "pool in (web,db)", "pool!=web")
_READING = (("rc", "list"), ("status",), ("node", "list"), ("doctor",), ("brake", "status"))
_ASKED: tuple[Verb, ...] = ("pause", "resume", "resume", "promote", "abort")
_EXPLAINED = frozenset({0, 1, 2, 3})  # exit codes
_CHANGERS = 4  # operators who work at the same time
_PAUSE = 0.5  # seconds between two changes of one of them, on average
_PATIENCE = 4.0  # seconds that they wait for an answer
_COMMAND_PAUSE = 0.3  # seconds between two commands, on average


class Operators:
    """`done` counts the changes by their outcome."""

    def __init__(self, site: Site, keys: Keys, checker: Checker, rng: random.Random) -> None:
        self.done: Counter[str] = Counter()
        self._site, self._keys, self._checker, self._rng = site, keys, checker, rng
        settings = [ConsulSettings.from_env(site.url(server), environ={}) for server in SERVERS]
        self._stores = [ConsulStore(replace(each, call_timeout=_PATIENCE)) for each in settings]
        self._specs: dict[str, RCSpec] = {}
        self._versions = 0

    async def close(self) -> None:
        for store in self._stores:
            await store.close()

    def know(self, snapshot: Snapshot) -> None:
        """Take over the specs of a snapshot as what operators know."""
        self._specs = snapshot.specs

    async def populate(self) -> None:
        """Create every RC."""
        for rc in _PODS:
            await self._create(self._stores[0], rc)

    async def work(self) -> None:
        """Change one thing after the other, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(_CHANGERS):
                group.create_task(self._change())
            group.create_task(self._command())

    async def apply(self, documents: list[dict[str, Any]], *, server: str) -> bool:
        """Apply files, as an operator does to restore lost RCs. Return whether it succeeded."""
        text = "\n---\n".join(json.dumps(document) for document in documents)  # JSON is YAML, too
        return await self._run("rc", "apply", "-f", "-", "--yes", "--detach", stdin=text, server=server) == 0

    async def release_brake(self, *, server: str) -> None:
        """Release the brake when `brake status` says that it is on."""
        ran = await self._site.command("brake", "status", "--output", "json", server=server)
        if ran.code == 0 and json.loads(ran.out)["on"]:
            await self._run("brake", "release", "--yes", server=server)

    async def resume(self, rc: str, *, server: str) -> None:
        """Let a rollout go on that an operator has paused or stopped."""
        await self._run("rollout", "resume", rc, "--detach", server=server)

    async def ask(self) -> None:
        """Inspect the converged fleet with one of the read-only commands."""
        await self._run(*self._rng.choice(_READING), server=SERVERS[0])

    async def _change(self) -> None:
        while True:
            await asyncio.sleep(self._rng.expovariate(1 / _PAUSE))
            store = self._rng.choice(self._stores)
            change = self._rng.choices(*zip(*self._changes(store), strict=True))[0]
            outcome = "acknowledged"
            try:
                await change()
            except (StoreError, RCError, NodeError, BadRecord) as error:
                outcome = type(error).__name__
            except Exception as error:
                self._checker.crashed(f"a change by an operator: {error!r}")
            self.done[outcome] += 1

    def _changes(self, store: ConsulStore) -> list[tuple[Callable[[], Awaitable[None]], int]]:
        """Return the possible changes with their weights."""
        absent = sorted(_PODS.keys() - self._specs.keys())
        rcs = ReplicationControllers(store, self._keys, actor=_ACTOR, rng=self._rng)
        nodes = Nodes(store, self._keys, actor=_ACTOR, rng=self._rng)
        rng, node = self._rng, self._rng.choice(NODES)
        rc = rng.choice(_RIVALS) if rng.random() < 0.4 else rng.choice(list(_PODS))

        async def note(changing: Awaitable[RCSpec]) -> None:
            spec = await changing
            self._checker.acknowledged.append(Acknowledged(spec.id, spec.generation))

        async def create() -> None:
            await self._create(store, rng.choice(absent) if absent else rc)

        async def scale(rc: str) -> None:
            now = self._specs[rc].replicas_desired if rc in self._specs else 0
            numbers = [ALL_NODES, ALL_NODES, 2] if rc in _DAEMON_SETS else range(5)
            await note(rcs.set_replicas(rc, rng.choice([number for number in numbers if number != now])))

        async def scale_rivals() -> None:
            outcomes = await asyncio.gather(*map(scale, rng.sample(_RIVALS, 3)), return_exceptions=True)
            raise_first(outcomes)

        async def node_change() -> None:
            change = rng.choice([nodes.uncordon, nodes.uncordon, nodes.cordon, self._evict(nodes)])
            await change(node)

        async def ask_of_rollout() -> None:
            await rcs.request(rc, rng.choice(_ASKED))

        async def relabel() -> None:
            await nodes.set_labels(node, {"pool": rng.choice(["web", "web", "db"])})

        return [
            (create, 6 if absent else 0),
            (lambda: scale(rc), 8),
            (scale_rivals, 4),
            (lambda: note(rcs.set_manifest(rc, self._manifest(_PODS[rc]))), 4),
            (lambda: note(rcs.restart(rc)), 1),
            (lambda: note(rcs.undo(rc)), 1),
            (ask_of_rollout, 4),
            (lambda: note(rcs.set_selector(rc, self._selector(rc))), 2),
            (lambda: note(rcs.set_strategy(rc, rng.choice(["static", "dynamic"]))), 1),
            (lambda: note(rcs.disable(rc)), 1),
            (lambda: note(rcs.enable(rc)), 3),
            (lambda: note(rcs.delete(rc, force=True)), 2),
            (node_change, 2),
            (relabel, 1),
        ]

    @staticmethod
    def _evict(nodes: Nodes) -> Callable[[str], Awaitable[object]]:
        return lambda node: nodes.cordon(node, evict=True)

    async def _create(self, store: ConsulStore, rc: str) -> None:
        spec = await ReplicationControllers(store, self._keys, actor=_ACTOR).create(
            self._manifest(_PODS[rc]),
            rc_id=rc,
            replicas=ALL_NODES if rc in _DAEMON_SETS else self._rng.choice([1, 2, 3]),
            node_selector=self._selector(rc),
            allocation_strategy="static" if rc in _DAEMON_SETS else self._rng.choice(["static", "dynamic"]),
            rc_labels={"team": "chaos"},
            update=UpdatePolicy(min_healthy_time=1.0),  # a drain of several pods fits into the limit of convergence
        )
        self._checker.acknowledged.append(Acknowledged(rc, spec.generation))

    def _selector(self, rc: str) -> str:
        """Return a selector; a daemon set on some nodes would keep most of its pods until an operator confirms."""
        return "" if rc in _DAEMON_SETS else self._rng.choice(_SELECTORS)

    def _manifest(self, pod_id: str) -> bytes:
        """Return another manifest each time, written as `rc apply` writes it."""
        self._versions += 1
        launchable = {"command": [PROGRAM, "1000000"], "stop_timeout": 2}
        fields = {"id": pod_id, "launchables": {"main": launchable}, "config": {"version": self._versions}}
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()

    async def _command(self) -> None:
        while True:
            await asyncio.sleep(self._rng.expovariate(1 / _COMMAND_PAUSE))
            rc, node, replicas = self._rng.choice(list(_PODS)), self._rng.choice(NODES), self._rng.randint(0, 4)
            changing = (
                ("rc", "scale", rc, str(replicas), "--detach"),
                ("rc", "scale", rc, str(replicas), "--timeout", "5"),
                ("rc", "enable", rc),
                ("node", "uncordon", node),
                ("node", "label", node, "rack=r1"),
                ("rc", "explain", rc),
                ("rc", "history", rc),
            )
            await self._run(*self._rng.choice([*changing, *_READING]), server=self._rng.choice(SERVERS))

    async def _run(self, *arguments: str, server: str, stdin: str = "") -> int:
        ran = await self._site.command(*arguments, server=server, stdin=stdin)
        self.done["command" if ran.code == 0 else f"command exit {ran.code}"] += 1
        if ran.code not in _EXPLAINED or "Traceback" in ran.err:
            self._checker.crashed(f"rcfarm {' '.join(arguments)}: exit code {ran.code}: {ran.err[-2000:]}")
        return ran.code


def raise_first(outcomes: Iterable[object]) -> None:
    """Raise the first of the exceptions among the outcomes, if there is one."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


def documents(snapshot: Snapshot, manifests: dict[str, bytes]) -> list[dict[str, Any]]:
    """Return the files from which operators would restore the RCs of a snapshot. `manifests`: by digest."""
    found = []
    for spec in snapshot.specs.values():
        with suppress(KeyError):  # a manifest that may be unused by now
            found.append(
                {
                    "id": spec.id,
                    "replicas": "all" if spec.is_daemon_set else spec.replicas_desired,
                    "node_selector": spec.node_selector,
                    "allocation_strategy": spec.allocation_strategy,
                    "disabled": spec.disabled,
                    "rc_labels": {"team": "chaos"},
                    "manifest": json.loads(manifests[spec.manifest]),
                }
            )
    return found
