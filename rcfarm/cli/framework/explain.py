"""Explain the state of a Framework: `rcfarm framework explain | history`."""

from __future__ import annotations

from rich.text import Text

from controllers.framework.api.types import FRAMEWORK_NAME
from rcfarm.cli.framework.show import FrameworkName, decoded_from, read
from rcfarm.cli.kit.command import KubeCli
from rcfarm.cli.kit.jobs import LeaseOption, observe, show_history, show_reasons
from rcfarm.cli.kit.output import state
from rcfarm.reports.framework import NO_STATE
from rcfarm.reports.framework_explain import explain as reasons_of
from store.kube.api.objects import key_of


async def explain(cli: KubeCli, framework: FrameworkName, lease: LeaseOption = "rcfarm-jobs") -> None:
    """Explain what a Framework and its tasks wait for."""
    obj = await read(cli, framework)
    found = decoded_from(obj)
    observed = await observe(cli, f"{FRAMEWORK_NAME}={framework}", lease)
    where = found.status.state if found.status else NO_STATE
    show_reasons(cli, Text.assemble(f"{key_of(obj)}  ", state(str(where))), reasons_of(found, obj, observed))


async def history(cli: KubeCli, framework: FrameworkName) -> None:
    """Show the Events of a Framework and its pods. The API server keeps them for about an hour; the operator's log has
    every retry and deletion."""
    await show_history(cli, await read(cli, framework), (f"{framework}-",))  # no Framework's name has a dash
