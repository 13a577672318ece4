"""Show the state of RCs and of their pods: `rcfarm rc status`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from rich.text import Text

from rcfarm.cli import ERROR
from rcfarm.cli.kit.command import Cli, explain
from rcfarm.cli.kit.json_views import RCStatusInfo, pod_info, rc_info, unanswered
from rcfarm.cli.kit.output import Output, ago, state
from rcfarm.cli.kit.watch import Watch, keep_showing
from rcfarm.cli.rc.several import OfLabels, RCIds, chosen
from rcfarm.cli.rc.show import print_last_words, print_reasons
from rcfarm.operations import rc_snapshot
from rcfarm.operations.errors import NoSuchRC
from rcfarm.operations.fleet import read_farms
from store.errors import RcfarmError
from store.kv.protocol import Unavailable


async def status(cli: Cli, rc: RCIds = None, selector: OfLabels = "", watch: Watch = False) -> int:
    """Show the state of RCs, the reasons for it, and their pods."""
    ids = await chosen(cli, rc, selector)
    as_list = len(ids) > 1 or bool(selector)
    if watch:
        return await _watched(cli, ids, as_list=as_list)
    found, failed = list[RCStatusInfo](), False
    for rc_id in ids:
        try:
            found.append(await _status(cli, rc_id))
        except RcfarmError as error:
            if not as_list or isinstance(error, Unavailable):
                raise
            cli.out.error(explain(error)[0], about=f"rc {rc_id}")
            failed = True
    cli.out.show(found if as_list else found[0], lambda: _render(cli.out, found), (status.rc.id for status in found))
    return ERROR if failed else 0


async def _watched(cli: Cli, ids: Sequence[str], *, as_list: bool) -> int:
    """Show the RCs until all of them are gone."""
    folders, groups = [cli.keys.rc(rc_id) for rc_id in ids], sorted({cli.keys.health_of(rc_id) for rc_id in ids})
    verdicts, seen = tuple(f"/{rc_id}" for rc_id in ids), set[str]()

    async def read() -> list[RCStatusInfo]:
        found = []
        for rc_id in ids:
            try:
                found.append(await _status(cli, rc_id))
                seen.add(rc_id)
            except NoSuchRC:
                if rc_id not in seen:
                    raise
        return found

    return await keep_showing(
        cli,
        [*(folders if len(ids) == 1 else [cli.keys.rcs]), *groups],
        read,
        _render,
        _items,
        concerns=lambda key: key.startswith(tuple(folders)) or key.endswith(verdicts),
        until=lambda found: not found,
        document=lambda found: found if as_list else next(iter(found), None),
    )


async def _status(cli: Cli, rc_id: str) -> RCStatusInfo:
    snap = await cli.rcs.snapshot(rc_id)
    realities, farms = await asyncio.gather(
        cli.rcs.realities(rc_snapshot.pod_id_of(snap)), read_farms(cli.store, cli.keys)
    )
    pods = [pod_info(pod) for pod in rc_snapshot.pods(snap, realities)]
    return RCStatusInfo(rc=rc_info(snap, farms.farms), pods=pods)


def _render(out: Output, found: Sequence[RCStatusInfo]) -> None:
    for number, each in enumerate(found):
        if number:
            out.line()
        info, pods = each.rc, each.pods
        out.line(Text.assemble(f"{info.id}  ", state(info.state), f"  {info.counts}"))
        owner = info.owner
        held = f"{owner.farm} since {ago(owner.since)}" if owner and owner.held else "none"
        behind = " (its owner has not acted on it yet)" if info.observed_generation < info.generation else ""
        out.line(f"owner: {held}; generation {info.generation}{behind}; updated {ago(info.updated_at)}")
        print_reasons(out, info.reasons)
        if info.lock:
            why = f"{info.lock.holder}, {ago(info.lock.since)}: {info.lock.reason}"
            out.hanging("  ", f"locked by {why}; `rcfarm rc unlock {info.id}` removes the lock")
        elif info.mutation_holder:
            out.line(f"  being changed by {info.mutation_holder}")
        if pods:
            out.line()
        dead, shows_use = unanswered(info.reasons), any(pod.used() for pod in pods)
        rows: list[list[str | Text]] = []
        for pod in pods:
            processes = ", ".join(
                f"{name} {process.state}" + (f" (pid {process.pid})" if process.pid else "")
                for name, process in sorted(pod.launchables.items())
            )
            ports = ", ".join(
                f"{pod.address}:{port}" if pod.address else f"{name} {port}" for name, port in pod.ports.items()
            )
            cells: list[str | Text] = [pod.node, state(pod.state), state(pod.health), processes or "-", ports or "-"]
            cells += [pod.used() or "-"] if shows_use else []
            rows.append([*cells, pod.manifest[:12] or "-", ago(pod.health_since), "; ".join(pod.details(dead))])
        use = ["USED"] if shows_use else []
        out.table(("NODE", "POD", "HEALTH", "PROCESSES", "ADDRESS", *use, "+MANIFEST", "+SINCE", "DETAIL"), rows)
        print_last_words(out, pods)


def _items(found: Sequence[RCStatusInfo]) -> Mapping[str, str]:
    """Return each RC and each of its pods with its state in a line that changes only when that does."""
    items = {}
    for each in found:
        info, dead = each.rc, unanswered(each.rc.reasons)
        codes = ", ".join(sorted({reason.code for reason in info.reasons}))
        items[f"rc {info.id}"] = f"{info.state}, {info.counts}" + (f" ({codes})" if codes else "")
        for pod in each.pods:
            ended = "its agent does not answer" if pod.node in dead else "" if pod.placed else "leaving"
            restarts = f"{pod.restarts} restarts" if pod.restarts else ""
            words = ", ".join(filter(None, (pod.state, f"health {pod.health}", restarts, ended)))
            items[f"rc {info.id} on {pod.node}"] = words
    return items
