"""Install what a pod needs before it can start: its manifest and its artifacts, verified, on this machine's disk."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from rcfarm.agent.errors import InstallFailed, describe_os_error
from rcfarm.agent.install.artifacts import Artifacts
from rcfarm.agent.state import StateDir
from store.kv.protocol import Store
from store.schema.keys import Keys
from store.schema.manifest import BadManifest, Manifest, digest, parse


class Installed(NamedTuple):
    """A manifest that can be started. `artifacts`: a directory per launchable that has one."""

    manifest_id: str
    manifest: Manifest
    artifacts: dict[str, Path]


class Installer:
    """Brings manifests and artifacts to this machine."""

    def __init__(self, store: Store, keys: Keys, state: StateDir, artifacts: Artifacts) -> None:
        self._store, self._keys = store, keys
        self._state = state
        self._artifacts = artifacts

    async def install(self, manifest_id: str) -> Installed:
        """Fetch the manifest and its artifacts, unless they are installed.

        Raises `InstallFailed`, and the store's errors when the manifest has to be read there.
        """
        found = self.find(manifest_id)
        if found is None:
            name = f"manifest {manifest_id[:12]}"
            entry = await self._store.get(self._keys.manifest(manifest_id))
            if entry is None:
                raise InstallFailed(f"{name} is not in the store: apply the RC again")
            if digest(entry.value) != manifest_id:
                raise InstallFailed(
                    f"{name} is damaged in the store: its bytes have another digest; apply the RC again"
                )
            try:
                manifest = parse(entry.value)
            except BadManifest as error:
                raise InstallFailed(f"{name}: {error}") from error
            try:
                self._state.save_manifest(manifest_id, entry.value)
            except OSError as error:
                raise InstallFailed(f"{name}: {describe_os_error(error, self._state.manifests)}") from error
            found = self._installed(manifest_id, manifest)
        for launchable in found.manifest.launchables.values():
            if launchable.artifact is not None:
                await self._artifacts.fetch(launchable.artifact)
        return found

    def find(self, manifest_id: str) -> Installed | None:
        """Return the manifest as an earlier call, or an earlier agent, installed it, or None."""
        raw = self._state.load_manifest(manifest_id)
        if raw is None or digest(raw) != manifest_id:
            return None
        try:
            return self._installed(manifest_id, parse(raw))
        except BadManifest:  # written by an agent with other rules
            return None

    def prune(self, used: Collection[str], *, keep: float) -> None:
        """Remove the manifests that are not in `used`, and artifacts that only they name, after `keep` seconds.

        Raises `OSError`.
        """
        artifacts: set[str] = set()
        for path in list(self._state.manifests.iterdir()):
            if path.name not in used:
                path.unlink()
            elif (found := self.find(path.name)) is not None:
                artifacts |= {directory.name for directory in found.artifacts.values()}
        self._artifacts.prune(artifacts, keep=keep)

    def _installed(self, manifest_id: str, manifest: Manifest) -> Installed:
        artifacts = {
            name: self._artifacts.path(launchable.artifact.sha256)
            for name, launchable in manifest.launchables.items()
            if launchable.artifact is not None
        }
        return Installed(manifest_id, manifest, artifacts)
