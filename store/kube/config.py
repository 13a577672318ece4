"""Finding the API server: a kubeconfig, an address, or the pod that this process runs in.

In this order: the kubeconfig that is named, the files of `KUBECONFIG`, `~/.kube/config` if it exists; `server` replaces
the address in it. Without one, `server` alone is used without credentials. Without either, the service account of this
pod. Only kubeconfigs need kubernetes_asyncio, whose import costs a third of a second and 40 MB.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from store.decoding import MAX_FILE_VALUES, Undecodable, load_yaml
from store.kube.access import Access, AccessSource, FixedAccess
from store.kube.errors import NoConfig
from store.tls import TlsContexts

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_DEFAULT_NAMESPACE = "default"


def find_access(
    kubeconfig: str | None = None,
    *,
    context: str | None = None,
    server: str | None = None,
    is_daemon: bool = False,
    environ: Mapping[str, str] = os.environ,
    service_account: Path = SERVICE_ACCOUNT,
) -> AccessSource:
    """Where to read the access from; `kubeconfig` may be a list of paths as in `KUBECONFIG`. Raises `NoConfig`.

    `is_daemon`: a `KUBECONFIG` that names no existing file is passed over with a warning. A command must not do that:
    it would change another cluster than its user means.
    """
    if is_daemon and _names_nothing(kubeconfig, environ):
        import structlog  # the barrier, in every pod of a gang, does without it

        structlog.get_logger(__name__).warning(
            "KUBECONFIG names no existing file; ~/.kube/config or the pod's service account is used instead",
            kubeconfig=environ["KUBECONFIG"],
        )
        environ = {**environ, "KUBECONFIG": ""}
    if paths := _kubeconfig_paths(kubeconfig, environ):
        from store.kube.kubeconfig import Kubeconfig

        return Kubeconfig(paths, context=context, server=server)
    if context:
        raise NoConfig(f"the context {context} needs a kubeconfig file, and there is none; set KUBECONFIG")
    if server:
        return FixedAccess(access_to(server, TlsContexts()))
    if environ.get("KUBERNETES_SERVICE_HOST") and environ.get("KUBERNETES_SERVICE_PORT"):
        return ServiceAccount(environ, service_account)
    raise NoConfig(
        "no Kubernetes API server is configured: name a kubeconfig file, set KUBECONFIG, put one at ~/.kube/config, "
        "or run in a pod with a service account"
    )


def current_namespace(
    kubeconfig: str | None = None,
    *,
    context: str | None = None,
    is_daemon: bool = False,
    environ: Mapping[str, str] = os.environ,
    service_account: Path = SERVICE_ACCOUNT,
) -> str:
    """The namespace that people mean when they name none: the context's, else that of this pod, else `default`.

    What is wrong with a kubeconfig is said by `find_access`; here it counts as silent.
    """
    if is_daemon and _names_nothing(kubeconfig, environ):
        environ = {**environ, "KUBECONFIG": ""}
    if not (paths := _kubeconfig_paths(kubeconfig, environ)):
        try:
            return (service_account / "namespace").read_text().strip() or _DEFAULT_NAMESPACE
        except OSError:
            return _DEFAULT_NAMESPACE
    configs = [_read_yaml(path) for path in paths]
    name = context or next((config["current-context"] for config in configs if config.get("current-context")), None)
    contexts = (each for config in configs for each in config.get("contexts") or ())
    found: dict[str, Any] = next((each for each in contexts if each.get("name") == name), {})
    return str((found.get("context") or {}).get("namespace") or _DEFAULT_NAMESPACE)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = load_yaml(path.read_bytes(), max_values=MAX_FILE_VALUES)
    except (OSError, Undecodable):
        return {}
    return content if isinstance(content, dict) else {}


def access_to(
    server: str,
    tls: TlsContexts,
    *,
    authorization: str = "",
    ca: str | None = None,
    certificate: str | None = None,
    key: str | None = None,
    verify: bool = True,
    server_name: str | None = None,
    proxy: str | None = None,
) -> Access:
    """Access to a URL, or to HOST:PORT, which means https where there are credentials to protect and http elsewhere.

    Without `proxy`, that of the environment counts. Raises `NoConfig` for files that can't be used.
    """
    if "://" not in server:
        server = f"{'https' if authorization or ca or certificate else 'http'}://{server}"
    url = urlsplit(server)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise NoConfig(f"{server} is not the URL of an API server; write https://HOST:PORT")
    context = None
    if url.scheme == "https":
        try:
            context = tls.context(ca, certificate, key, verify=verify)
        except (OSError, ssl.SSLError) as error:
            raise NoConfig(f"can't use the certificates for {server}: {error}") from error
    proxy = proxy or _environment_proxy(url.scheme, url.hostname)
    return Access(server.rstrip("/"), authorization, context, server_name, proxy)


class ServiceAccount:
    """The service account of the pod that this process runs in; the kubelet renews its token in place."""

    short_lived = False

    def __init__(self, environ: Mapping[str, str], directory: Path = SERVICE_ACCOUNT) -> None:
        host, port = environ["KUBERNETES_SERVICE_HOST"], environ["KUBERNETES_SERVICE_PORT"]
        self._server = f"https://{f'[{host}]' if ':' in host else host}:{port}"
        self._token, self._ca = directory / "token", directory / "ca.crt"
        self._tls = TlsContexts()

    @property
    def files(self) -> Sequence[Path]:
        return self._token, self._ca

    async def read(self, *, anew: bool) -> Access:
        try:
            token = self._token.read_text().strip()
        except OSError as error:
            raise NoConfig(
                f"can't read this pod's service account token {self._token}: {error.strerror}; "
                "set automountServiceAccountToken in its spec, or name a kubeconfig"
            ) from error
        if not token:
            raise NoConfig(f"this pod's service account token {self._token} is empty")
        return access_to(self._server, self._tls, authorization=f"Bearer {token}", ca=str(self._ca))


def _kubeconfig_paths(kubeconfig: str | None, environ: Mapping[str, str]) -> list[Path]:
    """The kubeconfig files that count. One that is named and missing is an error, unless others of its list exist."""
    named = kubeconfig or environ.get("KUBECONFIG", "")
    if not named:
        default = Path(environ.get("HOME") or "~").expanduser() / ".kube" / "config"
        return [default] if default.is_file() else []
    if not _exists(named):
        origin = "" if kubeconfig else ", which KUBECONFIG names"
        raise NoConfig(f"there is no kubeconfig file {named}{origin}")
    return _listed(named)


def _names_nothing(kubeconfig: str | None, environ: Mapping[str, str]) -> bool:
    """Whether `KUBECONFIG` counts, and names files of which none exists."""
    named = environ.get("KUBECONFIG", "")
    return bool(not kubeconfig and named and not _exists(named))


def _exists(named: str) -> bool:
    return any(path.exists() for path in _listed(named))


def _listed(named: str) -> list[Path]:
    return [Path(path).expanduser() for path in named.split(os.pathsep) if path]


def _environment_proxy(scheme: str, host: str) -> str | None:
    return None if proxy_bypass(host) else getproxies().get(scheme)
