"""Explain the state of a Framework: `rcfarm framework explain | history`."""

from __future__ import annotations

from rich.text import Text

from controllers.framework.api.types import FRAMEWORK_NAME
from rcfarm.cli.framework.show import FrameworkName, decoded_from, read
from rcfarm.cli.kit.command import KubeCli
from rcfarm.cli.kit.jobs import LeaseOption, observe, show_history, show_reasons
from rcfarm.cli.kit.output import state
from rcfarm.reports.framework import FrameworkInfo, framework_info
from rcfarm.reports.framework_explain import explain as reasons_of
from rcfarm.reports.jobs import JobReason


async def explain(cli: KubeCli, framework: FrameworkName, lease: LeaseOption = "rcfarm-jobs") -> None:
    """Explain what a Framework and its tasks wait for."""
    info, reasons = await explanation(cli, framework, lease)
    show_reasons(cli, Text.assemble(f"{info.namespace}/{info.name}  ", state(info.state)), reasons)


async def explanation(cli: KubeCli, framework: str, lease: str) -> tuple[FrameworkInfo, list[JobReason]]:
    """Return a Framework, and the reasons for its state. Raises `BadInput`, `KubeError`."""
    obj = await read(cli, framework)
    found = decoded_from(obj)
    observed = await observe(cli, f"{FRAMEWORK_NAME}={framework}", lease)
    return framework_info(found), reasons_of(found, obj, observed)


async def history(cli: KubeCli, framework: FrameworkName) -> None:
    """Show the Events of a Framework and its pods. The API server keeps them for about an hour; the operator's log has
    every retry and deletion."""
    await show_history(cli, await read(cli, framework), (f"{framework}-",))  # no Framework's name has a dash
