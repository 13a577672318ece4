"""The address and credentials of the API server: where they are found, and how they are read.

The server is looked for in this order: the given kubeconfig, the files of `KUBECONFIG`, `~/.kube/config` if it exists;
`server` replaces the address in it. Without one, `server` alone is used without credentials. Without either, the
service account of this pod. Only kubeconfigs need kubernetes_asyncio, whose import costs a third of a second and 40 MB.

A kubeconfig is read by kubernetes_asyncio's loader: tokens, certificates, exec plugins, auth providers. A new loader
is made when a file changed or the server refused the credentials; the same one is used again while only time passes,
which renews the expiring credentials of an exec plugin or a provider.

A TLS context is built again only when the content of its files has changed, and a connection is reused only under the
context that it was made with: so a new client certificate means new connections, and the old ones idle away.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from store.decoding import MAX_FILE_VALUES, Undecodable, load_yaml
from store.kube.api.errors import NoConfig
from store.tls import TlsContexts

if TYPE_CHECKING:
    from kubernetes_asyncio.config.kube_config import KubeConfigLoader

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PLUGIN_TIMEOUT = 60.0  # seconds; an exec plugin may ask a far identity provider
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
    """Return the source of the access; `kubeconfig` may be a list of paths as in `KUBECONFIG`. Raises `NoConfig`.

    `is_daemon`: a `KUBECONFIG` that names no existing file is passed over with a warning. A command must not do that:
    it would change another cluster than its user means.
    """
    paths = _kubeconfig_paths(kubeconfig, environ, is_daemon)
    named = "" if kubeconfig else environ.get("KUBECONFIG", "")
    if named and not any(path.exists() for path in _listed(named)):
        import structlog  # the barrier, in every pod of a gang, does without it

        structlog.get_logger(__name__).warning(
            "KUBECONFIG names no existing file; ~/.kube/config or the pod's service account is used instead",
            kubeconfig=named,
        )
    if paths:
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
    """Return the default namespace: the context's, else that of this pod, else `default`.

    `find_access` reports errors of a kubeconfig; here a broken one counts as one without a namespace.
    """
    if not (paths := _kubeconfig_paths(kubeconfig, environ, is_daemon)):
        try:
            return (service_account / "namespace").read_text().strip() or _DEFAULT_NAMESPACE
        except OSError:
            return _DEFAULT_NAMESPACE
    configs: list[dict[str, Any]] = []
    for path in paths:
        with suppress(OSError, Undecodable):
            content = load_yaml(path.read_bytes(), max_values=MAX_FILE_VALUES)
            configs += [content] if isinstance(content, dict) else []
    name = context or next((config["current-context"] for config in configs if config.get("current-context")), None)
    contexts = (each for config in configs for each in config.get("contexts") or ())
    found: dict[str, Any] = next((each for each in contexts if each.get("name") == name), {})
    return str((found.get("context") or {}).get("namespace") or _DEFAULT_NAMESPACE)


@dataclass(frozen=True, slots=True)
class Access:
    """The API server's address and our credentials.

    `server`: its URL without a slash at the end. `authorization`: the header's value, "" to send none. `tls`: for
    https. `server_name`: the name that the server's certificate must have, when that is not the URL's host.
    """

    server: str
    authorization: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None
    server_name: str | None = None
    proxy: str | None = field(default=None, repr=False)  # may carry a password


class AccessSource(Protocol):
    """A source of access data. `files`: those that the last reading depended on. `short_lived`: whether the access may
    expire without a change of any file, so that it must be read again in time."""

    files: Sequence[Path]
    short_lived: bool

    async def read(self, *, fresh: bool) -> Access:
        """Read the access. `fresh`: use nothing that an earlier reading cached. Raises `NoConfig`."""


@dataclass
class FixedAccess:
    """Access that never changes."""

    access: Access
    files: Sequence[Path] = ()
    short_lived: bool = False

    async def read(self, *, fresh: bool) -> Access:
        return self.access


class ServiceAccount:
    """The service account of the pod that this process runs in; the kubelet renews its token in place."""

    short_lived = False

    def __init__(self, environ: Mapping[str, str], directory: Path = SERVICE_ACCOUNT) -> None:
        host, port = environ["KUBERNETES_SERVICE_HOST"], environ["KUBERNETES_SERVICE_PORT"]
        self._server = f"https://{f'[{host}]' if ':' in host else host}:{port}"
        self._token, self._ca = directory / "token", directory / "ca.crt"
        self.files: Sequence[Path] = (self._token, self._ca)
        self._tls = TlsContexts()

    async def read(self, *, fresh: bool) -> Access:
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


class Kubeconfig:
    """Kubeconfig files, merged as kubectl does. `context` defaults to their current one; `server` replaces the
    address in them."""

    def __init__(self, paths: Sequence[Path], *, context: str | None = None, server: str | None = None) -> None:
        self._paths, self._context, self._server = list(paths), context, server
        self._named = os.pathsep.join(map(str, paths))
        self._loader: KubeConfigLoader | None = None
        self._token_file: Path | None = None
        self.files: Sequence[Path] = self._paths
        self.short_lived = False
        self._tls = TlsContexts()

    async def read(self, *, fresh: bool) -> Access:
        from kubernetes_asyncio.client import Configuration

        configuration = Configuration(host="")
        try:
            loader = self._new_loader() if fresh or self._loader is None else self._loader
            async with asyncio.timeout(PLUGIN_TIMEOUT):
                await loader.load_and_set(configuration)
        except Exception as error:  # the loader passes on all errors that a bad file or plugin causes
            if isinstance(error, TimeoutError):
                reason = f"its credential plugin did not end within {PLUGIN_TIMEOUT:g} s"
            elif isinstance(error, AttributeError | KeyError | TypeError):
                reason = "it does not have the form of a kubeconfig"
            else:  # the loader's messages may quote a whole entry, with the secrets in it
                reason = re.sub(r"\s*/?\{.*", "", str(error), flags=re.DOTALL) or type(error).__name__
            raise NoConfig(f"can't use the kubeconfig {self._named}: {reason}") from error
        self._loader = loader
        self.short_lived = bool(loader.provider or hasattr(loader, "exec_plugin_expiry"))
        files = (configuration.ssl_ca_cert, configuration.cert_file, configuration.key_file, self._token_file)
        self.files = [*self._paths, *(Path(file) for file in files if file)]
        return access_to(
            self._server or configuration.host or "",
            self._tls,
            # the loader keeps the line break at the end of a token file
            authorization=configuration.api_key.get("BearerToken", "").strip(),
            ca=configuration.ssl_ca_cert,
            certificate=configuration.cert_file,
            key=configuration.key_file,
            verify=configuration.verify_ssl,
            server_name=configuration.tls_server_name,
            proxy=configuration.proxy,
        )

    def _new_loader(self) -> KubeConfigLoader:
        from kubernetes_asyncio.config.kube_config import KubeConfigLoader, KubeConfigMerger

        merger = KubeConfigMerger(self._named)
        if merger.config is None:
            raise FileNotFoundError("no such file")
        if self._context:
            names = [str(each["name"]) for each in (merger.config.safe_get("contexts") or ())]
            if self._context not in names:
                raise LookupError(f"it has no context {self._context}, but {', '.join(names) or 'none at all'}")
        files = merger.config_files.values()
        loader = KubeConfigLoader(
            merger.config,
            # of several files the first applies, as in kubectl; the library would take the last
            active_context=self._context or next((file.get("current-context") for file in files), None),
            config_base_path=None,
            config_persister=lambda _: merger.save_changes(),
        )
        selected: Any = loader.current_context
        entry: Any = merger.config["users"].get_with_name(selected["context"].get("user"), safe=True)
        user: Any = (entry.safe_get("user") if entry else None) or {}
        # the loader does not expose the file that holds the token
        self._token_file = Path(entry.path or "").parent / str(user["tokenFile"]) if "tokenFile" in user else None
        return loader


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
    """Return the access to a URL, or to HOST:PORT, which means https if there are credentials to protect, else http.

    Without `proxy`, that of the environment is used. Raises `NoConfig` for files that can't be used.
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
    if not proxy and not proxy_bypass(url.hostname):
        proxy = getproxies().get(url.scheme)
    return Access(server.rstrip("/"), authorization, context, server_name, proxy or None)


def _kubeconfig_paths(kubeconfig: str | None, environ: Mapping[str, str], is_daemon: bool) -> list[Path]:
    """Return the kubeconfig files to use. A missing named file is an error, unless others of its list exist, or a
    daemon passes over the variable that names it."""
    named = kubeconfig or environ.get("KUBECONFIG", "")
    if any(path.exists() for path in _listed(named)):
        return _listed(named)
    if named and (kubeconfig or not is_daemon):
        origin = "" if kubeconfig else ", which KUBECONFIG names"
        raise NoConfig(f"there is no kubeconfig file {named}{origin}")
    default = Path(environ.get("HOME") or "~").expanduser() / ".kube" / "config"
    return [default] if default.is_file() else []


def _listed(named: str) -> list[Path]:
    return [Path(path).expanduser() for path in named.split(os.pathsep) if path]
