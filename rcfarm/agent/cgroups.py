"""Control groups: the group that each tree of processes lives in, its limits, and what it uses.

The model: `Groups.open` finds the mounted hierarchies and the agent's own group in each, and makes one group for this
agent below that. A pod has a group there, and each of its launchables a group in that of the pod:

    <own group>/rcfarm-<node>-<state directory>/pod-<pod>/run-<launchable>

A process can't leave its group by leaving its session, so members, killing and use are exact for the whole tree. The
groups survive the agent: the next agent of the same state directory finds them by their names, also below the own group
of the former agent, which is noted in `cgroups.json`. Groups of pods that are not on record are leaked, and collected.

Each *role* is served by one hierarchy. `tree` keeps the processes together and kills them: cgroup v2 wherever it is
mounted, which needs no controller for that, else v1. `memory`, `cpu` and `pids` limit: v2 where they are delegated,
else v1. `cpuacct` counts CPU time where the tree is v1. A machine may mix both versions, as systemd's hybrid layout.

In cgroup v2 a group with processes can't give controllers to its children. So the agent moves itself into a leaf,
`rcfarm-agent`, if nothing else than its own service or container is in its group; an agent that finds itself in such a
leaf works in the group above. Under systemd, `DelegateSubgroup=rcfarm-agent` starts it there.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import signal
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import msgspec
import structlog

from rcfarm.agent.errors import StartFailed, describe_os_error
from rcfarm.agent.state import write_atomically
from store.decoding import Undecodable, from_json, json_decoder
from store.schema.manifest import Resources
from store.schema.records import Enforcement

log = structlog.get_logger(__name__)

LEAF = "rcfarm-agent"
Controller = Literal["memory", "cpu", "pids"]
CONTROLLERS: tuple[Controller, ...] = get_args(Controller)
_PERIOD = 100_000  # microseconds, in which `cpu` may be used up
_LEAST_QUOTA = 1_000  # microseconds; the kernel takes no less
_FREEZE = 0.05  # seconds that killing waits for a v1 group to freeze
_REMOVE = 1.0  # seconds that a collection waits for processes that were killed
_UNLIMITED = 1 << 63
_CHARGED_AT_ONCE = 64 * 4096  # bytes, for each CPU; the last attempt may have been for less than is left
_MISSING = (errno.ENOENT, errno.ENODEV)  # of a file of a group that is not there, or is being removed


class Mount(NamedTuple):
    """The agent's own group in one hierarchy. `controllers`: of v1; those of v2 are read from the group.

    `is_whole`: the group is all that the agent's namespace shows of the hierarchy.
    """

    own: Path
    version: int
    controllers: frozenset[str] = frozenset()
    is_whole: bool = False


def find_mounts(own_groups: str, mounts: str) -> list[Mount]:
    """Return the hierarchies that the process can reach. Arguments: /proc/self/cgroup and /proc/self/mountinfo."""
    groups: dict[str, str] = {}  # by controller; that of v2 has the name ""
    for line in own_groups.splitlines():
        _, names, path = line.split(":", 2)
        groups |= dict.fromkeys(names.split(","), path)
    found: list[Mount] = []
    for line in mounts.splitlines():
        fields, _, special = line.partition(" - ")
        kind, _, options = special.partition(" ")
        if kind not in ("cgroup", "cgroup2"):
            continue
        options = options.rpartition(" ")[2]
        escaped = fields.split(" ")[3:5]
        root, place = (re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field) for field in escaped)
        controllers = frozenset({"": ""} if kind == "cgroup2" else options.split(",")) & groups.keys()
        if not controllers:
            continue
        path = groups[min(controllers)]
        if root != "/":  # only a part of the hierarchy is mounted
            if path != root and not path.startswith(f"{root}/"):
                continue
            path = path.removeprefix(root)
        if ".." in path.split("/"):  # outside of the namespace of groups
            continue
        version = 2 if kind == "cgroup2" else 1
        own = Path(place) / path.lstrip("/")
        if all(own != mount.own for mount in found):
            found.append(Mount(own, version, controllers if version == 1 else frozenset(), path in ("", "/")))
    return found


class Place(msgspec.Struct, frozen=True):
    """The directory that serves a role, and the version of its hierarchy."""

    directory: str
    version: int


class Base(msgspec.Struct, frozen=True):
    """The groups of one agent below one own group, by role. There is always a `tree`."""

    roles: dict[str, Place]

    def __hash__(self) -> int:
        return hash(frozenset(self.roles.items()))

    def directories(self, name: str = "") -> list[Path]:
        """Return the directories of a group below this base, each once."""
        return [Path(directory, name) for directory in dict.fromkeys(place.directory for place in self.roles.values())]


class Sample(NamedTuple):
    """What a group uses. `memory`: bytes, without the file cache that the kernel can drop; `cpu`: seconds since the
    group was made; `pids`: processes and threads."""

    memory: int
    cpu: float
    pids: int
    oom_kills: int


class Group:
    """One group. Nothing fails when it does not exist: then it has no members, and nothing was counted."""

    def __init__(self, base: Base, name: str) -> None:
        self._base = base
        self._name = name
        self._tree, self._version = Path(base.roles["tree"].directory, name), base.roles["tree"].version

    def make(self, wanted: Resources) -> None:
        """Make the group, or give it these limits. Raises `StartFailed`, naming what the kernel refuses."""
        try:
            for directory in self._base.directories(self._name):
                for each in (directory.parent.parent, directory.parent, directory):
                    with contextlib.suppress(FileExistsError):
                        each.mkdir()
                        if each != directory:
                            _hand_down(each)
        except OSError as error:
            raise StartFailed(f"its control group can't be made: {describe_os_error(error, self._tree)}") from error
        for controller, settings in _settings(wanted).items():
            if controller not in self._base.roles:
                continue
            place = self._base.roles[controller]
            directory = Path(place.directory, self._name)
            for file, value in settings[place.version - 1]:
                try:
                    _write(directory / file, value)
                except OSError as error:
                    if error.errno in (errno.ENOENT, errno.EACCES) and file in _OPTIONAL:
                        continue  # a kernel without swap accounting, or before 4.19
                    problem = f"resources.{controller}: {describe_os_error(error, directory / file)}"
                    raise StartFailed(problem) from error

    def enter(self, pid: int) -> None:
        """Move a process into the group. Raises `StartFailed`."""
        try:
            for directory in self._base.directories(self._name):
                _write(directory / "cgroup.procs", str(pid))
        except OSError as error:
            raise StartFailed(f"its control group can't be entered: {describe_os_error(error, self._tree)}") from error

    def members(self) -> Iterator[int]:
        """Yield the processes of the group that have not ended, those in groups below it included."""
        for directory in _walk(self._tree):
            for pid in _read(directory / "cgroup.procs").split():
                if pid != "0":  # a process of another namespace
                    yield int(pid)

    def kill(self) -> None:
        """Kill all members. They end soon after; one that is being forked just now may be left where the kernel has
        neither `cgroup.kill` (since 5.14) nor a freezer, so look again."""
        try:
            _write(self._tree / "cgroup.kill", "1")
            return
        except OSError:  # a kernel without it
            pass
        # keep the members from forking, where the hierarchy can
        freezer, on, off = ("cgroup.freeze", "1", "0") if self._version == 2 else ("freezer.state", "FROZEN", "THAWED")
        with contextlib.suppress(OSError):
            _write(self._tree / freezer, on)
            end = time.monotonic() + _FREEZE
            while self._version == 1 and _read(self._tree / freezer) != on and time.monotonic() < end:
                time.sleep(0.001)
        try:
            for pid in self.members():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        finally:
            with contextlib.suppress(OSError):
                _write(self._tree / freezer, off)

    def remove(self) -> bool:
        """Remove the group with those below it. Return False when processes are left in them."""
        is_gone = True
        for directory in self._base.directories(self._name):
            for each in reversed([*_walk(directory)]):
                try:
                    each.rmdir()
                except OSError as error:
                    if error.errno not in _MISSING:
                        is_gone = False
                        break
        return is_gone

    def oom_kills(self) -> int:
        """Return how many processes of the group the kernel has killed for lack of memory."""
        if "memory" not in self._base.roles:
            return 0
        return self._counts("memory", ("memory.oom_control", "memory.events")).get("oom_kill", 0)

    def reached_its_limit(self) -> bool:
        """Return whether memory was refused to the group by its own limit, rather than by that of a group above it."""
        if "memory" not in self._base.roles:
            return False
        if self._base.roles["memory"].version == 2:
            names = ("memory.events.local", "memory.events")  # the first since 5.2
            events = next(filter(None, (self._counts("memory", ("", name)) for name in names)), {})
            return events.get("oom", 0) > 0
        # `failcnt` is always 0 in recent kernels
        limit, most = (_read(self._file("memory", f"memory.{name}_in_bytes")) for name in ("limit", "max_usage"))
        return int(most or 0) >= int(limit or _UNLIMITED) - _CHARGED_AT_ONCE

    def oom_event(self) -> int | None:
        """Return a file descriptor that becomes readable when memory runs out, where the kernel kills one process then;
        None where it kills the whole group. The caller closes it."""
        if "memory" not in self._base.roles or self._base.roles["memory"].version == 2:
            return None
        event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            with open(self._file("memory", "memory.oom_control")) as control:
                _write(self._file("memory", "cgroup.event_control"), f"{event} {control.fileno()}")
        except OSError:
            os.close(event)
            return None
        return event

    def sample(self) -> Sample | None:
        """Return what the group uses now; None without a group."""
        if not self._tree.is_dir():
            return None
        roles, memory, pids = self._base.roles, 0, ""
        if "memory" in roles:
            used = _read(self._file("memory", ("memory.usage_in_bytes", "memory.current")))
            cache = self._counts("memory", ("memory.stat", "memory.stat"))
            droppable = cache.get("total_inactive_file", cache.get("inactive_file", 0))
            memory = max(0, int(used or 0) - droppable)
        if "pids" in roles:
            pids = _read(self._file("pids", "pids.current"))
        if self._version == 2:
            cpu = self._counts("tree", ("", "cpu.stat")).get("usage_usec", 0) / 1e6
        else:
            cpu = int(_read(self._file("cpuacct", "cpuacct.usage")) or 0) / 1e9 if "cpuacct" in roles else 0.0
        return Sample(memory, cpu, int(pids) if pids else sum(1 for _ in self.members()), self.oom_kills())

    def _file(self, role: str, names: str | tuple[str, str]) -> Path:
        """Return a file of the role's group. `names`: those in v1 and in v2, where they differ."""
        place = self._base.roles[role]
        name = names if isinstance(names, str) else names[place.version - 1]
        return Path(place.directory, self._name, name)

    def _counts(self, role: str, names: tuple[str, str]) -> dict[str, int]:
        """Return the content of a file with a name and a number on each line."""
        pairs = (line.split() for line in _read(self._file(role, names)).splitlines())
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


_OPTIONAL = ("memory.swap.max", "memory.oom.group", "memory.memsw.limit_in_bytes")


def _settings(wanted: Resources) -> dict[Controller, tuple[list[tuple[str, str]], list[tuple[str, str]]]]:
    """Return the files to write for each controller, in v1 and in v2. The memory limit includes swap."""
    memory, cpu, pids = wanted.memory_bytes, wanted.millicores, wanted.pids
    limit, quota = str(memory or -1), str(max(_LEAST_QUOTA, cpu * _PERIOD // 1000) if cpu else -1)
    of_memory = [("memory.limit_in_bytes", limit), ("memory.memsw.limit_in_bytes", limit)]
    of_cpu = [("cpu.cfs_period_us", str(_PERIOD)), ("cpu.cfs_quota_us", quota)]
    most = "max" if pids is None else str(pids)
    return {
        # v1 requires that the limit with swap is never below the one without
        "memory": (
            [("memory.memsw.limit_in_bytes", "-1"), *of_memory],
            [
                ("memory.max", str(memory or "max")),
                ("memory.swap.max", "0" if memory else "max"),
                ("memory.oom.group", "1"),
            ],
        ),
        "cpu": (of_cpu, [("cpu.max", f"{quota if cpu else 'max'} {_PERIOD}")]),
        "pids": ([("pids.max", most)], [("pids.max", most)]),
    }


class Groups:
    """The groups of one agent's pods. `base`: where new ones are made; None where no hierarchy can be written.
    `former`: where pods of earlier agents may be."""

    def __init__(
        self, base: Base | None = None, former: Sequence[Base] = (), enforcement: Enforcement | None = None
    ) -> None:
        self._base = base
        self._bases = [*([base] if base else []), *former]
        self.enforcement = enforcement or Enforcement(by="rlimits", why="control groups are not used")

    @staticmethod
    def open(state: Path, node: str, mounts: Sequence[Mount] | None = None, *, use: bool = True) -> Groups:
        """Make this agent's group. `state`: its directory, which identifies it on the machine. `use` False: only find
        those of pods that run. What can't be used raises no error; `enforcement` names it."""
        if not use:
            mounts = ()
        elif mounts is None:
            own, mounted = _read(Path("/proc/self/cgroup")), _read(Path("/proc/self/mountinfo"))
            mounts = find_mounts(own, mounted)
        found = os.stat(state)
        identity = hashlib.sha256(f"{found.st_dev}:{found.st_ino}".encode()).hexdigest()[:12]
        base, problems = _open_base(mounts, f"rcfarm-{node[:100]}-{identity}")
        if base is not None:
            base = _entered(base, problems)
        noted: list[Base] = []  # those that the former agent of this state directory used
        try:
            noted = from_json(json_decoder(list[Base]), (state / "cgroups.json").read_bytes())
        except FileNotFoundError:
            pass
        except (OSError, Undecodable) as error:
            log.error("The note of former control groups can't be read; it is ignored", error=str(error))
        former = [each for each in noted if each != base and any(map(Path.is_dir, each.directories()))]
        groups = Groups(base, former, _enforcement(base, problems if use else ["agent.cgroups is false"]))
        try:
            write_atomically(state / "cgroups.json", msgspec.json.encode(groups._bases))
        except OSError as error:  # a later agent that runs in another own group would not find these
            log.warning("The control groups could not be noted", reason=describe_os_error(error, state))
        return groups

    def of(self, pod_id: str, launchable: str = "") -> Group | None:
        """Return the group of a pod, or of one of its launchables, existing or not; None without control groups."""
        pod = f"pod-{pod_id}"
        base = next((each for each in self._bases if all(map(Path.is_dir, each.directories(pod)))), self._base)
        return Group(base, f"{pod}/run-{launchable}" if launchable else pod) if base else None

    def of_command(self, pod_id: str, name: str) -> Group | None:
        """Return the group of commands that are run in a pod beside its launchables: `check`, `exec-1`."""
        pod = self.of(pod_id)
        return Group(pod._base, f"pod-{pod_id}/{name}") if pod else None

    def remove(self, pod_id: str) -> bool:
        """Remove the pod's groups. Return False when processes are left in them."""
        gone = [Group(base, f"pod-{pod_id}").remove() for base in self._bases]
        return all(gone)

    def collect(self, kept: Collection[str]) -> list[str]:
        """Kill and remove what is in the groups of other pods than those, and clients' commands in those. Return the
        other pods that were found."""
        known = {f"pod-{pod_id}" for pod_id in kept}
        found = {
            (base, directory.name)
            for base in self._bases
            for parent in base.directories()
            for directory in parent.glob("pod-*")
            if directory.name not in known
        }
        found |= {  # commands of clients, which have gone with the agent that ran them
            (base, f"{pod}/{directory.name}")
            for base in self._bases
            for pod in known
            for parent in base.directories()
            for directory in (parent / pod).glob("exec-*")
        }
        left, end = [Group(base, name) for base, name in found], time.monotonic() + _REMOVE
        while left and time.monotonic() < end:
            for group in left:
                group.kill()
            left = [group for group in left if not group.remove()]
            time.sleep(0.005 if left else 0)
        return sorted({name.removeprefix("pod-") for _, name in found if "/" not in name})

    def close(self) -> None:
        """Remove the agent's own groups if no pod is left in them."""
        for base in self._bases:
            for directory in base.directories():
                with contextlib.suppress(OSError):
                    directory.rmdir()


def _open_base(mounts: Iterable[Mount], name: str) -> tuple[Base | None, list[str]]:
    """Make the group `name` in each hierarchy that has a role. Return also what is in the way, in words."""
    roles, problems, places = dict[str, Place](), list[str](), list[Place]()
    for mount in sorted(mounts, key=lambda mount: -mount.version):
        own = mount.own.parent if mount.version == 2 and mount.own.name == LEAF else mount.own
        wanted = {*CONTROLLERS, *(() if "tree" in roles else ("freezer", "cpuacct"))} - roles.keys()
        if mount.version == 1 and not wanted & mount.controllers:
            continue
        place = Place(str(own / name), mount.version)
        try:
            problem = _delegate(own, mount.is_whole) if mount.version == 2 else ""
            Path(place.directory).mkdir(exist_ok=True)
            controllers = _hand_down(Path(place.directory)) if mount.version == 2 else wanted & mount.controllers
        except OSError as error:
            problem, controllers = describe_os_error(error, own), set()
        else:
            places.append(place)
            if mount.version == 2:
                roles["tree"] = place
        if problem:
            problems.append(problem)
        roles |= dict.fromkeys(controllers & {*CONTROLLERS, "cpuacct", "freezer"}, place)
    freezer = roles.pop("freezer", None)
    if places:
        roles.setdefault("tree", freezer or places[0])
    return Base(roles) if places else None, problems


def _delegate(own: Path, is_whole: bool) -> str:
    """Have the v2 group `own` give its controllers to its children. Return what is in the way, or ""."""
    wanted = {*CONTROLLERS} & set(_read(own / "cgroup.controllers").split())
    if not wanted:
        return f"{own} has none of the controllers memory, cpu and pids"
    if wanted <= set(_read(own / "cgroup.subtree_control").split()):
        return ""
    inside = _read(own / "cgroup.procs").split()
    if inside and (own / "cgroup.events").exists():  # all but the machine's root, which is exempt
        if own.name.endswith(".service"):  # systemd could not start a process there again
            return (
                f"{own.name} has no subgroup for the agent: set Delegate=yes and DelegateSubgroup={LEAF} (systemd 254)"
            )
        if not is_whole and inside != [str(os.getpid())]:
            return f"{own} has other processes: start the agent in a group of its own, as its systemd unit does"
        with contextlib.suppress(FileExistsError):
            (own / LEAF).mkdir()
        for pid in inside:
            with contextlib.suppress(ProcessLookupError):
                _write(own / LEAF / "cgroup.procs", pid)
    missing = wanted - _hand_down(own)
    return f"{own} does not delegate {', '.join(sorted(missing))}" if missing else ""


def _hand_down(group: Path) -> set[str]:
    """Enable the controllers that limit for the children of a v2 group. Return those that are enabled then. Nothing
    happens in v1, where all groups of a hierarchy have its controllers."""
    control = group / "cgroup.subtree_control"
    for controller in CONTROLLERS:
        if controller in _read(group / "cgroup.controllers").split():
            with contextlib.suppress(OSError):
                _write(control, f"+{controller}")
    return set(_read(control).split())


def _entered(base: Base, problems: list[str]) -> Base | None:
    """Return the base if a process can be moved into its groups, as far as a trial shows."""
    name = "pod--trial"  # no pod has such an id; if this agent is killed now, the next one collects it
    group = Group(base, name)
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", "kill -STOP $$"], {})
    try:
        for directory in base.directories(name):
            with contextlib.suppress(FileExistsError):
                directory.mkdir()
        group.enter(pid)
    except (OSError, StartFailed) as error:
        problems.append(str(error))
        return None
    else:
        return base
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # children may be reaped automatically
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        group.remove()


def _enforcement(base: Base | None, problems: Sequence[str]) -> Enforcement:
    roles = base.roles if base else {}
    enforced = tuple(controller for controller in CONTROLLERS if controller in roles)
    if not base and not problems:
        problems = ["no hierarchy of control groups is mounted"]
    why = problems[0] if problems and len(enforced) < len(CONTROLLERS) else ""
    if why and len(problems) > 1:
        why += f"; {len(problems) - 1} more hierarchies can't be used either"
    return Enforcement(
        by="rlimits" if not enforced else "cgroup v2" if roles[enforced[0]].version == 2 else "cgroup v1",
        enforced=enforced,
        tree=base is not None,
        why=why,
    )


def _walk(directory: Path) -> Iterator[Path]:
    """Yield a group and those below it, the upper ones first."""
    yield directory
    try:
        below = [Path(entry.path) for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    for each in below:
        yield from _walk(each)


def _read(path: Path) -> str:
    """Return the content of a file of a group; "" if there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _write(path: Path, text: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)
