"""Completion of ids and names from the store. A shell must not hang: it gets nothing rather than a late answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

TIME_LIMIT = 0.8  # seconds


def complete_rc(ctx: Any, incomplete: str) -> list[str]:
    """RC ids that begin with `incomplete`."""
    return _complete(ctx, incomplete, lambda keys: (keys.rcs, _rc_of))


def complete_node(ctx: Any, incomplete: str) -> list[str]:
    """Node names that begin with `incomplete`."""
    return _complete(ctx, incomplete, lambda keys: (keys.nodes, _node_of))


def _rc_of(rest: str) -> str:
    """`<shard>/<rc>/spec` → the RC; other keys are none."""
    parts = rest.split("/")
    return parts[1] if len(parts) == 3 and parts[2] == "spec" else ""


def _node_of(rest: str) -> str:
    """`<node>/spec` → the node; other keys are none."""
    name, _, leaf = rest.partition("/")
    return name if leaf == "spec" else ""


def _complete(ctx: Any, incomplete: str, where: Callable[[Any], tuple[str, Callable[[str], str]]]) -> list[str]:
    try:
        return asyncio.run(_names(ctx.params, incomplete, where))
    except Exception:  # completion has nobody to tell: whatever is wrong, the command itself will say it
        return []


async def _names(
    params: dict[str, Any], incomplete: str, where: Callable[[Any], tuple[str, Callable[[str], str]]]
) -> list[str]:
    from rcfarm.cli.command import Options, open_store
    from store.keys import Keys

    options = Options(params.get("store") or "", params.get("root") or "rcfarm", params.get("token_file"))
    prefix, name_of = where(Keys(options.root))
    async with asyncio.timeout(TIME_LIMIT):
        store = open_store(options)
        try:
            names = {name_of(key.removeprefix(prefix)) for key in await store.keys(prefix)}
        finally:
            await store.close()
    return sorted(name for name in names if name and name.startswith(incomplete))
