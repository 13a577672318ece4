"""How reasons are shown, of whatever kind of object: the code, the detail, its times, and what to do."""

from __future__ import annotations

from collections.abc import Iterable

from rich.text import Text

from rcfarm.cli.kit.output import Output, ago, ahead, one_line
from rcfarm.operations.reasons import ReasonInfo
from store.schema.records import Reason


def print_reasons(out: Output, reasons: Iterable[ReasonInfo]) -> None:
    """Print each reason with its code and times, and below it what to do."""
    for reason in reasons:
        about = f"{reason.about}: " if reason.about else ""
        notes = ["blocks"] if reason.blocking else []
        notes += [f"since {ago(reason.since)}"] if reason.since else []
        notes += [f"next look {left}"] if (left := ahead(reason.next_wake)) else []
        detail = reason.detail + (f" ({', '.join(notes)})" if notes else "")
        out.hanging(Text.assemble(f"  {about}", (f"{reason.code}: ", "yellow")), detail)
        if reason.act:
            out.hanging("    → ", reason.act)


def in_brief(reasons: Iterable[Reason]) -> str:
    """Return the reasons in one line, for a cell of a table."""
    return "; ".join(f"{reason.code}: {one_line(reason.message)}" for reason in reasons)
