"""`rcfarm replay`: decide once more what a farm has decided, from its decision log, with the running code.

It reads the log's folder and nothing else: no store, no farm. The id of a decision is in the audit events of what it
changed; `rcfarm rc history` shows it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from rcfarm.cli import ERROR
from rcfarm.cli.kit.command import LocalCli, local_command
from rcfarm.cli.kit.completion import complete_rc
from rcfarm.cli.kit.options import Since, UsageProblem, parse_time
from rcfarm.cli.kit.output import Output, count, state, timestamp
from rcfarm.cli.rc.show import print_reasons
from rcfarm.farm.decisions import Entry
from rcfarm.farm.planner import PlanInput
from rcfarm.farm.replay import CannotReplay, Logged, read, replayed, segments
from rcfarm.operations.errors import BadInput
from rcfarm.operations.fleet import listed
from store.open import DECISION_LOG, dev_directory
from store.schema.records import Reason

app = typer.Typer(rich_markup_mode=None)

DIFFERENT = 2
VERSION = version("rcfarm")
SHOWN_NODES = 6
VERBS = {
    "add": "add",
    "adopt": "adopt",
    "remove": "remove",
    "repair": "repair",
    "update": "change",
    "surge": "add beyond the replicas",
}


class DecisionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A decision of a farm. `transaction`: the index of the one that wrote it, 0: nothing was written, or it was
    refused. `plan`: what was to be done, in words; `state`: what the RC's status was to be."""

    id: str
    at: str
    rc: str
    farm: str
    version: str
    transaction: int
    state: str
    plan: str
    reasons: list[Reason]


class ReplayInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A decision, decided once more. `inputs`: the digest of its input, which is in `given`. `differences`: for each
    field of the plan that is another one now, the logged value and that of the running code."""

    decision: DecisionInfo
    inputs: str
    identical: bool
    given: dict[str, Any]
    differences: dict[str, tuple[Any, Any]]


class ReplaySummary(msgspec.Struct, frozen=True, kw_only=True):
    """Many decisions, decided once more. `different`: the ids of those that the running code decides otherwise.
    `unreadable`: what could not be restored, or read."""

    decisions: int
    identical: int
    different: list[str]
    unreadable: list[str]


async def replay(
    cli: LocalCli,
    decision: Annotated[str, typer.Argument(metavar="[ID]", help="The decision's id.", show_default=False)] = "",
    rc: Annotated[
        str, typer.Option("--rc", metavar="RC", help="List the decisions of this RC.", autocompletion=complete_rc)
    ] = "",
    since: Since = "",
    everything: Annotated[bool, typer.Option("--all", help="Decide every one once more, and count.")] = False,
    log: Annotated[
        Path | None,
        typer.Option(
            "--log",
            metavar="DIR",
            envvar="RCFARM_FARM_DECISION_LOG",
            help="The farm's decision log; default: that of `rcfarm dev`.",
        ),
    ] = None,
) -> int:
    """Decide once more what a farm has decided, with the running code, and compare.

    Exits with 0 when the plan is identical, 2 when it differs, and 1 when a decision can't be read.
    """
    start = parse_time("--since", since)
    if bool(decision) == bool(rc or since or everything):
        raise UsageProblem("name a decision, or say which: --rc RC, --since TIME or --all; not both")
    directory = log or _log_of_dev()
    if decision:
        return _one(cli, directory, decision)

    def wanted(entry: Entry) -> bool:
        return (not rc or entry.rc == rc) and (start is None or entry.at >= start.timestamp())

    unreadable: list[str] = []
    found = (one for path in segments(directory) for one in _read(path, unreadable, wanted))
    if everything:
        return _summary(cli, found, unreadable)
    infos = [_info(one) for one in found]
    rows = (
        (info.id, info.at, info.rc, state(info.state), info.plan, ", ".join(sorted({r.code for r in info.reasons})))
        for info in infos
    )
    cli.out.show(infos, lambda: cli.out.table(("DECISION", "TIME", "RC", "STATE", "PLAN", "REASONS"), rows))
    _note(cli.out, unreadable)
    if not infos:
        cli.out.note("the log has no such decision")
    return ERROR if unreadable else 0


def _log_of_dev() -> Path:
    """Return the log of the `rcfarm dev` that the other commands talk to."""
    scheme, _, directory = os.environ.get("RCFARM_STORE", "").partition(":")
    return (Path(directory) if scheme == "embedded" and directory else dev_directory()) / DECISION_LOG


def _one(cli: LocalCli, directory: Path, decision: str) -> int:
    unreadable: list[str] = []
    newest_first = reversed(segments(directory))
    found = (one for path in newest_first for one in _read(path, unreadable, lambda entry: entry.id == decision))
    logged = next(found, None)
    if logged is None:
        _note(cli.out, unreadable)
        raise BadInput(f"{directory} has no decision {decision}; `rcfarm replay --rc RC` lists those of an RC")
    again = replayed(logged)
    info = ReplayInfo(
        decision=_info(logged),
        inputs=logged.inputs,
        identical=not again.differs,
        given=logged.given,
        differences=dict(again.differs),
    )

    def render() -> None:
        out, known = cli.out, info.decision
        wrote = f"transaction {known.transaction}" if known.transaction else "nothing was written"
        out.line(f"decision {known.id} of rc {known.rc}, by {known.farm} ({known.version}), {known.at}")
        out.line(f"  {wrote}")
        out.line(f"inputs {info.inputs}")
        for name, text in _inputs(again.given):
            out.hanging(f"  {name}: ", text)
        out.line(f"plan: {known.plan}")
        out.line(f"  state: {known.state}")
        print_reasons(out, known.reasons)
        if info.identical:
            out.line(f"identical: version {VERSION} decides the same")
            return
        out.line(f"different: version {VERSION} decides otherwise")
        for name, (before, now) in info.differences.items():
            out.hanging(f"  {name}: ", f"{_value(before)} was logged, now it is {_value(now)}")

    cli.out.show(info, render)
    return DIFFERENT if again.differs else 0


def _summary(cli: LocalCli, found: Iterator[Logged], unreadable: list[str]) -> int:
    different, identical = [], 0
    for logged in found:
        try:
            differs = replayed(logged).differs
        except CannotReplay as error:
            unreadable.append(str(error))
            continue
        if differs:
            different.append(logged.id)
        identical += not differs
    total = identical + len(different)
    summary = ReplaySummary(decisions=total, identical=identical, different=different, unreadable=unreadable)
    of_them = f"; different: {listed(different, SHOWN_NODES)}" if different else ""
    sentence = f"{identical} of {count(total, 'decision')} identical with version {VERSION}{of_them}"
    cli.out.show(summary, lambda: cli.out.line(sentence))
    _note(cli.out, unreadable)
    return ERROR if unreadable else DIFFERENT if different else 0


def _read(path: Path, unreadable: list[str], wanted: Callable[[Entry], bool]) -> Iterator[Logged]:
    """Yield the wanted decisions of a segment, and collect what can't be read."""
    try:
        yield from read(path, unreadable.append, wanted)
    except CannotReplay as error:
        unreadable.append(str(error))


def _note(out: Output, unreadable: list[str]) -> None:
    for each in unreadable[:SHOWN_NODES]:
        out.note(f"left out: {each}")
    if len(unreadable) > SHOWN_NODES:
        out.note(f"left out: {len(unreadable) - SHOWN_NODES} more")


def _info(logged: Logged) -> DecisionInfo:
    """Return a decision, also one of another version, as it is shown."""
    decision = logged.decision
    plan = [f"{verb} {listed(nodes, SHOWN_NODES)}" for name, verb in VERBS.items() if (nodes := decision.get(name))]
    if decision.get("transfer"):
        old, new = decision["transfer"]
        plan.append(f"move {old} to {new or 'a node that is still to be allocated'}")
    if record := (decision.get("rolled") or {}).get("record"):
        plan.append(f"rollout of revision {record['revision']}: {record['state']}")
    return DecisionInfo(
        id=logged.id,
        at=timestamp(logged.at),
        rc=logged.rc,
        farm=logged.farm,
        version=logged.version,
        transaction=logged.index,
        state=decision.get("state", ""),
        plan="; ".join(plan) or "nothing",
        reasons=msgspec.convert(decision.get("reasons", []), list[Reason]),
    )


def _inputs(given: PlanInput) -> Iterator[tuple[str, str]]:
    """Yield the name and a short text of each input that is not empty."""
    spec, rollout, nodes = given.spec, given.rollout, given.eligibility
    flags = [name for name in ("disabled", "deleting") if getattr(spec, name)]
    replicas = "replicas: all" if spec.is_daemon_set else count(spec.replicas_desired, "replica")
    about = [replicas, f"revision {spec.revision}", f"manifest {spec.manifest[:12]}", *flags]
    yield "spec", ", ".join(about)
    health = Counter(pod.health if pod.manifest else "intent lost" for pod in given.current.values())
    counts = ", ".join(f"{number} {word}" for word, number in sorted(health.items()))
    yield "pods", f"{len(given.current)} placed{f' ({counts})' if counts else ''}"
    yield "nodes", f"{len(nodes.eligible)} eligible, {len(nodes.placeable)} of them may take pods"
    if rollout:
        yield "rollout", f"revision {rollout.revision}, {rollout.state}"
    if given.request:
        yield "request", f"{given.request.verb} of revision {given.request.revision}"
    shown = {"spec", "current", "eligibility", "rollout", "request", "ages"}  # the ages of pods are in the JSON only
    shown |= set() if spec.is_daemon_set else {"unchanged"}
    for name in sorted(PlanInput.__dataclass_fields__.keys() - shown):
        value = getattr(given, name)
        if name == "now":
            yield name, timestamp(value)
        elif isinstance(value, str):
            yield from ((name, value),) if value else ()
        elif isinstance(value, Mapping | list | tuple | set | frozenset):
            yield from ((name, listed(sorted(map(str, value)), SHOWN_NODES)),) if value else ()
        elif value:
            yield name, str(value)


def _value(value: Any) -> str:
    """Return a value of a plan in short."""
    text: str = msgspec.json.encode(value).decode()
    return text if len(text) <= 300 else f"{text[:299]}…"


local_command(app, "replay")(replay)
