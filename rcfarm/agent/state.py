"""The agent's records on disk: the pods that it started, so that the next agent adopts them.

    <state>/lock                        held (flock) by the running agent: never two on one directory
    <state>/node.json                   the last registration, with its session
    <state>/manifests/<sha256>          manifests in use: pods can be restarted while the store is unavailable
    <state>/artifacts/<sha256>/         unpacked artifacts, shared by all pods of that digest
    <state>/pods/<pod_id>/pod.json      one pod: manifest, ports, and pid and start time of each process
    <state>/pods/<pod_id>/<launchable>/ its working directory, the only one that belongs to its user
    <state>/pods/<pod_id>/*.config.json its config file
    <state>/logs/<pod_id>/              its log files
    <state>/{artifacts,pods,logs}/.trash directories to remove, see `rcfarm.agent.trash`

Other users of the machine can't list any of these: a pod reaches only the artifact and directory whose paths it gets.

Records are replaced atomically, but not synced to the disk: they need to survive a crash of the agent only. After a
crash of the machine none of the recorded processes runs, which the boot id in each record shows.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import msgspec
import structlog

from rcfarm.agent.errors import StateError, describe_os_error
from rcfarm.agent.trash import TRASH, Trash, report_left
from store.decoding import Undecodable, from_json, json_decoder
from store.schema.keys import is_dns_label
from store.schema.records import Exit, Labels

log = structlog.get_logger(__name__)

R = TypeVar("R", bound=msgspec.Struct)


class LaunchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One launchable. `pid`, `start_time` (clock ticks after boot) and `boot_id` together identify one process.

    `outcome`: its final state by its restart policy; "" while it should run.
    """

    pid: int = 0
    start_time: int = 0
    boot_id: str = ""
    started_at: str = ""
    restarts: int = 0
    last_exit: Exit | None = None
    outcome: Literal["", "completed", "failed"] = ""


class PodRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One pod as it was last started. `ports` are the numbers in use, chosen ones included.

    `tree`: in which its intent was last seen, see `Registration`.
    """

    manifest: str
    rc: str
    tree: str = ""
    ports: dict[str, int] = {}
    launchables: dict[str, LaunchRecord] = {}


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The last write to the node's spec, and its session, which the next agent ends.

    `shards`: the store's number of shards, so that an agent can start while the store is unavailable (0: unknown).
    `tree`, `tree_index`: see `Registration`.
    """

    labels: Labels = {}
    cpu: int | None = None
    memory: int | None = None
    devices: dict[str, int] | None = None
    session: str = ""
    shards: int = 0
    tree: str = ""
    tree_index: int = 0


class LaunchPaths(NamedTuple):
    """Files of one launchable. Only `directory` is writable for its user: the agent opens the others as root."""

    directory: Path
    config: Path
    log: Path
    check_output: Path


class StateDir:
    """The state directory of one agent. Methods block on disk I/O."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.artifacts = root / "artifacts"
        self.manifests = root / "manifests"
        self.pods = root / "pods"
        self.logs = root / "logs"
        self.trash = Trash((self.artifacts, self.pods, self.logs))
        self._lock: int | None = None

    def open(self) -> None:
        """Create missing directories and take the lock. Raises `StateError` when another agent has it."""
        try:
            self.root.mkdir(mode=0o755, parents=True, exist_ok=True)
            passable = 0o711 if os.geteuid() == 0 else 0o700  # pods of an agent that is not root run as its user
            for directory, mode in (
                (self.artifacts, passable),
                (self.pods, passable),
                (self.manifests, 0o700),
                (self.logs, 0o700),
            ):
                directory.mkdir(mode=mode, exist_ok=True)
                directory.chmod(mode)
            lock = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StateError(f"agent.state_dir: {describe_os_error(error, self.root)}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise StateError(f"agent.state_dir: {self.root} is in use by another agent: stop that one") from error
        self._lock = lock

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def pod_dir(self, pod_id: str) -> Path:
        return self.pods / pod_id

    def paths(self, pod_id: str, launchable: str) -> LaunchPaths:
        pod = self.pods / pod_id
        return LaunchPaths(
            directory=pod / launchable,
            config=pod / f"{launchable}.config.json",
            log=self.logs / pod_id / f"{launchable}.log",
            check_output=self.logs / pod_id / f"{launchable}.check",
        )

    def load_pods(self) -> Mapping[str, PodRecord]:
        """Return the record of every pod that was started. Unreadable records are logged and left out."""
        found = {entry.name: self.load_pod(entry.name) for entry in sorted(self.pods.iterdir()) if entry.is_dir()}
        return {pod_id: record for pod_id, record in found.items() if record is not None and is_dns_label(pod_id)}

    def discard_remains(self) -> None:
        """Remove the rest of pods that an earlier agent had begun to remove. Call it before anything starts."""
        for entry in self.pods.iterdir():
            if entry.name != TRASH and entry.is_dir() and not (entry / "pod.json").exists():
                try:
                    self.trash.put(entry)
                except OSError as error:
                    report_left(entry, error)

    def load_pod(self, pod_id: str) -> PodRecord | None:
        """Return the pod's record, or None."""
        return _read(self.pods / pod_id / "pod.json", PodRecord)

    def save_pod(self, pod_id: str, record: PodRecord) -> None:
        """Replace the pod's record atomically. Raises `OSError`."""
        self.pod_dir(pod_id).mkdir(mode=0o755, exist_ok=True)
        write_atomically(self.pods / pod_id / "pod.json", msgspec.json.encode(record))

    def remove_pod(self, pod_id: str) -> None:
        """Forget the pod: its record and its working directories, at once. Its logs are kept. Raises `OSError`."""
        self.trash.put(self.pods / pod_id)

    def load_node(self) -> NodeRecord:
        """Return the last registration; an empty record if there was none."""
        return _read(self.root / "node.json", NodeRecord) or NodeRecord()

    def save_node(self, record: NodeRecord) -> None:
        """Replace the node's record atomically. Raises `OSError`."""
        write_atomically(self.root / "node.json", msgspec.json.encode(record))

    def load_manifest(self, sha256: str) -> bytes | None:
        """Return the manifest's bytes, unverified, or None."""
        try:
            return (self.manifests / sha256).read_bytes()
        except FileNotFoundError:
            return None

    def save_manifest(self, sha256: str, raw: bytes) -> None:
        """Write the manifest atomically. Raises `OSError`."""
        write_atomically(self.manifests / sha256, raw)


def write_atomically(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace `path` with `content`, or leave it as it is. Raises `OSError`."""
    temporary = path.with_name(path.name + ".new")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode), "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _read(path: Path, record_type: type[R]) -> R | None:
    try:
        return from_json(json_decoder(record_type), path.read_bytes())  # type: ignore[no-any-return]
    except FileNotFoundError:
        return None
    except (OSError, Undecodable) as error:
        log.error("A state file could not be read; its pod or node record is ignored", file=str(path), error=str(error))
        return None
