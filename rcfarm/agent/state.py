"""The agent's records on disk: the pods that it started, so that the next agent adopts them.

    <state>/lock                        held (flock) by the running agent: never two on one directory
    <state>/node.json                   the last registration, with its session
    <state>/manifests/<sha256>          manifests in use: pods can be restarted while the store is unavailable
    <state>/artifacts/<sha256>/         unpacked artifacts, shared by all pods of that digest
    <state>/pods/<pod_id>/pod.json      one pod: manifest, ports, and pid and start time of each process
    <state>/pods/<pod_id>/<launchable>/ its working directory, the only one that belongs to its user
    <state>/pods/<pod_id>/*.config.json its config file
    <state>/cgroups.json                where its pods' control groups are
    <state>/logs/<pod_id>/              its log files
    <state>/{artifacts,pods,logs}/.trash directories to remove, see `Trash`

Other users of the machine can't list any of these: a pod reaches only the artifact and directory whose paths it gets.

Records are replaced atomically, but not synced to the disk: they need to survive a crash of the agent only. After a
crash of the machine none of the recorded processes runs, which the boot id in each record shows.

A directory that pods have filled, however deep it is, goes into the `.trash` of its area by one rename, so that its
path is free at once, even if the agent is killed right after. One thread empties the trash: never recursively, never
reading a directory into memory, taking turns between the directories, and stopping between two files when the agent
stops. What can't be removed is logged and retried later.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import msgspec
import structlog

from rcfarm.agent.errors import StateError, describe_os_error
from rcfarm.agent.log_files import STDERR, STDOUT, SUFFIXES
from store.decoding import Undecodable, from_json, json_decoder
from store.schema.keys import is_dns_label
from store.schema.records import Exit, Labels

log = structlog.get_logger(__name__)

TRASH = ".trash"
_AGAIN = 3600.0  # seconds until a failed removal is retried
_TURN = 30.0  # seconds for one directory, before the others have their turn
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

R = TypeVar("R", bound=msgspec.Struct)


class LaunchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One launchable. `pid`, `start_time` (clock ticks after boot) and `boot_id` together identify one process.

    `outcome`: its final state by its restart policy; "" while it should run. `oom_kills`: the count of its control
    group when the process was started.
    """

    pid: int = 0
    start_time: int = 0
    boot_id: str = ""
    started_at: str = ""
    restarts: int = 0
    last_exit: Exit | None = None
    oom_kills: int = 0
    outcome: Literal["", "completed", "failed"] = ""


class PodRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One pod as it was last started. `ports` are the numbers in use, chosen ones included.

    `tree`: in which its intent was last seen, see `Registration`. `task`: the execution that the pod belongs to, if it
    belongs to no RC. `restart`: the last request for a restart that was obeyed, "" for none.
    """

    manifest: str
    rc: str
    tree: str = ""
    task: str = ""
    restart: str = ""
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
    """Files of one launchable. Only `directory`, and `exit_code` in it, are writable for its user: the agent opens the
    others as root."""

    directory: Path
    config: Path
    log: Path
    error_log: Path
    check_output: Path
    exit_code: Path


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

    def paths(self, pod_id: str, launchable: str) -> LaunchPaths:
        pod = self.pods / pod_id
        return LaunchPaths(
            directory=pod / launchable,
            config=pod / f"{launchable}.config.json",
            log=self.logs / pod_id / f"{launchable}{SUFFIXES[STDOUT]}",
            error_log=self.logs / pod_id / f"{launchable}{SUFFIXES[STDERR]}",
            check_output=self.logs / pod_id / f"{launchable}.check",
            exit_code=pod / launchable / ".rcfarm-exit-code",
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
        (self.pods / pod_id).mkdir(mode=0o755, exist_ok=True)
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


class Trash:
    """The trash of one agent. `areas`: directories, possibly on different file systems."""

    def __init__(self, areas: Sequence[Path]) -> None:
        self._areas = areas
        self._filled = asyncio.Event()
        self._stopped = threading.Event()
        self._numbers = count()

    def put(self, path: Path) -> None:
        """Move `path`, which is below one of the areas, into the trash; does nothing when it does not exist.

        On return `path` is free. Raises `OSError`; then `path` is unchanged.
        """
        area = next(area for area in self._areas if path.is_relative_to(area))
        trash = area / TRASH
        trash.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, trash / f"{time.time_ns()}-{next(self._numbers)}")
        self._filled.set()

    async def run(self) -> None:
        """Empty the trash until cancelled."""
        with ThreadPoolExecutor(1, "trash") as thread:
            try:
                while True:
                    self._filled.clear()
                    while not await asyncio.get_running_loop().run_in_executor(thread, self.empty):
                        pass
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_AGAIN):
                            await self._filled.wait()
            finally:
                self._stopped.set()

    def empty(self) -> bool:
        """Give each entry of the trash a turn. Return whether only entries that can't be removed are left. Blocks."""
        done = True
        for area in self._areas:
            for path in sorted((area / TRASH).glob("*")):
                try:
                    done &= remove(path, partial(self._is_over, time.monotonic() + _TURN))
                except OSError as error:
                    report_left(path, error)
        return done or self._stopped.is_set()

    def _is_over(self, end: float) -> bool:
        return self._stopped.is_set() or time.monotonic() > end


def report_left(path: Path, error: OSError) -> None:
    """Log that `path` can't be removed."""
    reason = describe_os_error(error, path)
    log.warning("A directory could not be removed; retrying later", directory=str(path), reason=reason)


def remove(path: Path, is_over: Callable[[], bool] = lambda: False) -> bool:
    """Remove a file or a whole directory. Return False when `is_over` ended it early.

    Raises the first `OSError` when an entry can't be removed. Subdirectories are moved up to the top before they are
    emptied: so no path is ever long, and at most two directories are open. A symbolic link is removed, never followed.
    """
    try:
        top = os.open(path, _DIRECTORY)
    except NotADirectoryError:
        path.unlink()
        return True
    try:
        os.fchmod(top, 0o700)
        if not _Removal(top, is_over).run():
            return False
        path.rmdir()
        return True
    finally:
        os.close(top)


class _Removal:
    """Empties the open directory `top`."""

    def __init__(self, top: int, is_over: Callable[[], bool]) -> None:
        self._top = top
        self._is_over = is_over
        self._numbers = count()
        self._done = 0  # entries removed or moved up
        self._failed: OSError | None = None

    def run(self) -> bool:
        while True:
            before, self._failed = self._done, None
            for entry in self._each(self._top):
                self._remove(entry)
            if self._is_over():
                return False
            if self._done == before:
                break
        if self._failed is not None:
            raise self._failed
        return True

    def _each(self, directory: int) -> Iterator[os.DirEntry[str]]:
        with os.scandir(directory) as entries:
            for entry in entries:
                if self._is_over():
                    return
                yield entry

    def _remove(self, entry: os.DirEntry[str]) -> None:
        """Remove an entry of the top; for a directory, its entries first."""
        if not entry.is_dir(follow_symlinks=False):
            with self._step():
                os.unlink(entry.name, dir_fd=self._top)
            return
        try:
            try:
                directory = os.open(entry.name, _DIRECTORY, dir_fd=self._top)
            except PermissionError:
                os.chmod(entry.name, 0o700, dir_fd=self._top)
                directory = os.open(entry.name, _DIRECTORY, dir_fd=self._top)
            os.fchmod(directory, 0o700)
            try:
                for inner in self._each(directory):
                    with self._step():
                        if not inner.is_dir(follow_symlinks=False):
                            os.unlink(inner.name, dir_fd=directory)
                            continue
                        new = f".{os.getpid()}-{time.monotonic_ns()}-{next(self._numbers)}"  # unique in the top
                        try:
                            os.rename(inner.name, new, src_dir_fd=directory, dst_dir_fd=self._top)
                        except PermissionError:  # moving a directory requires write permission in it
                            os.chmod(inner.name, 0o700, dir_fd=directory)
                            os.rename(inner.name, new, src_dir_fd=directory, dst_dir_fd=self._top)
            finally:
                os.close(directory)
        except OSError as error:
            self._failed = self._failed or error
        with self._step():
            os.rmdir(entry.name, dir_fd=self._top)

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        """Count a removal or move if it succeeds, and keep the first error."""
        try:
            yield
        except OSError as error:
            self._failed = self._failed or error
        else:
            self._done += 1
