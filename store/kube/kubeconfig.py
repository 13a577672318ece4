"""Access by kubeconfig files, through the library's loader: tokens, certificates, exec plugins, auth providers.

The loader reads once. Here it is asked again: a new one when a file changed or the server refused what it gave, the
same one while only time passes, which renews what an exec plugin or a provider said will end.
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

from store.kube.access import Access
from store.kube.config import access_to
from store.kube.errors import NoConfig
from store.tls import TlsContexts

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

    async def read(self, *, anew: bool) -> Access:
        configuration = Configuration(host="")
        try:
            loader = self._new_loader() if anew or self._loader is None else self._loader
            async with asyncio.timeout(PLUGIN_TIMEOUT):
                await loader.load_and_set(configuration)
        except Exception as error:  # the loader lets whatever a bad file or plugin causes pass
            named = os.pathsep.join(map(str, self._paths))
            raise NoConfig(f"can't use the kubeconfig {named}: {_reason(error)}") from error
        self._loader = loader
        return self._access(configuration)

    def _new_loader(self) -> KubeConfigLoader:
        merger = KubeConfigMerger(os.pathsep.join(map(str, self._paths)))
        if merger.config is None:
            raise FileNotFoundError("no such file")
        if self._context:
            _require_context(merger.config, self._context)
        files = merger.config_files.values()
        loader = KubeConfigLoader(
            merger.config,
            # of several files the first counts, as for kubectl; the library would take the last
            active_context=self._context or next((file.get("current-context") for file in files), None),
            config_base_path=None,
            config_persister=lambda _: merger.save_changes(),
        )
        selected: Any = loader.current_context
        self._token_file = _token_file(merger.config, selected["context"].get("user"))
        return loader

    def _access(self, configuration: Configuration) -> Access:
        files = (configuration.ssl_ca_cert, configuration.cert_file, configuration.key_file, self._token_file)
        self._referenced = [Path(file) for file in files if file]
        return access_to(
            self._server or configuration.host or "",
            self._tls,
            # the loader keeps the line's end that a token file usually has
            authorization=configuration.api_key.get("BearerToken", "").strip(),
            ca=configuration.ssl_ca_cert,
            certificate=configuration.cert_file,
            key=configuration.key_file,
            verify=configuration.verify_ssl,
            server_name=configuration.tls_server_name,
            proxy=configuration.proxy,
        )


def _require_context(merged: ConfigNode, name: str) -> None:
    names = [str(each["name"]) for each in (merged.safe_get("contexts") or ())]
    if name not in names:
        raise LookupError(f"it has no context {name}, but {', '.join(names) or 'none at all'}")


def _token_file(merged: ConfigNode, user_name: str | None) -> Path | None:
    """The file that holds the user's token, which the loader does not tell."""
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
