"""Access by kubeconfig files, through kubernetes_asyncio's loader: tokens, certificates, exec plugins, auth providers.

The loader reads once. Here it is used repeatedly: a new one when a file changed or the server refused the credentials,
the same one while only time passes, which renews the expiring credentials of an exec plugin or a provider.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kubernetes_asyncio.client import Configuration
from kubernetes_asyncio.config.kube_config import ConfigNode, KubeConfigLoader, KubeConfigMerger

from store.http import TlsContexts
from store.kube.api.errors import NoConfig
from store.kube.client.credentials import Access, access_to

PLUGIN_TIMEOUT = 60.0  # seconds; an exec plugin may ask a far identity provider


class Kubeconfig:
    """Kubeconfig files, merged as kubectl does. `context` defaults to their current one; `server` replaces the
    address in them."""

    def __init__(self, paths: Sequence[Path], *, context: str | None = None, server: str | None = None) -> None:
        self._paths, self._context, self._server = list(paths), context, server
        self._loader: KubeConfigLoader | None = None
        self._token_file: Path | None = None
        self._referenced: list[Path] = []
        self._tls = TlsContexts()

    @property
    def files(self) -> Sequence[Path]:
        return [*self._paths, *self._referenced]

    @property
    def short_lived(self) -> bool:
        return bool(self._loader and (self._loader.provider or hasattr(self._loader, "exec_plugin_expiry")))

    async def read(self, *, fresh: bool) -> Access:
        configuration = Configuration(host="")
        try:
            loader = self._new_loader() if fresh or self._loader is None else self._loader
            async with asyncio.timeout(PLUGIN_TIMEOUT):
                await loader.load_and_set(configuration)
        except Exception as error:  # the loader passes on all errors that a bad file or plugin causes
            named = os.pathsep.join(map(str, self._paths))
            raise NoConfig(f"can't use the kubeconfig {named}: {_reason(error)}") from error
        self._loader = loader
        files = (configuration.ssl_ca_cert, configuration.cert_file, configuration.key_file, self._token_file)
        self._referenced = [Path(file) for file in files if file]
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
        merger = KubeConfigMerger(os.pathsep.join(map(str, self._paths)))
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
        self._token_file = _token_file(merger.config, selected["context"].get("user"))
        return loader


def _token_file(merged: ConfigNode, user_name: str | None) -> Path | None:
    """Return the file that holds the user's token, which the loader does not expose."""
    entry: Any = merged["users"].get_with_name(user_name, safe=True)
    user = entry.safe_get("user") if entry else None
    if not user or "tokenFile" not in user:
        return None
    return Path(entry.path or "").parent / str(user["tokenFile"])


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"its credential plugin did not end within {PLUGIN_TIMEOUT:g} s"
    if isinstance(error, AttributeError | KeyError | TypeError):
        return "it does not have the form of a kubeconfig"
    # the loader's messages may quote a whole entry, with the secrets in it
    return re.sub(r"\s*/?\{.*", "", str(error), flags=re.DOTALL) or type(error).__name__
