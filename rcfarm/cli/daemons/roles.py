"""`rcfarm dev | farm | agent | tasks | jobs | extender`: flags become settings, bad settings one clear line.

A role is imported when its command runs, so that help, and the check of a command line, are quick.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from rcfarm.cli import ERROR
from rcfarm.cli.kit.help import HelpfulCommand
from rcfarm.cli.kit.options import Context, UsageProblem, parse_pairs, read_file
from rcfarm.config.settings import BadSettings, Settings
from rcfarm.config.sources import PREFIX, load
from rcfarm.daemon.visible import visible
from rcfarm.operations.errors import BadInput
from store.kube.api.errors import NoConfig
from store.kv.protocol import StoreError

SECRETS = frozenset({"web.token"})

app = typer.Typer(rich_markup_mode=None)


def _flag(*names: str, metavar: str, text: str, kind: Any = str | None) -> Any:
    """Return the annotation of an option."""
    return Annotated[kind, typer.Option(*names, metavar=metavar, help=text)]


_CONFIG = {"config": _flag("--config", "-c", metavar="FILE", text="Settings, as TOML.", kind=Path | None)}
_STORE = {
    "store.url": _flag("--store", metavar="URL", text="consul://HOST:PORT, consuls://… (TLS), embedded:DIR or memory:"),
    "store.root": _flag("--root", metavar="PREFIX", text="First part of every key."),
}
_LEASE = _flag("--lease", metavar="[NAMESPACE/]NAME|off", text="Lease used for leader election between replicas.")
_EVERY_DAEMON = {
    "web.listen": _flag("--listen", metavar="HOST:PORT|off", text="Address that serves /livez, /readyz and /metrics."),
    "log.level": _flag("--log-level", metavar="LEVEL", text="debug, info, warning or error."),
    "log.format": _flag("--log-format", metavar="FORMAT", text="auto, json or console."),
    "set": _flag(
        "--set", metavar="SECTION.FIELD=VALUE", text="Any other setting; may be repeated.", kind=list[str] | None
    ),
}


def _daemon(options: Mapping[str, Any], **defaults: Any) -> Callable[[Callable[..., int]], None]:
    """Return a decorator that registers a role as the command of its name.

    `options`: the annotation of each option, in the order of the help. The flag of a setting has the setting's dotted
    name. `config` is the file of settings, `set` any other setting; the rest are parameters of the role, which is
    called with the settings first. `defaults`: those that are not None; that of a setting is overridden by the file
    and the variables, too.
    """
    names = {option: option.replace(".", "_") for option in options}
    preset = {option: defaults.pop(name) for option, name in names.items() if "." in option and name in defaults}

    def register(role: Callable[..., int]) -> None:
        def command(**arguments: Any) -> None:
            given = {option: arguments[name] for option, name in names.items()}
            config, others = given.pop("config"), given.pop("set") or ()
            flags = {option: given.pop(option) for option in options if "." in option}
            try:
                code = role(_settings(config, flags, others, preset), **given)
            except (BadSettings, BadInput, NoConfig, UsageProblem, StoreError) as error:
                typer.echo(visible(f"error: {error}"), err=True)
                code = ERROR
            sys.exit(code)

        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(
                    names[option], inspect.Parameter.KEYWORD_ONLY, default=defaults.get(names[option]), annotation=kind
                )
                for option, kind in options.items()
            ]
        )
        command.__annotations__ = {names[option]: kind for option, kind in options.items()}
        app.command(role.__name__, cls=HelpfulCommand, help=role.__doc__)(command)

    return register


def _settings(
    config: Path | None,
    flags: Mapping[str, str | list[str] | None],
    others: Iterable[str],
    defaults: Mapping[str, object],
) -> Settings:
    """Load the settings. Raises `BadSettings`, and `UsageProblem` for a secret on the command line."""
    given = parse_pairs("--set", others)
    for name in SECRETS & given.keys():
        section, _, field = name.partition(".")
        variable = f"{PREFIX}{section}_{field}".upper()
        raise UsageProblem(
            f"--set {name}=…: every user of this machine can read command lines (ps); write the secret into a file "
            f"and give --set {name}_file=FILE, or set {variable}; and change the secret, because it has been exposed"
        )
    texts = {name: ",".join(value) or None if isinstance(value, list) else value for name, value in flags.items()}
    return load(config, environ=os.environ, overrides={**texts, **given}, defaults=defaults)


@_daemon(
    {
        **_CONFIG,
        "directory": _flag(
            "--directory",
            metavar="DIR",
            text="Directory for the state of the store and the agents.",
            kind=Path | None,
        ),
        "nodes": Annotated[
            int, typer.Option("--nodes", metavar="N", min=1, help="How many nodes, each with an agent.")
        ],
        "apply": _flag(
            "--apply", metavar="FILE", text="An RC file to apply at the start; repeatable.", kind=list[Path] | None
        ),
        "down": Annotated[
            bool,
            typer.Option("--down", help="Stop the pods that an ended `rcfarm dev` left running; keep their data."),
        ],
        **_EVERY_DAEMON,
        "log.level": _flag("--log-level", metavar="LEVEL", text="debug, info, warning (the default) or error."),
    },
    nodes=3,
    down=False,
    log_level="warning",
)
def dev(settings: Settings, directory: Path | None, nodes: int, apply: list[Path] | None, down: bool) -> int:
    """Run a whole fleet in one process on this machine: store, farm, task engine and agents."""
    from rcfarm.operations.rc_apply import load as load_rc_file
    from rcfarm.roles.dev import run_dev, stop_dev
    from store.open import dev_directory

    if down and apply:
        raise UsageProblem("--apply and --down exclude each other: pods are started by --apply, and stopped by --down")
    if down:
        return stop_dev(directory or dev_directory())
    documents = [document for file in apply or () for document in load_rc_file(str(file), read_file("--apply", file))]
    return run_dev(settings, directory=directory or dev_directory(), nodes=nodes, documents=documents)


@_daemon(
    {
        **_CONFIG,
        **_STORE,
        "farm.name": _flag("--name", metavar="NAME", text="The farm's name; the host name when absent."),
        "farm.selector": _flag(
            "--selector", metavar="SELECTOR", text="Label selector of the RCs that the farm claims."
        ),
        "farm.scheduler": _flag("--scheduler", metavar="label|pool|NAME", text="How nodes are chosen."),
        **_EVERY_DAEMON,
    }
)
def farm(settings: Settings) -> int:
    """Run a farm: it claims replication controllers and keeps them in their desired state.

    `rcfarm farm forget NAME` removes the record of a farm that is gone for good.
    """
    from rcfarm.roles.farm import run_farm

    return run_farm(settings)


@_daemon(
    {
        **_CONFIG,
        **_STORE,
        "agent.node": _flag("--node", metavar="NAME", text="The node's name; the host name when absent."),
        "agent.state_dir": _flag("--state-dir", metavar="DIR", text="Directory for the agent's state."),
        "agent.labels": _flag(
            "--label",
            "-l",
            metavar="KEY=VALUE",
            text="A label of the node; may be repeated.",
            kind=list[str] | None,
        ),
        **_EVERY_DAEMON,
    }
)
def agent(settings: Settings) -> int:
    """Run the node agent: it starts and supervises the pods that farms assign to this machine."""
    from rcfarm.roles.agent import run_agent

    return run_agent(settings)


@_daemon(
    {
        **_CONFIG,
        **_STORE,
        "tasks.name": _flag("--name", metavar="NAME", text="The engine's name; the host name when absent."),
        "tasks.selector": _flag(
            "--selector", metavar="SELECTOR", text="Label selector of the executions that the engine claims."
        ),
        "tasks.data": _flag("--data", metavar="URL|DIR", text="Where inputs, outputs and cached results are kept."),
        "tasks.concurrency": _flag("--concurrency", metavar="N", text="Plugin calls in flight, for each plugin."),
        "tasks.enabled": _flag(
            "--plugin",
            metavar="ID",
            text="A plugin to load; may be repeated; all when absent.",
            kind=list[str] | None,
        ),
        **_EVERY_DAEMON,
    }
)
def tasks(settings: Settings) -> int:
    """Run a task engine: it claims executions of tasks and drives them through their plugins."""
    from rcfarm.roles.tasks import run_tasks

    return run_tasks(settings)


@_daemon(
    {
        **_CONFIG,
        "kube.namespaces": _flag(
            "--namespace",
            "-n",
            metavar="NAME|all",
            text="Namespace to watch for jobs; may be repeated.",
            kind=list[str] | None,
        ),
        "jobs.kinds": _flag(
            "--kinds",
            metavar="KIND,…",
            text="framework, pytorchjob, tfjob; all that the cluster serves when absent.",
        ),
        "jobs.lease": _LEASE,
        "jobs.mode": _flag("--mode", metavar="compatible|native", text="Which form of the CRD is installed."),
        "kube.kubeconfig": _flag(
            "--kubeconfig",
            metavar="FILE",
            text="Credentials for the cluster; default: KUBECONFIG, ~/.kube/config or the pod's own.",
        ),
        "kube.context": Context,
        "jobs.framework_config": _flag(
            "--framework-config", metavar="FILE", text="A frameworkcontroller.yaml to take settings from."
        ),
        **_EVERY_DAEMON,
    }
)
def jobs(settings: Settings) -> int:
    """Run the operators of Frameworks and training jobs: they run gangs of pods on Kubernetes to completion."""
    from rcfarm.roles.jobs import run_jobs

    return run_jobs(settings)


@_daemon(
    {
        "extender.config": _flag(
            "--config", "-c", metavar="FILE", text="HiveD's file; default: $CONFIG, or ./hivedscheduler.yaml."
        ),
        "config": _flag("--settings", metavar="FILE", text="Settings, as TOML.", kind=Path | None),
        "extender.lease": _LEASE,
        "kube.kubeconfig": _flag(
            "--kubeconfig",
            metavar="FILE",
            text="Credentials for the cluster; default: HiveD's file, KUBECONFIG, ~/.kube/config or the pod's own.",
        ),
        "kube.context": Context,
        **_EVERY_DAEMON,
    }
)
def extender(settings: Settings) -> int:
    """Run HiveD's scheduler extender: it places gangs of pods in the cells guaranteed to their tenants."""
    from rcfarm.roles.extender import run_extender

    return run_extender(settings)
