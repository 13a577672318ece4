"""Base classes for plugins: jobs of a web API, blocking calls, and objects in a Kubernetes cluster."""

from controllers.tasks.patterns.kube import (
    AbortBehavior,
    KubeDefaults,
    KubePlugin,
    KubeProperties,
    Target,
    kube_entry,
)
from controllers.tasks.patterns.remote import (
    RemoteError,
    RemoteGone,
    RemoteRefused,
    RemoteThrottled,
    RemoteTransient,
    WebApiConfig,
)
from controllers.tasks.patterns.sync import SyncCall, SyncConfig, SyncPlugin
from controllers.tasks.patterns.webapi import (
    Created,
    ReadContext,
    Recovery,
    Requirement,
    WebApiPlugin,
    webapi_entry,
)

__all__ = [
    "AbortBehavior",
    "Created",
    "KubeDefaults",
    "KubePlugin",
    "KubeProperties",
    "ReadContext",
    "Recovery",
    "RemoteError",
    "RemoteGone",
    "RemoteRefused",
    "RemoteThrottled",
    "RemoteTransient",
    "Requirement",
    "SyncCall",
    "SyncConfig",
    "SyncPlugin",
    "Target",
    "WebApiConfig",
    "WebApiPlugin",
    "kube_entry",
    "webapi_entry",
]
