"""A started version of a pod: its processes, each under a supervisor, and the monitor of its health.

The model: `run` is one task that supervises all launchables and watches the pod's health; cancelling it leaves the
processes running. After that either `stop` ends them, or `release` leaves them to the next agent. Each supervisor's
record of its process goes into the pod's one record on disk.

A pod's processes live in control groups, one for each launchable and one for its health check, all in that of the pod.
They are made before a process starts, kept while the pod runs its manifest, and removed once the pod is stopped. Limits
of `resources` that the agent's control groups can't enforce are left to rlimits, where there is one.

`launch_spec` makes a launchable of the manifest a process to start: environment, working directory, user and limits. A
process inherits only a few variables of the agent's environment (`_INHERITED`), which may hold tokens. Facts about the
pod come as RCFARM_* variables; `${RCFARM_…}` is expanded in `command`, `env` and `cwd`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pwd
import re
import resource
import shutil
import signal
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from rcfarm.agent.cgroups import Controller, Group, Groups, Sample
from rcfarm.agent.discovery import Discovery, Service
from rcfarm.agent.errors import AgentError, InstallFailed, NoSuchLaunchable
from rcfarm.agent.health import FlapLimiter, HealthMonitor, Prober, Verdict
from rcfarm.agent.install import Installed, Installer
from rcfarm.agent.log_files import LogRecord, LogRecords
from rcfarm.agent.ports import Ports, PortTaken, check_ports
from rcfarm.agent.process import Credentials, LaunchSpec, ProcessHandle, end_group
from rcfarm.agent.registration import Registration
from rcfarm.agent.secrets import PodSecrets
from rcfarm.agent.state import LaunchPaths, LaunchRecord, PodRecord, StateDir, write_atomically
from rcfarm.agent.supervisor import Supervisor
from rcfarm.config.agent import AgentSettings
from rcfarm.daemon.visible import visible
from store.kv.protocol import Store, StoreError
from store.redaction import REDACTED, Redactor
from store.schema.keys import Keys
from store.schema.manifest import Manifest
from store.schema.records import Intent, Labels, Process, Usage, utc_now
from store.timing import Backoff

log = structlog.get_logger(__name__)

_commands = itertools.count(1)  # of clients, to tell their control groups apart


@dataclass(frozen=True)
class PodDependencies:
    """What the pods of one agent share."""

    store: Store
    keys: Keys
    settings: AgentSettings
    address: str
    state: StateDir
    installer: Installer
    ports: Ports
    prober: Prober
    registration: Registration
    discovery: Discovery
    secrets: PodSecrets
    logs: LogRecords
    groups: Groups = field(default_factory=Groups)


class RunningPod:
    """One pod with its processes. `on_change`: a process changed; `on_verdict`: the pod's health did."""

    def __init__(
        self,
        dependencies: PodDependencies,
        pod_id: str,
        installed: Installed,
        record: PodRecord,
        limiter: FlapLimiter,
        *,
        on_change: Callable[[], None],
        on_verdict: Callable[[Verdict], None],
    ) -> None:
        self.installed = installed
        self.record = record
        self.lost_port = False
        self.guests: list[ProcessHandle] = []  # clients' commands, which are killed when the pod stops
        self._outputs: dict[str, tuple[int, str, str]] = {}  # of a run that has ended: restarts, last lines, file
        self._secrets: dict[str, dict[str, str]] = {}  # of the launchables whose secrets have been read
        self._redactor = Redactor()
        self.samples: dict[str, Sample] = {}  # what each launchable last used
        self._sampled = 0.0
        self._usages: dict[str, Usage] = {}
        self._check_group: Group | None = None  # once it is made
        self._dependencies = dependencies
        self._pod_id = pod_id
        self._on_change = on_change
        self._manifest = installed.manifest
        settings = dependencies.settings
        self._supervisors = {
            name: Supervisor(
                name,
                launchable,
                record.launchables.get(name, LaunchRecord()),
                self,
                Backoff(settings.restart_backoff, settings.restart_backoff_cap),
                proven_after=settings.restart_reset,
                log=log.bind(node=settings.node, pod=pod_id, launchable=name),
                now=utc_now,
            )
            for name, launchable in self._manifest.launchables.items()
        }
        check = self._manifest.health
        has_check = check.http or check.tcp or check.exec
        self._monitor = HealthMonitor(check, self._probe if has_check else None, self.processes, on_verdict, limiter)

    def processes(self) -> dict[str, Process]:
        """Return the state of every launchable. One that has failed, and a task's that has ended, shows its last lines;
        a restarted one shows those from before its restart."""
        processes = {name: supervisor.process for name, supervisor in self._supervisors.items()}
        for name, supervisor in self._supervisors.items():
            record = supervisor.record
            shows = bool(record.outcome) if self.record.task else record.last_exit and record.last_exit.code != 0
            if not shows:
                continue
            paths = self._dependencies.state.paths(self._pod_id, name)
            ended = record.restarts - bool(record.pid)  # the number of the run that has ended last
            if name not in self._outputs or (not record.pid and self._outputs[name][0] != ended):
                logs, log = self._dependencies.logs, ""
                if self.record.task:
                    output = output_of_task(logs, paths)
                else:  # an earlier agent may have seen the end
                    output, log = last_errors(logs, paths, is_over=not record.pid)
                self._outputs[name] = ended, self._redacted(output), log
            _, output, log = self._outputs[name]
            processes[name] = msgspec.structs.replace(processes[name], output=output, log=log)
        return processes

    def groups(self) -> list[int]:
        """Return the process groups of the pod."""
        processes = (supervisor.process for supervisor in self._supervisors.values())
        return [process.pid for process in processes if process.pid is not None]

    def service(self, labels: Labels) -> Service | None:
        """Return the service under which clients find the pod, or None without ports. Its main port is `http`, else the
        first."""
        numbers = self.record.ports
        if not numbers:
            return None
        port = numbers.get("http") or next(iter(numbers.values()))
        name = self._dependencies.settings.service_prefix + self._manifest.id
        return Service(name, self._dependencies.address, port, numbers, labels, self.record.rc)

    async def run(self) -> None:
        """Supervise until cancelled; the processes keep running."""
        async with asyncio.TaskGroup() as tasks:
            for supervisor in self._supervisors.values():
                tasks.create_task(supervisor.run())
            tasks.create_task(self._monitor.run())

    async def command(self, launchable: str, argv: list[str], term: str = "") -> LaunchSpec:
        """Return how a client's command runs in the pod: as one of its launchables would ("": the first), with the same
        limits in a control group of its own, so that neither ends with the other.

        Raises `InstallFailed`, `StartFailed`, `StoreError`; `NoSuchLaunchable` for one that the pod does not have.
        """
        name = launchable or next(iter(self._manifest.launchables))
        if name not in self._manifest.launchables:
            raise NoSuchLaunchable(f"it has no launchable {name!r}; it has {', '.join(self._manifest.launchables)}")
        spec = await self._launch_spec(name)
        check_directory(spec, f"launchables.{name}")
        group = self._dependencies.groups.of_command(self._pod_id, f"exec-{next(_commands)}")
        if group is not None:
            group.make(self._manifest.launchables[name].resources)
        env = {**spec.env, "TERM": term} if re.fullmatch(r"[A-Za-z0-9._+-]{1,64}", term) else spec.env
        return spec._replace(argv=argv, env=env, cgroup=group)

    async def stop(self) -> None:
        """Stop all processes at once, each as its manifest says. Call it only once `run` has ended."""
        for guest in self.guests:
            guest.signal_tree(signal.SIGKILL)
        async with asyncio.TaskGroup() as tasks:
            for supervisor in self._supervisors.values():
                tasks.create_task(supervisor.stop())
        if (group := self._dependencies.groups.of(self._pod_id)) is not None:
            text = "Processes of a pod have not ended, though killed"
            await end_group(group, lambda pids: log.warning(text, pod=self._pod_id, pids=pids[:10]))
            if not self._dependencies.groups.remove(self._pod_id):  # the next agent collects them
                log.warning("The control groups of a pod could not be removed", pod=self._pod_id)

    def cgroup(self, name: str) -> Group | None:
        """See `SupervisorHost`."""
        return self._dependencies.groups.of(self._pod_id, name)

    def sample(self) -> dict[str, Sample]:
        """Return what each launchable uses now. Reads files only, and may be called in a thread."""
        groups = {name: self.cgroup(name) for name in self._supervisors}
        found = {name: group.sample() for name, group in groups.items() if group is not None}
        return {name: sample for name, sample in found.items() if sample is not None}

    def sampled(self, samples: dict[str, Sample], now: float) -> None:
        """Keep new samples. `now`: monotonic, in seconds."""
        for name, sample in samples.items():
            if (before := self.samples.get(name)) is None:  # a rate needs two
                continue
            self._usages[name] = Usage(
                at=utc_now(),
                memory=sample.memory,
                memory_limit=self._manifest.launchables[name].resources.memory_bytes,
                cpu=max(0, round(1000 * (sample.cpu - before.cpu) / (now - self._sampled))),
                pids=sample.pids,
                oom_kills=sample.oom_kills,
            )
        self.samples, self._sampled = samples, now

    @property
    def memory_limit(self) -> int:
        """The sum of its launchables' limits, in bytes; 0 if one has none."""
        limits = [each.resources.memory_bytes for each in self._manifest.launchables.values()]
        return sum(limits) if all(limits) else 0

    def has_other_usage(self) -> bool:
        """Return whether what is used differs enough from what was shown to be worth a write."""
        for name, supervisor in self._supervisors.items():
            if (usage := self._usages.get(name)) is None:
                continue
            shown = supervisor.usage
            if shown is None or usage.oom_kills != shown.oom_kills:
                return True
            if abs(usage.memory - shown.memory) > max(USAGE_STEP, shown.memory * USAGE_SHARE):
                return True
        return False

    def show_usage(self) -> None:
        """Have `processes` return the newest use."""
        for name, supervisor in self._supervisors.items():
            supervisor.usage = self._usages.get(name, supervisor.usage)

    def release(self) -> None:
        """Leave the processes to the next agent. Call it only once `run` has ended."""
        for supervisor in self._supervisors.values():
            supervisor.release()

    async def prepare(self, name: str) -> LaunchSpec:
        """See `SupervisorHost`."""
        await self._read_secrets(name)
        try:
            check_ports(self.record.ports, self._manifest.ports, self.groups())
        except PortTaken as error:
            self.lost_port = error.chosen
            raise
        paths = self._dependencies.state.paths(self._pod_id, name)
        spec = await self._launch_spec(name)
        prepare_files(self._manifest, spec.credentials, paths)
        check_directory(spec, f"launchables.{name}")
        check_program(spec, f"launchables.{name}")
        if (exit_file := self.exit_file(name)) is not None:
            exit_file.unlink(missing_ok=True)
        self._dependencies.logs.started(paths.log, paths.error_log)
        if (cgroup := self.cgroup(name)) is not None:
            cgroup.make(self._manifest.launchables[name].resources)
        return spec._replace(exit_file=exit_file, cgroup=cgroup)

    def exit_file(self, name: str) -> Path | None:
        """See `SupervisorHost`: a task's process must not run again because its end was not seen."""
        return self._dependencies.state.paths(self._pod_id, name).exit_code if self.record.task else None

    def save(self, name: str, record: LaunchRecord) -> None:
        """See `SupervisorHost`."""
        saved = msgspec.structs.replace(self.record, launchables={**self.record.launchables, name: record})
        self._dependencies.state.save_pod(self._pod_id, saved)
        self.record = saved

    def changed(self) -> None:
        """See `SupervisorHost`."""
        self._monitor.changed()
        self._on_change()

    def hand_over(self, intent: Intent, tree: str) -> None:
        """Record the pod's new RC, and the tree of its intent; its processes see the RC when they are next started."""
        saved = msgspec.structs.replace(self.record, rc=intent.rc, task=intent.task, tree=tree)
        self._dependencies.state.save_pod(self._pod_id, saved)
        self.record = saved

    async def _probe(self) -> Verdict:
        """Run the check; the command of an exec check gets the environment of the first launchable."""
        check, command = self._manifest.health, None
        if check.exec is not None:
            name = next(iter(self._manifest.launchables))
            paths = self._dependencies.state.paths(self._pod_id, name)
            try:
                spec = await self._launch_spec(name)
                argv = [expand(word, spec.env, "health.exec.command") for word in check.exec.command]
                if self._check_group is None and (made := self._dependencies.groups.of_command(self._pod_id, "check")):
                    made.make(self._manifest.launchables[name].resources)
                    self._check_group = made
            except (AgentError, StoreError) as error:
                return Verdict("critical", str(error))
            group = self._check_group
            command = spec._replace(argv=argv, log=paths.check_output, error_log=None, limits={}, cgroup=group)
        verdict = await self._dependencies.prober.probe(check, self.record.ports, command)
        return verdict._replace(output=self._redacted(verdict.output), cause=self._redacted(verdict.cause))

    async def _launch_spec(self, name: str) -> LaunchSpec:
        """Return how a launchable is started, with the secrets as they were read last. Raises as `launch_spec` and
        `PodSecrets.read`."""
        if name not in self._secrets:  # an earlier agent has started it
            await self._read_secrets(name)
        paths = self._dependencies.state.paths(self._pod_id, name)
        context = pod_context(self._dependencies, self._pod_id, self.record, self.installed)
        return launch_spec(context, name, paths, self._secrets[name])

    async def _read_secrets(self, name: str) -> None:
        self._secrets[name] = await self._dependencies.secrets.read(
            self._manifest.launchables[name], f"launchables.{name}"
        )
        for value in self._secrets[name].values():
            self._redactor.remember(value)

    def _redacted(self, text: str) -> str:
        """Return what a program has printed without the pod's secrets. While they are not known, because an earlier
        agent has started the processes, nothing is shown."""
        launchables = self._manifest.launchables
        if text and any(launchables[name].secrets and name not in self._secrets for name in launchables):
            return REDACTED
        return self._redactor.text(text)


def pod_context(dependencies: PodDependencies, pod_id: str, record: PodRecord, installed: Installed) -> PodContext:
    """Return the facts that the pod's processes get."""
    return PodContext(
        node=dependencies.settings.node,
        address=dependencies.address,
        rc=record.rc,
        task=record.task,
        pod_id=pod_id,
        manifest_id=installed.manifest_id,
        manifest=installed.manifest,
        ports=record.ports,
        artifacts=installed.artifacts,
        users=Users(dependencies.settings.default_user, dependencies.settings.allowed_users),
        enforced=dependencies.groups.enforcement.enforced,
    )


OUTPUT_BYTES, OUTPUT_LINES = 2048, 20  # of a task's process, in its pod's reality
USAGE_STEP, USAGE_SHARE = 16 << 20, 0.25  # bytes, and share, by which a pod's memory must change to be shown again
ERROR_LINES, ERROR_WIDTH = 5, 200  # of a process that has failed, in its pod's reality
_ERROR_BYTES = ERROR_LINES * 8 * ERROR_WIDTH


def output_of_task(logs: LogRecords, paths: LaunchPaths) -> str:
    """Return the last lines that a task's process wrote, those on stderr after the others."""
    records = logs.of(paths.log), logs.of(paths.error_log)
    out, errors = (last_lines(record, OUTPUT_LINES, OUTPUT_BYTES).splitlines() for record in records)
    own = min(len(errors), max(OUTPUT_LINES // 2, OUTPUT_LINES - len(out)))  # lines of errors that are shown
    both = "\n".join([*out[max(0, len(out) + own - OUTPUT_LINES) :], *errors[len(errors) - own :]])
    return both[-OUTPUT_BYTES:]


def last_errors(logs: LogRecords, paths: LaunchPaths, *, is_over: bool) -> tuple[str, str]:
    """Return the last lines of the last run on stderr, else on stdout, bounded and without control characters, and
    the file that they are in. `is_over` false: of the run before the one that goes on."""
    for path in (paths.error_log, paths.log):
        if lines := last_lines(logs.of(path), ERROR_LINES, _ERROR_BYTES, is_over=is_over).split("\n"):
            shown = [visible(line) for line in lines if line.strip()]
            if shown:
                shown = [line if len(line) <= ERROR_WIDTH else f"{line[: ERROR_WIDTH - 1]}…" for line in shown]
                return "\n".join(shown), str(path)
    return "", str(paths.log)


def last_lines(log: LogRecord, lines: int, most: int, *, is_over: bool = True) -> str:
    """Return the last lines of the last run, as text of at most `most` bytes; "" if there is none. `is_over` false: of
    the run before the last one."""
    first, end = log.bounds()
    starts = [mark.position for mark in log.starts()]
    if not is_over and starts:
        end = starts.pop()
    first = max(first, end - most, *starts[-1:])
    begin = log.tail(lines, first, end)
    try:
        data = log.between(begin, end)
    except OSError:
        return ""
    if begin == end - most and b"\n" in data[:-1]:  # the first line is not whole
        data = data.partition(b"\n")[2]
    return "\n".join(data.decode(errors="replace").splitlines()[-lines:])


_INHERITED = ("PATH", "LANG", "LC_ALL", "TZ", "TMPDIR")
_VARIABLE = re.compile(r"\$\{(RCFARM_[A-Za-z0-9_]*)\}")


class Users(NamedTuple):
    """The users that processes may run as, see `agent.default_user` and `agent.allowed_users`."""

    default: str = ""
    allowed: tuple[str, ...] = ("*",)

    def account(self, user: str, at: str) -> pwd.struct_passwd:
        """Return the account of a launchable whose `user` is this, or "" for the default. Raises `InstallFailed`."""
        if user:
            account = _account(user, f"{at}.user")
            names = {account.pw_name, str(account.pw_uid)}
            usual = account.pw_uid != 0 and ("*" in self.allowed or account.pw_uid == os.geteuid())
            is_allowed = usual or bool(names & {*self.allowed, self.default})
            if not is_allowed:
                raise InstallFailed(
                    f"{at}.user: this node allows no pod to run as {user!r}: add it to agent.allowed_users there, or "
                    "name another user"
                )
            return account
        if self.default:
            return _account(self.default, "agent.default_user")
        return _account("nobody", "agent.default_user") if os.geteuid() == 0 else _own_account()


@dataclass(frozen=True, slots=True)
class PodContext:
    """The facts that a pod's processes get as variables. `ports` are the numbers in use; `artifacts` is a directory per
    launchable. `enforced`: limits that control groups enforce."""

    node: str
    address: str
    rc: str
    task: str
    pod_id: str
    manifest_id: str
    manifest: Manifest
    ports: Mapping[str, int]
    artifacts: Mapping[str, Path]
    users: Users
    enforced: Collection[Controller] = ()

    def variables(self) -> dict[str, str]:
        """Return the RCFARM_* variables that are the same for all launchables."""
        ports = {
            f"RCFARM_PORT_{re.sub(r'[^A-Z0-9]', '_', name.upper())}": str(number) for name, number in self.ports.items()
        }
        return {
            "RCFARM_NODE": self.node,
            "RCFARM_ADDRESS": self.address,
            **({"RCFARM_TASK": self.task} if self.task else {"RCFARM_RC": self.rc}),
            "RCFARM_POD_ID": self.pod_id,
            "RCFARM_MANIFEST": self.manifest_id,
            **ports,
        }


def launch_spec(context: PodContext, name: str, paths: LaunchPaths, secrets: Mapping[str, str]) -> LaunchSpec:
    """Return the launch of one launchable. `secrets`: the variables of its `env_from`. Raises `InstallFailed`, naming
    the field that this machine can't satisfy."""
    launchable, at = context.manifest.launchables[name], f"launchables.{name}"
    account = context.users.account(launchable.user, at)
    credentials = None
    if account.pw_uid != os.geteuid():
        if os.geteuid() != 0:
            raise InstallFailed(
                f"{at}.user: the agent runs as uid {os.geteuid()} and can't start processes as {account.pw_name!r}: "
                "run it as root, or leave user and agent.default_user empty"
            )
        groups = tuple(os.getgrouplist(account.pw_name, account.pw_gid))
        credentials = Credentials(account.pw_uid, account.pw_gid, groups)
    variables = context.variables() | {"RCFARM_DIR": str(paths.directory), "RCFARM_CONFIG": str(paths.config)}
    home = paths.directory
    if name in context.artifacts:
        home = context.artifacts[name]
        variables["RCFARM_ARTIFACT"] = str(home)
    env = {key: os.environ[key] for key in _INHERITED if key in os.environ}
    env |= {"HOME": account.pw_dir, "USER": account.pw_name, "LOGNAME": account.pw_name} | variables
    env |= secrets
    env |= {key: expand(value, variables, f"{at}.env.{key}") for key, value in launchable.env.items()}
    cwd = home / expand(launchable.cwd, variables, f"{at}.cwd")
    argv = [expand(word, variables, f"{at}.command") for word in launchable.command]
    wanted = launchable.resources
    limits = {
        resource.RLIMIT_AS: wanted.memory_bytes or None if "memory" not in context.enforced else None,
        resource.RLIMIT_NOFILE: wanted.nofile,
        resource.RLIMIT_NPROC: wanted.nproc,
        resource.RLIMIT_CORE: wanted.core,
    }
    given = {which: value for which, value in limits.items() if value is not None}
    return LaunchSpec(argv, env, cwd, paths.log, credentials, given, error_log=paths.error_log)


def check_directory(spec: LaunchSpec, at: str) -> None:
    """Refuse a working directory that is not there. Raises `InstallFailed`."""
    if not spec.cwd.is_dir():
        raise InstallFailed(f"{at}.cwd: {spec.cwd} is not a directory")


def check_program(spec: LaunchSpec, at: str) -> None:
    """Refuse a program that is not there. Raises `InstallFailed`."""
    program = spec.argv[0]
    if "/" in program:
        found = shutil.which(spec.cwd / program)
    else:
        found = shutil.which(program, path=spec.env.get("PATH", os.defpath))
    if found is None:
        where = f"in {spec.cwd}" if "/" in program else "on the PATH"
        raise InstallFailed(f"{at}.command: {program!r} is not an executable file {where}")


def prepare_files(manifest: Manifest, credentials: Credentials | None, paths: LaunchPaths) -> None:
    """Make the launchable's working directory and write its config file. Raises `InstallFailed`, `OSError`."""
    config = config_file(manifest)
    paths.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(paths.config, config)
    if credentials:
        for path in (paths.directory, paths.config):
            os.chown(path, credentials.uid, credentials.gid)


def config_file(manifest: Manifest) -> bytes:
    """Return the content of the file that RCFARM_CONFIG names. Raises `InstallFailed`."""
    try:
        return msgspec.json.format(msgspec.json.encode(manifest.config)) + b"\n"
    except (TypeError, ValueError, RecursionError) as error:  # YAML knows keys and values that JSON does not
        raise InstallFailed(f"config: can't be written as JSON: {error}") from error


def expand(text: str, variables: Mapping[str, str], at: str) -> str:
    """`text` with every `${RCFARM_…}` replaced; other `${…}` are left to the program. Raises `InstallFailed`."""

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in variables:
            known = ", ".join(sorted(key for key in variables if key.startswith("RCFARM_")))
            raise InstallFailed(f"{at}: ${{{name}}} is not defined; there are {known}")
        return variables[name]

    return _VARIABLE.sub(value, text)


def _account(user: str, at: str) -> pwd.struct_passwd:
    own = _own_account()
    if user in (own.pw_name, str(own.pw_uid)):
        return own
    try:
        return pwd.getpwuid(int(user)) if user.isdecimal() else pwd.getpwnam(user)
    except (KeyError, ValueError, OverflowError) as error:
        raise InstallFailed(f"{at}: this machine has no user {user!r}") from error


def _own_account() -> pwd.struct_passwd:
    try:
        return pwd.getpwuid(os.geteuid())
    except KeyError:  # containers often run as a uid without a name
        return pwd.struct_passwd(
            (str(os.geteuid()), "x", os.geteuid(), os.getegid(), "", os.environ.get("HOME", "/"), "/bin/sh")
        )
