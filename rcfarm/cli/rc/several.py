"""One command on several RCs: those that are named, or those whose labels match a selector.

Each RC is changed and reported for itself: an error of one is reported with its name, and the others go on. All are
changed first, one after the other, and then followed, a few at a time: each is watched on connections of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, TypeVar

import typer

from rcfarm.cli import ERROR, NOT_FULLY_PLACED
from rcfarm.cli.kit.command import Cli, explain
from rcfarm.cli.kit.completion import complete_rc
from rcfarm.cli.kit.json_views import Outcome
from rcfarm.cli.kit.options import UsageProblem
from rcfarm.cli.kit.output import count
from rcfarm.cli.rc.follow import Say
from rcfarm.operations.errors import NoSuchRC
from store.errors import RcfarmError
from store.kv.protocol import Unavailable
from store.schema.selectors import Selector

T = TypeVar("T")

FOLLOWED_AT_ONCE = 4  # each takes two of the command's connections


def _rc_id(text: str) -> str:
    if text.startswith("-"):  # `scale` takes negative numbers, so that the parser lets unknown options pass
        raise typer.BadParameter(f"{text!r} is neither an option nor the id of an RC")
    return text


RCIds = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RC]...",
        help="The ids of RCs; or use -l.",
        parser=_rc_id,
        autocompletion=complete_rc,
        show_default=False,
    ),
]
OfLabels = Annotated[
    str,
    typer.Option(
        "--selector", "-l", metavar="SELECTOR", help="In place of ids: all RCs whose labels match, as in team=web."
    ),
]


async def chosen(cli: Cli, names: Sequence[str] | None, selector: str) -> list[str]:
    """Return the ids of the RCs that a command line means. Raises `UsageProblem`, `BadSelector`, and `NoSuchRC` for a
    selector that matches none."""
    if bool(names) == bool(selector):
        raise UsageProblem("name the RCs, or choose them by their labels with -l SELECTOR; not both")
    if names:
        return list(dict.fromkeys(names))
    wanted = Selector.parse(selector)
    found = [spec.id for spec in (await cli.rcs.list()).specs if wanted.matches(spec.rc_labels)]
    if not found:
        raise NoSuchRC(f"no rc has labels that match {selector!r}; `rcfarm rc list -o wide` shows the labels of each")
    return found


async def change_each(
    cli: Cli,
    ids: Sequence[str],
    change: Callable[[str], Awaitable[T]],
    follow: Callable[[T, Say | None], Awaitable[Outcome]],
) -> list[Outcome]:
    """Change each RC, and then follow each to its outcome. A single one raises its error; of several, the error is
    reported and kept in the outcome."""
    if len(ids) == 1:
        return [await follow(await change(ids[0]), None)]
    done: dict[str, T] = {}
    failed: dict[str, Outcome] = {}
    for number, rc_id in enumerate(ids):
        try:
            done[rc_id] = await change(rc_id)
        except RcfarmError as error:
            failed[rc_id] = _failed(cli, rc_id, error)
            if isinstance(error, Unavailable):
                rest = ids[number + 1 :]
                if rest:
                    cli.out.note(f"not tried: {', '.join(rest)}")
                failed |= {each: Outcome(id=each, action="not tried", rc=None, error=str(error)) for each in rest}
                break
    gate, texts = asyncio.Semaphore(FOLLOWED_AT_ONCE), dict[str, str]()

    with cli.out.progress("") as say:

        async def followed(rc_id: str, changed: T) -> Outcome:
            def note(text: str) -> None:
                texts[rc_id] = f"rc {rc_id}: {text}"
                say("; ".join(texts.values()) if cli.out.stderr.is_terminal else texts[rc_id])

            async with gate:
                try:
                    return await follow(changed, note)
                except RcfarmError as error:
                    return _failed(cli, rc_id, error)
                finally:
                    texts.pop(rc_id, None)

        found = await asyncio.gather(*(followed(rc_id, changed) for rc_id, changed in done.items()))
    by_id = {outcome.id: outcome for outcome in found} | failed
    return [by_id[rc_id] for rc_id in ids]


def _failed(cli: Cli, rc_id: str, error: RcfarmError) -> Outcome:
    line = explain(error)[0]
    named = line if f"rc {rc_id}" in line else f"rc {rc_id}: {line}"
    cli.out.error(named, about=f"rc {rc_id}")
    return Outcome(id=rc_id, action="failed", rc=None, error=named)


def announce(cli: Cli, what: str, lines: Sequence[str]) -> None:
    """List what a change will hit, before it is confirmed."""
    cli.out.note(f"{what} {count(len(lines), 'RC')}:")
    for line in lines:
        cli.out.note(f"  {line}")


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """Return 1 if a change failed, 2 if one that was followed is not complete, else 0."""
    if any(outcome.error for outcome in outcomes):
        return ERROR
    return NOT_FULLY_PLACED if any(outcome.complete is False for outcome in outcomes) else 0
