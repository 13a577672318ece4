"""Control groups: found where they are mounted, limited in both versions' files, and ended with all that is in them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rcfarm.agent import cgroups
from rcfarm.agent.cgroups import LEAF, Base, Group, Groups, Mount, Place, find_mounts
from rcfarm.agent.errors import StartFailed
from rcfarm.agent.process import LaunchSpec, adopt, spawn
from store.schema.manifest import Resources
from tests.support import require
from tests.support.agent.agents import alive
from tests.support.waiting import until

V2_LINE = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1_LINES = """\
31 30 0:27 / /sys/fs/cgroup/memory rw shared:5 - cgroup cgroup rw,memory
32 30 0:28 / /sys/fs/cgroup/cpu,cpuacct rw shared:6 - cgroup cgroup rw,cpu,cpuacct
33 30 0:29 / /sys/fs/cgroup/systemd rw shared:7 - cgroup cgroup rw,xattr,name=systemd
"""
FILES = {  # of each v2 group, in a directory that stands for a hierarchy
    "cgroup.controllers": "cpuset cpu io memory pids",
    "cgroup.subtree_control": "",
    "cgroup.procs": "",
    "cgroup.events": "populated 0",
    "memory.max": "max",
    "memory.swap.max": "max",
    "memory.oom.group": "0",
    "memory.current": "0",
    "memory.stat": "anon 0\ninactive_file 0",
    "memory.events": "oom 0\noom_kill 0",
    "cpu.max": "max 100000",
    "cpu.stat": "usage_usec 0",
    "pids.max": "max",
    "pids.current": "0",
}


def own_mounts() -> list[Mount]:
    return find_mounts(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())


def problem_with(mounts: Sequence[Mount]) -> str:
    """Return why groups can't be made in these hierarchies, or ""."""
    for mount in mounts:
        trial = mount.own / f"rcfarm-trial-{os.getpid()}"
        try:
            trial.mkdir()
            trial.rmdir()
        except OSError as error:
            return f"{mount.own} can't be written: {error.strerror}"
    return "" if mounts else "there is no such hierarchy"


def hierarchies(version: int) -> list[Mount]:
    """Return the mounted hierarchies of one version. Skips the test if they can't be written."""
    found = [mount for mount in own_mounts() if mount.version == version]
    if version == 1:
        wanted = {"memory", "cpu", "pids", "cpuacct", "freezer"}
        found = [mount for mount in found if mount.controllers & wanted]
    if problem := problem_with(found):
        pytest.skip(f"cgroup v{version}: {problem}")
    return found


@pytest.fixture(params=["v1", "v2", "all"])
def groups(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Groups]:
    """Real groups of an agent of this machine: in v1 alone, in v2 alone, and as an agent chooses."""
    mounts = own_mounts() if request.param == "all" else hierarchies(int(request.param[1]))
    if problem := problem_with(mounts):
        pytest.skip(problem)
    found = Groups.open(tmp_path, "node-1", mounts)
    yield found
    found.collect([])
    found.close()


@pytest.fixture
def limiting(tmp_path: Path) -> Iterator[Groups]:
    """Real groups that limit memory, CPU and pids."""
    found = Groups.open(tmp_path, "node-1")
    if missing := {"memory", "cpu", "pids"} - {*found.enforcement.enforced}:
        pytest.skip(f"no group here limits {', '.join(missing)}: {found.enforcement.why}")
    yield found
    found.collect([])
    found.close()


def group_of(groups: Groups, pod_id: str, name: str = "main", wanted: Resources | None = None) -> Group:
    group = require(groups.of(pod_id, name))
    group.make(wanted or Resources())
    return group


def launch(directory: Path, group: Group, script: str) -> LaunchSpec:
    env = {"PATH": os.environ["PATH"], "RCFARM_DIR": f"{directory}/"}
    return LaunchSpec(["sh", "-c", script], env, directory, directory / "out.log", cgroup=group)


def test_own_groups_are_found_where_they_are_mounted() -> None:
    """Each hierarchy has its own path; names without a controller do not count as limits."""
    own = "3:memory:/a\n2:cpu,cpuacct:/b\n1:name=systemd:/c\n0::/d/e\n"
    found = find_mounts(own, f"{V1_LINES}{V2_LINE}\n40 1 0:1 / /proc rw - proc proc rw\n")
    assert [str(mount.own) for mount in found] == [
        "/sys/fs/cgroup/memory/a",
        "/sys/fs/cgroup/cpu,cpuacct/b",
        "/sys/fs/cgroup/systemd/c",
        "/sys/fs/cgroup/d/e",
    ]
    assert found[1].controllers == {"cpu", "cpuacct"}
    assert [mount.version for mount in found] == [1, 1, 1, 2]


@pytest.mark.parametrize(
    ("root", "path", "expected"),
    [
        ("/", "/", "/sys/fs/cgroup"),
        ("/docker/1", "/docker/1", "/sys/fs/cgroup"),  # a container that sees the machine's paths
        ("/docker/1", "/docker/1/x", "/sys/fs/cgroup/x"),
        ("/docker/1", "/docker/12", None),
        ("/", "/../other", None),  # outside of the namespace
    ],
)
def test_a_part_of_a_hierarchy_may_be_mounted(root: str, path: str, expected: str | None) -> None:
    """The path in the mount is the group's without the part that is not shown; what can't be reached is left out."""
    found = find_mounts(f"0::{path}\n", V2_LINE.replace(" / ", f" {root} ", 1))
    assert [str(mount.own) for mount in found] == ([expected] if expected else [])


def make_v2(directory: Path, monkeypatch: pytest.MonkeyPatch, **files: str) -> Path:
    """Make a directory that looks like a v2 hierarchy: each new group gets its files, as from the kernel."""

    def fill(path: Path) -> None:
        for name, content in (FILES | files).items():
            (path / name).write_text(content)
        if path != directory:
            (path / "cgroup.controllers").write_text((path.parent / "cgroup.subtree_control").read_text())

    mkdir = Path.mkdir

    def make(path: Path, *args: object, **options: object) -> None:
        mkdir(path, *args, **options)  # type: ignore[arg-type]
        if path.is_relative_to(directory):
            fill(path)

    def write(path: Path, text: str) -> None:
        if path.name == "cgroup.subtree_control":
            text = f"{path.read_text()} {text.removeprefix('+')}".strip()
        path.write_text(text)

    monkeypatch.setattr(Path, "mkdir", make)
    monkeypatch.setattr(cgroups, "_write", write)
    monkeypatch.setattr(cgroups, "_entered", lambda base, problems: base)
    directory.mkdir()
    return directory


def test_v2_limits_are_written_as_the_kernel_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """memory, swap, cpu and pids have their values; the whole group ends when memory runs out; controllers are handed
    down level by level."""
    own = make_v2(tmp_path / "own", monkeypatch)
    state = tmp_path / "state"
    state.mkdir()
    groups = Groups.open(state, "n1", [Mount(own, 2)])
    assert groups.enforcement.words == "memory, cpu, pids by cgroup v2"
    group_of(groups, "web", wanted=Resources(memory="512Mi", cpu="1500m", pids=200))
    base = next(own.glob("rcfarm-n1-*"))
    made = base / "pod-web" / "run-main"
    found = {name: (made / name).read_text() for name in FILES if name.endswith((".max", ".group"))}
    assert found == {
        "memory.max": "536870912",
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "cpu.max": "150000 100000",
        "pids.max": "200",
    }
    for each in (own, base, base / "pod-web"):
        assert set((each / "cgroup.subtree_control").read_text().split()) == {"memory", "cpu", "pids"}
    assert (made / "cgroup.subtree_control").read_text() == ""
    group_of(groups, "web")  # another manifest, without limits
    assert {(made / f"{name}.max").read_text() for name in ("memory", "pids")} == {"max"}
    assert (made / "cpu.max").read_text() == "max 100000"


def test_v2_counters_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is without the file cache that can be dropped; a kill by the group's own limit differs from another."""
    own = make_v2(tmp_path / "own", monkeypatch)
    group = group_of(Groups.open(tmp_path, "n1", [Mount(own, 2)]), "web")
    made = next(own.glob("rcfarm-n1-*/pod-web/run-main"))
    (made / "memory.current").write_text("5000\n")
    (made / "memory.stat").write_text("anon 1000\ninactive_file 3000\n")
    (made / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1\n")
    (made / "pids.current").write_text("7\n")
    (made / "memory.events").write_text("low 0\nhigh 0\nmax 3\noom 0\noom_kill 2\n")
    assert group.sample() == (2000, 1.5, 7, 2)
    assert not group.reached_its_limit()  # the machine, or a group above, had no memory
    (made / "memory.events.local").write_text("max 3\noom 1\noom_kill 1\n")
    assert group.reached_its_limit()
    assert group.oom_event() is None  # the kernel ends the whole group


def test_an_agent_leaves_the_group_that_hands_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """v2 allows no processes beside groups with controllers: the agent moves to a leaf, and a later one that is started
    in the leaf works beside it."""
    own = make_v2(tmp_path / "own", monkeypatch, **{"cgroup.procs": ""})
    (own / "cgroup.procs").write_text(f"{os.getpid()}\n")
    groups = Groups.open(tmp_path, "n1", [Mount(own, 2)])
    assert groups.enforcement.enforced == ("memory", "cpu", "pids")
    assert (own / LEAF / "cgroup.procs").read_text() == str(os.getpid())
    later = Groups.open(tmp_path, "n1", [Mount(own / LEAF, 2)])
    assert later._bases == groups._bases


@pytest.mark.parametrize(
    ("name", "processes", "whole", "why"),
    [
        ("session-1.scope", "1 2", False, "has other processes: start the agent in a group of its own"),
        ("rcfarm-agent.service", "", False, "has no subgroup for the agent: set Delegate=yes and DelegateSubgroup="),
        ("container", "1 2", True, ""),
    ],
)
def test_others_are_not_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, processes: str, whole: bool, why: str
) -> None:
    """Processes that are not the agent's own are moved only in a container. Else limits are not enforced, which is
    said, but trees still end as a whole."""
    own = make_v2(tmp_path / name, monkeypatch)
    (own / "cgroup.procs").write_text(processes or str(os.getpid()))
    enforcement = Groups.open(tmp_path, "n1", [Mount(own, 2, is_whole=whole)]).enforcement
    assert why in enforcement.why
    assert enforcement.tree
    assert enforcement.by == ("rlimits" if why else "cgroup v2")
    assert (own / LEAF).exists() is not bool(why)


def test_without_groups_rlimits_are_the_fallback(tmp_path: Path) -> None:
    """An agent that can write none still runs, and says what does not hold, and why."""
    (tmp_path / "file").touch()
    groups = Groups.open(tmp_path, "n1", [Mount(tmp_path / "file", 2)])
    assert groups.of("web", "main") is None
    words = groups.enforcement.words
    assert words.startswith("memory of each process by rlimits; cpu and pids not at all; processes that leave their")
    assert str(tmp_path / "file") in groups.enforcement.why
    assert "no hierarchy of control groups is mounted" in Groups.open(tmp_path, "n1", []).enforcement.words


async def test_a_process_is_in_its_group_before_it_runs(groups: Groups, tmp_path: Path) -> None:
    """The program's first look shows the group; the agent itself stays outside."""
    group = group_of(groups, "web")
    handle = spawn(launch(tmp_path, group, "cat /proc/self/cgroup; exec sleep 1000")).open()
    await until(lambda: "run-main" in (tmp_path / "out.log").read_text())
    assert "pod-web" in (tmp_path / "out.log").read_text()
    assert [*group.members()] == [handle.pid]
    assert "pod-web" not in Path("/proc/self/cgroup").read_text()
    await handle.terminate(signal.SIGKILL, 5)
    assert [*group.members()] == []
    assert groups.remove("web")


async def test_nothing_escapes(groups: Groups, tmp_path: Path) -> None:
    """Sessions, double forks and programs that ignore the signal end with their tree; the neighbour's stay."""
    neighbour = spawn(launch(tmp_path, group_of(groups, "other"), "exec sleep 1000")).open()
    script = "trap '' TERM; setsid sleep 1000 & (setsid sh -c 'sleep 1000 & exit' &); env -i sleep 1000 & sleep 1000"
    group = group_of(groups, "web")
    handle = spawn(launch(tmp_path, group, script)).open()
    await until(lambda: len([*group.members()]) == 5)
    members = [*group.members()]
    start = time.monotonic()
    await handle.terminate(signal.SIGTERM, 0.1)
    assert time.monotonic() - start < 1.1
    assert not any(map(alive, members))
    assert groups.remove("web")
    assert alive(neighbour.pid)
    await neighbour.terminate(signal.SIGTERM, 5)


async def test_a_fork_bomb_ends(groups: Groups, tmp_path: Path) -> None:
    """A tree that starts processes all the time is ended while it does."""
    group = group_of(groups, "web", wanted=Resources(pids=60))
    script = "trap '' TERM; bomb() { while :; do (setsid sleep 1000 &) 2>/dev/null; done; }; bomb & bomb & bomb & wait"
    handle = spawn(launch(tmp_path, group, script)).open()
    await until(lambda: len([*group.members()]) > 40)
    start = time.monotonic()
    await handle.terminate(signal.SIGTERM, 0)
    assert time.monotonic() - start < 5
    assert [*group.members()] == []
    assert groups.remove("web")


async def test_a_polite_escapee_is_asked_first(groups: Groups, tmp_path: Path) -> None:
    """The stop signal also reaches what has left the process group."""
    group = group_of(groups, "web")
    child = "trap 'echo asked; exit' TERM; echo up; while :; do sleep 0.01; done"
    handle = spawn(launch(tmp_path, group, f'setsid sh -c "{child}" & exec sleep 1000')).open()
    await until(lambda: "up" in (tmp_path / "out.log").read_text())
    await handle.terminate(signal.SIGTERM, 10)
    assert "asked" in (tmp_path / "out.log").read_text()


async def test_the_next_agent_finds_the_groups(groups: Groups, tmp_path: Path) -> None:
    """Groups are found again by the state directory; a pod that is on record stays, another one is ended."""
    group = group_of(groups, "web")
    kept = spawn(launch(tmp_path, group, "setsid sleep 1000 & exec sleep 1000")).open()
    lost = spawn(launch(tmp_path, group_of(groups, "lost"), "exec sleep 1000")).open()
    mounts = [mount for mount in own_mounts() if any(mount.own in Path(p).parents for p in _directories(groups))]
    later = Groups.open(tmp_path, "node-1", mounts)
    assert later.collect(["web"]) == ["lost"]
    await lost.wait()
    assert alive(kept.pid)
    again = require(adopt(kept.identity, later.of("web", "main")))
    kept.release()
    await again.terminate(signal.SIGTERM, 0.5)
    assert [*group.members()] == []
    lost.reap()


def _directories(groups: Groups) -> list[str]:
    return [place.directory for base in groups._bases for place in base.roles.values()]


async def test_groups_that_are_switched_off_still_end_what_runs(groups: Groups, tmp_path: Path) -> None:
    """Pods of before keep their group until they stop; new ones get none."""
    handle = spawn(launch(tmp_path, group_of(groups, "web"), "exec sleep 1000")).open()
    later = Groups.open(tmp_path, "node-1", use=False)
    assert later.enforcement.why == "agent.cgroups is false"
    assert later.of("new", "main") is None
    found = require(later.of("web", "main"))
    assert [*found.members()] == [handle.pid]
    await handle.terminate(signal.SIGTERM, 5)
    assert later.remove("web")


async def test_pods_below_a_former_own_group_are_adopted(tmp_path: Path) -> None:
    """An agent that is started elsewhere, as by a service manager after a try by hand, finds what runs."""
    mounts = hierarchies(2)
    elsewhere = mounts[0].own / f"rcfarm-trial-{os.getpid()}"
    elsewhere.mkdir()
    try:
        first = Groups.open(tmp_path, "node-1", [Mount(elsewhere, 2)])
        handle = spawn(launch(tmp_path, group_of(first, "web"), "exec sleep 1000")).open()
        second = Groups.open(tmp_path, "node-1", mounts)
        adopted = require(second.of("web", "main"))
        assert [*adopted.members()] == [handle.pid]
        assert second.collect(["web"]) == []
        assert second.collect([]) == ["web"]
        await handle.wait()
        handle.reap()
        second.close()
        assert not [*elsewhere.iterdir()] or not any(each.is_dir() for each in elsewhere.iterdir())
    finally:
        elsewhere.rmdir()


def test_two_agents_share_nothing(tmp_path: Path) -> None:
    """Agents of one machine, and of one name, have groups of their own: neither collects the other's pods."""
    mounts = hierarchies(2)
    found = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        found.append(Groups.open(tmp_path / name, "node-1", mounts))
    group = group_of(found[0], "web")
    assert found[1].collect([]) == []
    assert group.sample() is not None
    assert found[0].collect([]) == ["web"]
    for each in found:
        each.close()


async def test_memory_is_limited_and_the_end_is_counted(limiting: Groups, tmp_path: Path) -> None:
    """A program over its limit is killed, and counted as one that reached its own limit."""
    group = group_of(limiting, "web", wanted=Resources(memory="24Mi"))
    handle = spawn(launch(tmp_path, group, "exec tail /dev/zero")).open()
    await handle.wait()
    assert handle.reap().signal == "SIGKILL"
    assert group.oom_kills() == 1
    assert group.reached_its_limit()


async def test_pids_and_cpu_are_limited(limiting: Groups, tmp_path: Path) -> None:
    """A fork bomb stays below its limit, and a busy loop within its share."""
    group = group_of(limiting, "web", wanted=Resources(cpu="100m", pids=10))
    script = "while :; do :; done & for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 1000 & done; wait"
    handle = spawn(launch(tmp_path, group, script)).open()
    await until(lambda: (sample := group.sample()) is not None and sample.pids == 10)
    first, start = group.sample(), time.monotonic()
    time.sleep(0.6)
    second, seconds = group.sample(), time.monotonic() - start
    assert first is not None
    assert second is not None
    assert second.pids == 10
    assert (second.cpu - first.cpu) / seconds < 0.2
    await handle.terminate(signal.SIGKILL, 5)


def test_a_limit_that_the_kernel_refuses_is_named(tmp_path: Path) -> None:
    """The message has the field and the file."""
    directory = tmp_path / "base" / "pod-web" / "run-main"
    directory.mkdir(parents=True)
    base = Base({"tree": Place(str(tmp_path / "base"), 2), "memory": Place(str(tmp_path / "base"), 2)})
    with pytest.raises(StartFailed, match=r"resources.memory: .*memory.max"):
        Group(base, "pod-web/run-main").make(Resources(memory="1Gi"))
    with pytest.raises(StartFailed, match="its control group can't be entered"):
        Group(base, "pod-web/run-main").enter(1)


def test_a_process_that_ends_at_the_gate_leaves_no_group_behind(groups: Groups) -> None:
    """A group whose process has ended can be removed at once, or soon."""
    group = group_of(groups, "web")
    child = subprocess.Popen(["true"])
    child.wait()
    with pytest.raises(StartFailed, match="can't be entered"):
        group.enter(child.pid)
    assert groups.remove("web")
