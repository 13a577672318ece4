"""What every role on Kubernetes begins with: access to the API server, clients and an election.

An election has a client of its own: its renewals wait neither for the work's rate limit nor for its connections.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple, Protocol

from prometheus_client import CollectorRegistry

from rcfarm.config import KubeSettings
from rcfarm.jobs_settings import lease_in
from rcfarm.kube_metrics import RestClientMetrics
from rcfarm.roles import VERSION
from store.kube.access import Credentials
from store.kube.api import KubeApi
from store.kube.client import KubeClient
from store.kube.config import current_namespace, find_access
from store.kube.lease import Election
from store.kube.limits import Limits


class LeaseSettings(Protocol):
    """The settings of an election, whichever role it is for. Durations in seconds."""

    @property
    def lease(self) -> str: ...
    @property
    def lease_duration(self) -> float: ...
    @property
    def renew_deadline(self) -> float: ...
    @property
    def retry_period(self) -> float: ...


class Clients(NamedTuple):
    """`lease_api`: what the election uses."""

    api: KubeApi
    lease_api: KubeApi
    requests: RestClientMetrics


@asynccontextmanager
async def clients(
    name: str, kube: KubeSettings, lease: LeaseSettings, registry: CollectorRegistry
) -> AsyncIterator[Clients]:
    """Clients that call themselves `name`, closed at the end. Raises `NoConfig`."""
    server = kube.server or os.environ.get("KUBE_APISERVER_ADDRESS")
    source = find_access(kube.kubeconfig or None, context=kube.context or None, server=server or None, is_daemon=True)
    credentials = await Credentials.open(source)
    requests = RestClientMetrics(registry, credentials.server)
    agent = f"{name}/{VERSION}"
    limits = Limits(call_timeout=kube.call_timeout, qps=kube.qps, burst=kube.burst)
    lease_limits = Limits(call_timeout=lease.renew_deadline, max_connections=2)
    async with (
        KubeClient(credentials, user_agent=agent, metrics=requests, limits=limits) as api,
        KubeClient(credentials, user_agent=agent, metrics=requests, limits=lease_limits) as lease_api,
    ):
        yield Clients(api, lease_api, requests)


def new_election(settings: LeaseSettings, kube: KubeSettings, api: KubeApi) -> Election | None:
    """None when the settings want none."""
    lease = lease_in(
        settings.lease, current_namespace(kube.kubeconfig or None, context=kube.context or None, is_daemon=True)
    )
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
