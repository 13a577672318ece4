"""Entry points that replace frameworkbarrier, frameworkcontroller, HiveD and kubeflow's training-operator when only the
image is changed.

Their manifests give no command, or call `./start.sh`, and may give flags of klog, which Go programs accept with one
dash or two. So there are programs of their names, and the environment determines the role:

- `FC_FRAMEWORK_NAME` is set in every container of a Framework's pods, and nowhere else: the barrier;
- `start.sh` in a folder with a `frameworkcontroller.yaml`: the Framework operator;
- `start.sh` in a folder with a `hivedscheduler.yaml`, or with `CONFIG`: the extender.

The training-operator's manifest calls `/manager`. If none or several apply, the program ends with an error. An init
container that ends with 0 lets a gang start, so no program here does that before the barrier has passed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rcfarm.cli import ERROR
from store.errors import RcfarmError

_SWITCHES = frozenset(
    ["add_dir_header", "alsologtostderr", "logtostderr", "one_output", "skip_headers", "skip_log_headers"]
)  # of klog, true or false
_VALUES = frozenset(["log_backtrace_at", "log_dir", "log_file", "log_file_max_size", "stderrthreshold", "v", "vmodule"])
_DEBUG = 4  # from this -v on, rcfarm logs for debugging
BARRIER_FILES = Path("/mnt/frameworkbarrier")  # where frameworkbarrier's image writes its files
PERMANENT = 210  # the barrier's exit code for errors that a retry would not change
CONTROLLER_FILE, HIVED_FILE = "frameworkcontroller.yaml", "hivedscheduler.yaml"
FRAMEWORKS = ["jobs", "--kinds", "framework"]
CONTROLLER_SETTINGS = ["--framework-config", CONTROLLER_FILE]


class Undecided(RcfarmError):
    """The role to run is ambiguous or unknown; the message says what to do."""


def without_klog(arguments: Sequence[str]) -> tuple[list[str], int]:
    """Split off the flags of klog. Return the other arguments and the verbosity (`-v`, 0 without one)."""
    rest: list[str] = []
    verbosity = 0
    left = list(arguments)
    while left:
        argument = left.pop(0)
        name, equals, value = argument.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if not argument.startswith("-") or name not in _SWITCHES | _VALUES:
            rest.append(argument)
            continue
        if not equals and name in _VALUES and left:
            value = left.pop(0)
        if name == "v" and value.isascii() and value.isdigit():
            verbosity = int(value[:9])
    return rest, verbosity


def in_a_framework(environ: Mapping[str, str]) -> bool:
    """Return whether this is a container of a Framework's pod."""
    return bool(environ.get("FC_FRAMEWORK_NAME") and environ.get("FC_FRAMEWORK_NAMESPACE"))


def role_of(environ: Mapping[str, str], files: Iterable[str]) -> list[str]:
    """Return the arguments of `rcfarm` for the role to run. `files`: the names in the working directory.

    Raises `Undecided` when no role or several apply.
    """
    here = set(files)
    roles: dict[str, list[str]] = {}
    if in_a_framework(environ):
        roles["FC_FRAMEWORK_NAME is set (the barrier)"] = ["barrier", "--output-dir", str(BARRIER_FILES)]
    if CONTROLLER_FILE in here:
        roles[f"./{CONTROLLER_FILE} is there (the Framework operator)"] = [*FRAMEWORKS, *CONTROLLER_SETTINGS]
    if HIVED_FILE in here or environ.get("CONFIG"):
        roles[f"./{HIVED_FILE} is there, or CONFIG is set (HiveD's extender)"] = ["extender"]
    if len(roles) == 1:
        return next(iter(roles.values()))
    found = "; ".join(roles) or f"FC_FRAMEWORK_NAME is not set, and there is no {CONTROLLER_FILE} and no {HIVED_FILE}"
    raise Undecided(f"can't determine the role to run: {found}. Give a command: rcfarm barrier, jobs or extender")


def arguments(given: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the arguments with which `rcfarm` runs: `given`, unless a Framework's pod gives no command."""
    if in_a_framework(environ):
        rest, _ = without_klog(given)
        if not rest:
            return role_of(environ, ())
    return list(given)


def start() -> None:
    """Run the role of the working directory and environment, for `start.sh`."""
    try:
        role = role_of(os.environ, (entry.name for entry in Path.cwd().iterdir()))
    except Undecided as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(ERROR) from None
    _run(role)


def frameworkbarrier() -> None:
    """The program `frameworkbarrier`: its files go into the working directory, or with `--output-dir` elsewhere."""
    _run(["barrier"])


def frameworkcontroller() -> None:
    """The program `frameworkcontroller`: settings from `./frameworkcontroller.yaml`, if there is one."""
    _run([*FRAMEWORKS, *CONTROLLER_SETTINGS] if Path(CONTROLLER_FILE).exists() else FRAMEWORKS)


def hivedscheduler() -> None:
    """The program `hivedscheduler`: its file is the one that `CONFIG` names, or `./hivedscheduler.yaml`."""
    _run(["extender"])


def training_operator() -> None:
    """The program `training-operator`, also called `/manager`: PyTorchJobs and TFJobs, under the original's flags.

    Probes get their codes without a token; without one of the user's, nobody reads reasons at their listener.
    """
    import secrets  # these take time that other commands must not pay

    from rcfarm.cli.daemons.training_flags import BadFlag, translate

    try:
        flags = translate(sys.argv[1:], os.environ)
    except BadFlag as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(ERROR) from None
    for warning in flags.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if not {"RCFARM_WEB_TOKEN", "RCFARM_WEB_TOKEN_FILE"} & os.environ.keys():
        os.environ["RCFARM_WEB_TOKEN"] = secrets.token_urlsafe()
    sys.argv[1:] = flags.others
    _run(["jobs", *flags.ours])


def _run(role: list[str]) -> None:
    from rcfarm.cli.main import run

    rest, verbosity = without_klog(sys.argv[1:])
    debug = ["--log-level", "debug"] if verbosity >= _DEBUG and role[0] != "barrier" else []
    sys.argv[1:] = [*role, *debug, *rest]
    run(PERMANENT if role[0] == "barrier" else ERROR)


if __name__ == "__main__":
    start()
