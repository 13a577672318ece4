"""What the probes of farms and engines have in common: the conditions of a member, its session, its views."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client.core import Metric

from controllers.ownership.membership import Membership
from rcfarm.daemon.health import Condition
from rcfarm.telemetry.prometheus import counter, gauge, labelled
from store.kv.session import SessionKeeper
from store.kv.view import TreeView


def ownership_conditions(
    views: Iterable[TreeView[Any]], keeper: SessionKeeper, membership: Membership[Any], kind: str
) -> list[Condition]:
    """Return the conditions under which a member works: it sees the store, holds its session, and is a member.

    `kind`: the plural of what the members are, such as "farms".
    """
    store = ""
    for view in views:
        if view.error is not None:
            store = f"{view.name} can't be read: {view.error}"
            break
        if not view.is_synced:
            store = f"{view.name} has not been read yet"
            break
    held = keeper.state == "held"
    record = membership.view.records.get(membership.key)
    joined = record is not None and record.session is not None and record.session == keeper.session_id
    return [
        Condition("store", not store, store),
        Condition("session", held, "" if held else f"{keeper.state}: {keeper.last_error or 'no session yet'}"),
        Condition("member", joined, "" if joined else f"{membership.me.name} is not among the live {kind}"),
    ]


def session_metrics(keeper: SessionKeeper, prefix: str = "rcfarm") -> Iterator[Metric]:
    """Yield the metrics of a session."""
    yield gauge(f"{prefix}_session_held", "1 while it is safe to act under the session.", keeper.state == "held")
    yield gauge(f"{prefix}_session_lease_seconds", "The lease of the session.", keeper.lease)
    yield counter(f"{prefix}_session_renewals", "Renewals of the session that succeeded.", keeper.renewals)
    yield counter(f"{prefix}_session_losses", "Sessions that the store ended.", keeper.losses)


def view_metrics(views: Iterable[TreeView[Any]], now: float, prefix: str = "rcfarm") -> Iterator[Metric]:
    """Yield one series per kind of view: all shards are one series, with the worst value, and so is all health."""
    groups: dict[str, list[TreeView[Any]]] = {}
    for view in views:
        kind = view.name.partition(" ")[0]
        name = {"shard": "shards", "tasks": "tasks", "health": "health"}.get(kind, view.name)
        groups.setdefault(name, []).append(view)
    ages = {
        name: max((0.0 if view.last_contact is None else now - view.last_contact) for view in group)
        for name, group in groups.items()
    }
    failing = {name: sum(view.error is not None for view in group) for name, group in groups.items()}
    records = {name: sum(len(view.records) for view in group) for name, group in groups.items()}
    bad = {name: sum(len(view.bad) for view in group) for name, group in groups.items()}
    yield labelled(
        f"{prefix}_view_age_seconds",
        "Seconds since the store last answered; grows while nothing changes.",
        "view",
        ages,
    )
    yield labelled(
        f"{prefix}_view_failing", "Views whose last refresh failed, so that they may be stale.", "view", failing
    )
    yield labelled(f"{prefix}_view_records", "Records in the view.", "view", records)
    yield labelled(f"{prefix}_view_undecodable", "Undecodable records, which are left out.", "view", bad)
