"""The parts of the roles on Kubernetes, which have clients of an API server in place of a store.

An election has its own client: its renewals wait neither for the work's rate limit nor for its connections.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from rcfarm.config.kube import ElectionSettings
from rcfarm.config.settings import KubeSettings
from rcfarm.roles.base import VERSION
from rcfarm.telemetry.kube import RestClientMetrics
from store.kube.api.protocol import KubeApi
from store.kube.client.client import KubeClient
from store.kube.client.credentials import AccessSource, current_namespace, find_access
from store.kube.client.transport import Credentials, Limits
from store.kube.leaderelection.election import Election, Lead


def access_of(kube: KubeSettings) -> AccessSource:
    """Return where the access to the API server of the settings is. Raises `NoConfig`."""
    server = kube.server or os.environ.get("KUBE_APISERVER_ADDRESS")
    return find_access(kube.kubeconfig or None, context=kube.context or None, server=server or None, is_daemon=True)


def limits_of(kube: KubeSettings) -> Limits:
    """Return the limits of a client's calls."""
    return Limits(call_timeout=kube.call_timeout, qps=kube.qps, burst=kube.burst)


class Clients(NamedTuple):
    """The clients of a role. `lease_api`: the client of the election."""

    api: KubeApi
    lease_api: KubeApi
    requests: RestClientMetrics


@asynccontextmanager
async def clients(
    name: str, kube: KubeSettings, election: ElectionSettings, registry: CollectorRegistry
) -> AsyncIterator[Clients]:
    """Yield clients with the user agent `name`, closed at the end. Raises `NoConfig`."""
    credentials = await Credentials.open(access_of(kube))
    requests = RestClientMetrics(registry, credentials.access.server)
    agent, limits = f"{name}/{VERSION}", limits_of(kube)
    lease_limits = Limits(call_timeout=election.renew_deadline, max_connections=2)
    async with (
        KubeClient(credentials, user_agent=agent, metrics=requests, limits=limits) as api,
        KubeClient(credentials, user_agent=agent, metrics=requests, limits=lease_limits) as lease_api,
    ):
        yield Clients(api, lease_api, requests)


async def run_elected(election: Election | None, work: Lead) -> None:
    """Do the work, until cancelled: at once without an election, else whenever this replica leads."""
    if election is None:
        await work()
    else:
        await election.run(work)


def new_election(settings: ElectionSettings, kube: KubeSettings, api: KubeApi) -> Election | None:
    """Return the election of the settings, or None when it is off."""
    lease = settings.lease_in(current_namespace(kube.kubeconfig or None, context=kube.context or None, is_daemon=True))
    if lease is None:
        return None
    return Election(
        api,
        lease.namespace,
        lease.name,
        f"{socket.gethostname()}_{uuid.uuid4()}",
        lease_duration=settings.lease_duration,
        renew_deadline=settings.renew_deadline,
        retry_period=settings.retry_period,
    )
