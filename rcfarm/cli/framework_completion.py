"""Completion of Frameworks' names. A shell must not hang: it gets nothing rather than a late answer."""

from __future__ import annotations

import asyncio
from typing import Any

TIME_LIMIT = 2.0  # seconds; reading a kubeconfig alone may take half of one


def complete_framework(ctx: Any, incomplete: str) -> list[str]:
    """Names in the namespace that begin with `incomplete`."""
    params = ctx.params
    try:
        return asyncio.run(_names(params.get("namespace"), params.get("kubeconfig"), params.get("context"), incomplete))
    except Exception:  # completion has nobody to tell: whatever is wrong, the command itself will say it
        return []


async def _names(namespace: str | None, kubeconfig: str | None, context: str | None, incomplete: str) -> list[str]:
    from controllers.framework.constants import FRAMEWORKS
    from store.kube.client import KubeClient
    from store.kube.config import current_namespace
    from store.kube.objects import name_of

    async with asyncio.timeout(TIME_LIMIT), await KubeClient.connect(kubeconfig, context=context) as api:
        where = namespace or current_namespace(kubeconfig, context=context)
        names = map(name_of, (await api.list(FRAMEWORKS, where)).items)
        return sorted(name for name in names if name.startswith(incomplete))
