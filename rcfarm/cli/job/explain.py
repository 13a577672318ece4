"""Explain the state of a training job: `rcfarm job explain | history`."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from rich.text import Text

from controllers.jobs.gang import VOLCANO_POD_GROUPS
from rcfarm.cli.job.show import JobName, find, selector_of, title
from rcfarm.cli.kit.command import KubeCli
from rcfarm.cli.kit.jobs import LeaseOption, observe, show_history, show_reasons
from rcfarm.cli.kit.output import state
from rcfarm.reports.training import training_info
from rcfarm.reports.training_explain import explain as reasons_of
from store.kube.api.errors import Forbidden, NotFound
from store.kube.api.objects import Object, is_controlled_by, name_of


async def explain(cli: KubeCli, job: JobName, lease: LeaseOption = "rcfarm-jobs") -> None:
    """Explain what a job and its replicas wait for."""
    kind, obj = await find(cli, job)
    groups, observed = await asyncio.gather(_groups(cli, obj), observe(cli, selector_of(kind, obj), lease))
    ours = {name: pod for name, pod in observed.pods.items() if is_controlled_by(pod, obj)}
    reasons = reasons_of(kind, obj, groups, replace(observed, pods=ours))
    show_reasons(cli, Text.assemble(f"{title(kind, obj)}  ", state(training_info(kind, obj).state)), reasons)


async def _groups(cli: KubeCli, job: Object) -> list[Object]:
    """Return the job's PodGroup of Volcano, which holds the creation of its pods, if there is one."""
    try:
        found = await cli.api.get(VOLCANO_POD_GROUPS, name_of(job), cli.namespace)
    except (NotFound, Forbidden):
        return []
    return [found] if is_controlled_by(found, job) else []


async def history(cli: KubeCli, job: JobName) -> None:
    """Show the Events of a job and its pods. The API server keeps them for about an hour; the operator's log has every
    restart and deletion."""
    kind, obj = await find(cli, job)
    types = (obj.get("spec") or {}).get(kind.replica_specs_field) or {}
    await show_history(cli, obj, tuple(f"{name_of(obj)}-{replica_type.lower()}-" for replica_type in types))
