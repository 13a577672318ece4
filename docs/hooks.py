"""Pages that are generated from the code when the site is built: settings, commands, metrics.

mkdocs calls `on_files`; the functions below it turn live objects into Markdown, so that the references are always up to
date. They are made of the text under each field of a settings class, and of the help of each command and metric.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import msgspec
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from prometheus_client import CollectorRegistry, Metric
from typer.main import get_command

from controllers.extender.config_reload import ConfigChange, ConfigSource, ConfigWatcher, LoadedConfig
from controllers.extender.scheduler import HivedScheduler
from controllers.framework.config import FrameworkConfig, PodFailure
from controllers.tasks.engine.engine import Engine, EngineSettings
from controllers.tasks.io.data import open_data
from controllers.tasks.io.secrets import SecretManager
from controllers.tasks.plugins.task_pods import TaskPods
from controllers.tasks.registry import PluginRegistry
from rcfarm.cli.apply import Everything
from rcfarm.cli.explain import Explanation, NodeDetails, PodOnNode
from rcfarm.cli.kit import json_views
from rcfarm.cli.kit.container_logs import LogLine
from rcfarm.cli.kit.help import examples_of, exits_of
from rcfarm.cli.kit.tasks import TaskInfo
from rcfarm.cli.main import app
from rcfarm.cli.plan import Effect, PlanInfo
from rcfarm.cli.pod_logs import PodLogLine
from rcfarm.cli.quota import QuotaInfo
from rcfarm.cli.rc.history import EventDiff
from rcfarm.cli.rc.lock import LockInfo
from rcfarm.cli.rc.restore import DeletedInfo
from rcfarm.cli.rc.show import RCExplanation
from rcfarm.cli.replay import DecisionInfo, ReplayInfo, ReplaySummary
from rcfarm.cli.rollout import RevisionInfo, RolloutInfo
from rcfarm.cli.secret import SecretInfo
from rcfarm.cli.task.change import TaskOutcome
from rcfarm.cli.task.show import AttemptLog, EventInfo, TaskExplanation
from rcfarm.config.settings import JobsSettings, Settings
from rcfarm.config.sources import ALIASES, variables
from rcfarm.doctor.findings import Finding
from rcfarm.farm.farm import Farm
from rcfarm.operations.events import FleetEvent
from rcfarm.operations.file_schema import definitions, field_texts
from rcfarm.operations.rc_apply import STRUCTS
from rcfarm.reports.framework import FrameworkInfo, FrameworkStatusInfo
from rcfarm.reports.hived_config import HivedClusterInfo, HivedFileInfo
from rcfarm.reports.jobs import JobReason
from rcfarm.reports.training import TrainingInfo, TrainingStatusInfo
from rcfarm.roles.agent import AgentMetrics
from rcfarm.roles.extender import ExtenderMetrics, ExtenderProbe
from rcfarm.roles.farm import FarmProbe
from rcfarm.roles.jobs import JobsRole
from rcfarm.roles.tasks import TasksProbe
from rcfarm.telemetry.kube import RestClientMetrics
from rcfarm.telemetry.prometheus import FarmMetrics, MeteredStore, new_registry
from rcfarm.telemetry.tasks import engine_metrics
from scheduler.hived.algorithm import HivedAlgorithm
from scheduler.hived.cells.topology import Topology
from scheduler.hived.config.file import (
    CellTypeSpec,
    HivedConfig,
    PhysicalCellSpec,
    VirtualCellSpec,
    VirtualClusterSpec,
)
from scheduler.hived.inspection.explain import PodExplanation, Simulation
from scheduler.label import LabelScheduler
from store.embedded.store import EmbeddedStore
from store.kube.events import EventRecorder
from store.kube.leaderelection.election import Election
from store.kube.memory.kube import MemoryKube
from store.kv.protocol import SessionSpec
from store.kv.session import SessionKeeper
from store.schema.keys import Keys
from store.schema.reasons import SCOPES
from store.schema.records import AuditEvent

_EVERYWHERE = frozenset({"help", "install_completion", "show_completion"})


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for name, text in (
        ("reference/settings.md", settings_page()),
        ("reference/frameworkcontroller-yaml.md", framework_config_page()),
        ("reference/hived-yaml.md", hived_config_page()),
        ("reference/rc-file.md", rc_file_page()),
        ("reference/cli.md", cli_page()),
        ("reference/json.md", json_page()),
        ("reference/metrics.md", metrics_page()),
        ("reference/reasons.md", reasons_page()),
    ):
        files.append(File.generated(config, name, content=text))
    return files


def settings_page() -> str:
    """Return the settings reference."""
    parts = [
        "# Settings\n",
        "A daemon reads its settings from a TOML file (`--config FILE`), then from `RCFARM_*` variables, then from "
        "flags; later sources override earlier ones. Any setting can be given as a flag with `--set "
        "SECTION.FIELD=VALUE`. Unknown settings are refused, with the line of the file and the nearest name. Durations "
        "are in seconds, sizes in bytes.\n",
        "In variables and flags a map is written `a=b,c=d`, a pair `1,2`, and nothing `null`.\n",
    ]
    for section, settings in get_type_hints(Settings).items():
        parts += [f"## `[{section}]` {{ #{section} }}\n", f"{inspect.getdoc(settings)}\n"]
        parts += [_setting(section, settings, field, text) for field, text in field_texts(settings)]
    return "\n".join(parts)


def _setting(section: str, settings: type, field: str, text: str) -> str:
    names = [name for name, meant in variables().items() if meant == (section, field)]
    named = ", ".join(f"`{name}`" for name in sorted(names, key=lambda name: name in ALIASES, reverse=True))
    kind = _type_name(get_type_hints(settings)[field])
    return f"### {section}.{field} {{ #{section}.{field} }}\n\n`{kind}` · {named}\n\n{text}\n"


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and "[" not in str(kind) else str(kind).replace("typing.", "")


def framework_config_page() -> str:
    """Return the reference of the file that `--framework-config` names."""
    parts = [
        "# frameworkcontroller.yaml\n",
        "`rcfarm jobs --framework-config FILE` takes frameworkcontroller's own file. [Settings](settings.md#jobs) "
        "override its values; unknown fields are refused.\n",
    ]
    for field, text in field_texts(FrameworkConfig):
        kind = _type_name(get_type_hints(FrameworkConfig)[field])
        parts.append(f"## {_camel(field)} {{ #{_camel(field)} }}\n\n`{_without_modules(kind)}`\n\n{text}\n")
    parts += ["## An entry of podFailureSpec\n", f"{inspect.getdoc(PodFailure)}\n"]
    return "\n".join(parts)


def _camel(field: str) -> str:
    return FrameworkConfig.__struct_encode_fields__[FrameworkConfig.__struct_fields__.index(field)]


def _without_modules(kind: str) -> str:
    return re.sub(r"\b[a-z_]+(?:\.[a-z_]+)*\.(?=[A-Z])", "", kind)


_HIVED_SECTIONS: dict[str, tuple[type, str, frozenset[str]]] = {
    "The file": (HivedConfig, "", frozenset({"warnings"})),
    "An entry of cellTypes": (CellTypeSpec, "cellTypes", frozenset()),
    "An item of physicalCells, or of cellChildren": (PhysicalCellSpec, "physicalCells", frozenset()),
    "An entry of virtualClusters": (VirtualClusterSpec, "virtualClusters", frozenset()),
    "An item of virtualCells": (VirtualCellSpec, "virtualCells", frozenset()),
}
_IN_PHYSICAL_CLUSTER = frozenset({"cellTypes", "physicalCells"})
_JSON_KINDS = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}
_YAML_KINDS = {str: "text", int: "whole number", bool: "true or false", tuple: "list", Mapping: "map"}


def hived_config_page() -> str:
    """Return the reference of HiveD's configuration file."""
    parts = [
        "# HiveD's configuration file\n",
        "The extender takes HiveD's own file, in YAML 1.1. In text fields, unquoted values are taken literally: "
        "`10.10` or `yes` is a name like any other. Whole numbers and booleans are written without quotes. Unknown "
        "fields are accepted, because other programs may read the file.\n",
        "[`rcfarm hived validate FILE`](cli.md#rcfarm-hived-validate) reports all errors in a file, each with its "
        "line, and likely mistakes; [`rcfarm hived show FILE`](cli.md#rcfarm-hived-show) shows the resulting cells and "
        "quotas. A running extender keeps its configuration when the file becomes invalid.\n",
    ]
    for title, (section, anchor, hidden) in _HIVED_SECTIONS.items():
        parts.append(f"## {title} {{ #{anchor or 'file'} }}\n")
        if section is not HivedConfig:
            parts.append(f"{inspect.getdoc(section)}\n")
        fields = [(field, text) for field, text in field_texts(section) if field not in hidden]
        parts += [_hived_field(section, anchor, field, text) for field, text in fields]
    return "\n".join(parts)


def _hived_field(section: type, anchor: str, field: str, text: str) -> str:
    first, *others = field.split("_")
    name = first + "".join(map(str.capitalize, others))
    if section is HivedConfig and name in _IN_PHYSICAL_CLUSTER:
        name = f"physicalCluster.{name}"
    kind = get_type_hints(section)[field]
    return f"### {name} {{ #{anchor or 'file'}.{name} }}\n\n`{_YAML_KINDS[get_origin(kind) or kind]}`\n\n{text}\n"


def rc_file_page() -> str:
    """Return the reference of an RC's file and of its manifest."""
    parts = [
        "# RC file and manifest\n",
        "A file for `rcfarm rc apply` or `rcfarm apply` has an RC in each YAML document. Unknown and repeated fields "
        "are refused, with the line and the nearest name. [Manifest](../manifest.md) says what a pod makes of its "
        "fields, [Rollouts](../rollouts.md) what `update` does.\n",
        "`rcfarm schema > rc.schema.json` writes the same as a JSON schema. An editor with a YAML language server "
        "checks and completes a file that begins with\n",
        "```yaml\n# yaml-language-server: $schema=rc.schema.json\n```\n",
    ]
    schemas = definitions()
    for place, struct in STRUCTS.items():
        anchor = "file" if place == "The file" else place
        parts += [f"## {place} {{ #{anchor} }}\n", f"{inspect.getdoc(struct)}\n", "| field | | |\n|---|---|---|"]
        required = schemas[struct.__name__]["required"]
        for field, schema in schemas[struct.__name__]["properties"].items():
            name = f"`{field}`" + (", required" if field in required else "")
            parts.append(f"| {name} | {_kind_of(schema)} | {_cell(schema['description'])} |")
        parts.append("")
    return "\n".join(parts)


def _kind_of(schema: Mapping[str, Any]) -> str:
    """Return the type of a field as people write it, with links to the structs of the page."""
    if "anyOf" in schema:
        return " or ".join(map(_kind_of, schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        place = next(place for place, struct in STRUCTS.items() if struct.__name__ == name)
        return f"[{place}](#{place})"
    if schema.get("type") == "array":
        return f"list of {_kind_of(schema['items'])}"
    if schema.get("type") == "object":
        return f"map to {_kind_of(schema['additionalProperties'])}" if schema.get("additionalProperties") else "map"
    if "%" in schema.get("pattern", ""):
        return "share (`25%`)"
    return _JSON_KINDS.get(schema.get("type", ""), "any value")


def cli_page() -> str:
    """Return the reference of all commands."""
    parts = [
        "# Commands\n",
        "Tables become JSON with `--output json`, and YAML with `--output yaml`; errors are then JSON on standard "
        'error, too: `{"error": {"object", "field", "message", "exit_code"}}`, of which the first two may be absent.\n',
        _EXIT_CODES,
    ]
    return "\n".join([*parts, *_commands(get_command(app), "rcfarm", None)])


_EXIT_CODES = """\
## Exit codes

| Code | Meaning |
|---|---|
| 0 | Done: it is as it was asked for |
| 1 | An error: one line names the object and what to do. Also a wrong command line, and a "no" to a question |
| 2 | Not complete: not fully placed, not healthy, stopped on the way, not ended within `--timeout` |
| 3 | Changed since it was shown: nothing was done |
| 130 | Ctrl-C. What the command has begun goes on |

`rcfarm plan` and `rcfarm what-if` return 2 when something would change, `rcfarm plan` 3 when the RC would not be whole
in the end, `rcfarm replay` 2 when a decision differs. A daemon returns 0 after a signal, and 1 after an error.
"""


def _commands(command: Any, name: str, parent: Any) -> Iterator[str]:
    context = command.make_context(name, [], parent, resilient_parsing=True)
    command = context.command
    path = context.command_path
    if parent is not None:
        yield f"{'##' if path.count(' ') == 1 else '###'} {path} {{ #{path.replace(' ', '-')} }}\n"
        yield f"{inspect.cleandoc(command.help or '')}\n"
    if hasattr(command, "list_commands"):
        for child in command.list_commands(context):
            if not command.get_command(context, child).hidden:  # a former name
                yield from _commands(command.get_command(context, child), child, context)
    else:
        usage = " ".join(command.collect_usage_pieces(context))
        yield f"```\n{path} {usage}\n```\n"
        yield from _parameters(command, context)
        named = path.partition(" ")[2]
        yield "```console\n" + "".join(f"$ {example}\n" for example in examples_of(named)) + "```\n"
        exits = exits_of(named, {parameter.name for parameter in command.params})
        yield "Exits with " + ", ".join(f"{code}: {meaning}" for code, meaning in exits.items()) + ".\n"


def _parameters(command: Any, context: Any) -> Iterator[str]:
    own = [parameter for parameter in command.get_params(context) if parameter.name not in _EVERYWHERE]
    records = [record for parameter in own if (record := parameter.get_help_record(context))]
    if records:
        yield "| Parameter | |\n|---|---|"
        yield from (f"| `{declaration}` | {_cell(text)} |" for declaration, text in records)
        yield ""


def _cell(text: str) -> str:
    """Escape text for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


_JSON_OF = {
    "rc list": list[json_views.RCInfo],
    "rc get": json_views.RCInfo,
    "rc status": json_views.RCStatusInfo | list[json_views.RCStatusInfo],
    "rc explain": RCExplanation,
    "rc owner": json_views.OwnerInfo | None,
    "rc history": list[AuditEvent],
    "rc logs, task logs -f, each line": PodLogLine,
    "rc apply": list[json_views.Outcome],
    "rc history --diff": list[EventDiff],
    "rc create, edit, enable, disable, rollback, restore": json_views.Outcome,
    "rc scale, restart, delete": json_views.Outcome | list[json_views.Outcome],
    "rc restore --list": list[DeletedInfo],
    "rc lock, unlock": LockInfo,
    "explain": Explanation,
    "explain, details of a node": NodeDetails,
    "explain, details of a pod": PodOnNode,
    "plan": list[PlanInfo],
    "what-if": list[Effect],
    "rollout status, pause, abort": RolloutInfo,
    "rollout history": list[RevisionInfo],
    "replay": list[DecisionInfo],
    "replay ID": ReplayInfo,
    "replay --all": ReplaySummary,
    "rollout resume, promote, undo, restart": json_views.Outcome,
    "task list": list[TaskInfo],
    "task status": TaskInfo,
    "task explain": TaskExplanation,
    "task history": list[EventInfo],
    "task logs": list[AttemptLog],
    "task run, submit, abort, retry, delete": TaskOutcome,
    "quota list": list[QuotaInfo],
    "quota set, explain": QuotaInfo,
    "secret list": list[SecretInfo],
    "apply": Everything,
    "node list": list[json_views.NodeInfo],
    "node get, label, cordon, uncordon": json_views.NodeInfo,
    "node drain": json_views.DrainInfo,
    "node undrain": list[json_views.NodeInfo],
    "node remove": json_views.NodeRemoval,
    "pod list": list[json_views.ListedPod],
    "pod stop, where": json_views.ListedPod,
    "events": list[FleetEvent],
    "farm forget": json_views.ForgottenFarm,
    "brake status, engage": json_views.BrakeInfo,
    "brake release": json_views.ReleaseInfo,
    "status": json_views.FleetInfo,
    "framework list": list[FrameworkInfo],
    "framework status": FrameworkStatusInfo,
    "framework explain": list[JobReason],
    "framework scale, stop": FrameworkInfo,
    "framework logs": list[LogLine],
    "job list": list[TrainingInfo],
    "job status": TrainingStatusInfo,
    "job explain": list[JobReason],
    "job logs": list[LogLine],
    "job suspend, resume, scale": TrainingInfo,
    "hived validate": HivedFileInfo,
    "hived show": HivedClusterInfo,
    "hived explain": PodExplanation,
    "hived simulate": Simulation,
    "doctor": list[Finding],
}


def json_page() -> str:
    """Return the reference of the output of `--output json`."""
    parts = [
        "# JSON output\n",
        "With `--output json` a command prints one JSON document on standard output; with `--watch`, one on a line for "
        "each state. A command on several RCs, or with `-l`, prints a list. Fields are added over time, never "
        "renamed or removed. Times are RFC 3339 in UTC. `rcfarm framework get` and `history` print the objects of the "
        "Kubernetes API unchanged; the output of `rcfarm hived snapshot` is for rcfarm itself.\n",
        "| `rcfarm …` | prints |\n|---|---|",
        *(f"| `{name}` | {_linked(kind)} |" for name, kind in _JSON_OF.items()),
        "",
    ]
    schemas, components = msgspec.json.schema_components(_JSON_OF.values(), ref_template="#{name}")
    assert len(schemas) == len(_JSON_OF)
    for name, schema in sorted(components.items()):
        parts += [f"## {name} {{ #{name} }}\n", f"{inspect.cleandoc(schema.get('description', ''))}\n"]
        if "properties" in schema:
            parts += ["| Field | Type |\n|---|---|"]
            parts += [f"| `{field}` | {_schema_type(kind)} |" for field, kind in schema["properties"].items()]
        parts.append("")
    return "\n".join(parts)


def _linked(kind: Any) -> str:
    (schema,), _ = msgspec.json.schema_components([kind], ref_template="#{name}")
    return _schema_type(schema)


def _schema_type(schema: dict[str, Any]) -> str:
    """Describe a JSON schema, with links to the schemas that it refers to."""
    if "$ref" in schema:
        return f"[{schema['$ref'].removeprefix('#')}]({schema['$ref']})"
    if "anyOf" in schema:
        return " or ".join(_schema_type(option) for option in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"] if value is not None)
    if "prefixItems" in schema:
        return f"[{', '.join(map(_schema_type, schema['prefixItems']))}]"
    if schema.get("type") == "array":
        return f"list of {_schema_type(schema['items'])}"
    if schema.get("type") == "object" and "additionalProperties" in schema:
        return f"map of {_schema_type(schema['additionalProperties'])}"
    return str(schema.get("type", "anything"))


_SCOPES = {
    "rc": "Of RCs",
    "rollout": "Of rollouts",
    "node": "Of nodes",
    "task": "Of tasks",
    "framework": "Of Frameworks and training jobs",
    "gpu": "Of pods of HiveD",
}


def reasons_page() -> str:
    """Return the closed list of the codes of reasons, by scope."""
    parts = [
        "# Reasons\n",
        "Everything that is not as it was asked for has a reason: a code of this list for programs, a detail for "
        "people, since when, and when it changes by the clock alone. `rcfarm explain` shows the reasons of "
        "[anything](../explain.md), with what to do; `status`, `doctor`, the [metrics](metrics.md) with a label "
        "`code`, the [alerts](../operating.md#metrics-and-alerts) and the board use the same codes.\n",
        "A reason that *blocks* stands until an operator acts or something outside changes; the others go on by "
        "themselves, or only say how something ended.\n",
    ]
    for scope, codes in SCOPES.items():
        parts += [
            f"## {_SCOPES[scope]}\n",
            "| Code | Meaning | Blocks | What to do |\n|---|---|---|---|",
            *(
                f"| `{code}` | {kind.meaning} | {'yes' if kind.blocks else ''} | {kind.act or 'Wait'} |"
                for code, kind in codes.items()
            ),
            "",
        ]
    return "\n".join(parts) + "\n"


def metrics_page() -> str:
    """Return the reference of all metrics of the daemons."""
    store, keys = EmbeddedStore(None), Keys()
    registry = new_registry("")
    farm = Farm(
        MeteredStore(store, registry),
        keys,
        Settings().farm,
        SessionKeeper(store, SessionSpec("docs")),
        LabelScheduler,
        metrics=FarmMetrics(registry),
    )
    agents = CollectorRegistry()
    agents.register(AgentMetrics())
    parts = [
        "# Metrics\n",
        "Served at `/metrics` of each daemon; see [operating](../operating.md#metrics-and-alerts) for alerts. The work "
        "queue's metrics carry the names that Kubernetes programs use.\n",
        "## Of a farm\n",
        *_metrics([*registry.collect(), *FarmProbe(farm).collect()]),
        "## Of a task engine\n",
        *_metrics(_tasks_metrics()),
        "## Of an agent\n",
        *_metrics(agents.collect()),
        "## Of the Framework operator\n",
        *_metrics(_jobs_metrics()),
        "## Of the HiveD extender\n",
        *_metrics(_extender_metrics()),
    ]
    return "\n".join(parts)


def _tasks_metrics() -> Iterator[Metric]:
    store, keys, registry = EmbeddedStore(None), Keys(), new_registry("")
    engine = Engine(
        MeteredStore(store, registry),
        keys,
        EngineSettings(name="docs"),
        SessionKeeper(store, SessionSpec("docs")),
        PluginRegistry(),
        data=open_data("memory:"),
        secrets=SecretManager(),
        metrics=engine_metrics(registry),
    )
    yield from registry.collect()
    yield from TasksProbe(engine, TaskPods(store, keys, LabelScheduler)).collect()


def _jobs_metrics() -> Iterator[Metric]:
    registry = new_registry("")
    api = MemoryKube()
    JobsRole(Settings(jobs=JobsSettings(lease="docs/docs")), api, api, registry, RestClientMetrics(registry, ""))
    yield from registry.collect()


def _extender_metrics() -> Iterator[Metric]:
    registry = new_registry("")
    api = MemoryKube()
    RestClientMetrics(registry, "")
    loaded = LoadedConfig(b"", HivedConfig({}, (), {}), Topology({}, {}))
    scheduler = HivedScheduler(api, HivedAlgorithm(loaded.topology), metrics=ExtenderMetrics(registry))
    watcher = ConfigWatcher(ConfigSource(Path("hived.yaml"), {}, Path()), loaded, _never)
    yield from registry.collect()
    election = Election(api, "docs", "docs", "docs")
    yield from ExtenderProbe(scheduler, election, watcher, EventRecorder(api, "docs")).collect()


async def _never(loaded: LoadedConfig, change: ConfigChange) -> None:
    raise AssertionError("the documentation changes no configuration")


def _metrics(found: Any) -> Iterator[str]:
    yield "| Name | Type | |\n|---|---|---|"
    shown: list[Metric] = [metric for metric in found if not metric.name.startswith(("process_", "python_"))]
    for metric in sorted(shown, key=lambda metric: metric.name):
        suffix = {"counter": "_total", "info": "_info"}.get(metric.type, "")
        kind = "gauge" if metric.type == "info" else metric.type
        yield f"| `{metric.name}{suffix}` | {kind} | {_cell(metric.documentation)} |"
    yield ""
