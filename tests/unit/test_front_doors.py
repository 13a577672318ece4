"""The packages for users: what they export, what importing them costs, and that the pages and examples need no more."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("rcfarm", "controllers", "scheduler", "store")
EXPORTS = {
    "controllers.jobs": """
        Backoff BadSpec Condition ControllerInterface Decision DisruptionBudget GangKind GangSize GroupVersion
        GroupVersionKind HookFailed JobController JobControllerConfiguration JobError JobOperator JobReconciler
        JobStatus JobView ReplicaSpec RunPolicy SchedulerPluginsPodGroup SchedulingPolicy SuccessRule VolcanoPodGroup
        Wording decide gen_general_name
    """,
    "controllers.loop": """
        BucketRateLimiter ControlLoop ExponentialRateLimiter MaxOfRateLimiter RateLimiter ShutDown Source
        WorkQueue default_rate_limiter
    """,
    "controllers.tasks.api": """
        AllocationStatus AsyncCatalog BadConfig BadPlugin BadState Blob CacheStatus CatalogFuture CatalogKey
        DEFAULT_NAME_LENGTH DEFAULT_PHASE_VERSION DataMetadata DataReference DataStore DownloadRequest
        DownloadResponse EnqueueOwner ErrorKind EventsRecorder ExecutionError ExternalResource InputFilePaths
        InputReader Intent IntentConflict KubeClient Literals MAX_STATE_BYTES MIN_NAME_LENGTH MetricsScope
        NamespacedName OutputError OutputFilePaths OutputReader OutputWriter PHASES PHASE_INFO_UNDEFINED Phase
        PhaseInfo Plugin PluginEntry PluginLoader PluginProperties PluginStateReader PluginStateWriter
        ReasonInfo RemoteUnknown ResourceConstraint ResourceConstraintsSpec ResourceManager ResourceNamespace
        ResourceRegistrar SYSTEM_ERROR_CODE SecretManager SecretNotFound SetupContext SignalAsync
        StateTooLarge TaskError TaskExecutionContext TaskExecutionID TaskExecutionIdentifier
        TaskExecutionMetadata TaskInfo TaskLog TaskOverrides TaskReader TaskTemplate TaskTemplatePath TaskType
        Transition TransitionType UNCONSTRAINED UNKNOWN_TRANSITION UnknownResource UploadRequest do_transition
        do_transition_type load_plugin phase_info_failed phase_info_failure phase_info_failure_with_cleanup
        phase_info_initializing phase_info_not_ready phase_info_queued phase_info_queued_with_task_info
        phase_info_retryable_failure phase_info_retryable_failure_with_cleanup phase_info_running
        phase_info_success phase_info_system_failure phase_info_system_failure_with_cleanup
        phase_info_system_retryable_failure phase_info_system_retryable_failure_with_cleanup
        phase_info_waiting_for_cache phase_info_waiting_for_resources phase_info_waiting_for_resources_info
    """,
    "controllers.tasks.io": """
        BadLiteral BadReference BadSecret DataDenied DataError DataNotFound DataTooLarge DataUnavailable
        FileOutputReader MemoryOutputReader SecretUnavailable
    """,
    "controllers.tasks.patterns": """
        AbortBehavior Created KubeDefaults KubePlugin KubeProperties ReadContext Recovery RemoteError RemoteGone
        RemoteRefused RemoteThrottled RemoteTransient Requirement SyncCall SyncConfig SyncPlugin Target
        WebApiConfig WebApiPlugin kube_entry webapi_entry
    """,
    "controllers.training": """
        InitContainers Port PyTorchJobs TFJobs TrainingJobs TrainingOptions append_variables definition port_of
    """,
    "rcfarm.telemetry": "PrometheusJobMetrics WorkQueueMetrics",
    "scheduler": "Absence Eligibility LabelScheduler NodeDirectory NodeState Scheduler SchedulerError",
    "store.kube.api": """
        AlreadyExists CONFIG_MAPS Conflict Forbidden KubeApi KubeError NODES NotFound Object PODS Resource
        SERVICES Unreachable annotations_of key_of labels_of name_of namespace_of owner_reference uid_of
    """,
    "store.kube.client": "KubeClient Limits",
    "store.kube.informer": "Informer",
    "store.kube.leaderelection": "Election FencedApi LeadershipLost",
    "store.kube.memory": "MemoryKube",
    "store.kv": """
        AlreadyCommitted BadRecord Denied Entry Invalid Listing Op OwnershipLost Session SessionExpired
        SessionKeeper SessionSpec Store StoreError TooLarge Transaction TreeView TxnConflict TxnResult
        Unavailable
    """,
    "store.schema": """
        BadSelector Keys LabelMatcher Labeled Labeler NodeSpec PodLocation RCSpec Selector UnknownObject decode
        encode
    """,
}
PAGES = ("adding-a-training-kind.md", "writing-a-plugin.md", "writing-an-operator.md", "selectors-and-scheduling.md")


def imported(tree: ast.Module) -> dict[str, set[str]]:
    """Return the names that a program imports from packages of ours, by package."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PRODUCT:
            found.setdefault(node.module, set()).update(alias.name for alias in node.names)
    return found


def test_the_exported_names_stay() -> None:
    """Programs of users import them, so a change of the list is a decision. The map of the tree has each front door."""
    files = (path for top in PRODUCT for path in (ROOT / top).rglob("__init__.py"))
    packages = (".".join(path.parent.relative_to(ROOT).parts) for path in files)
    modules = {name: importlib.import_module(name) for name in packages}
    exported = {name: module.__all__ for name, module in modules.items() if hasattr(module, "__all__")}
    assert {name: sorted(names) for name, names in exported.items()} == {
        name: sorted(names.split()) for name, names in EXPORTS.items()
    }
    for name, names in exported.items():
        assert all(hasattr(modules[name], each) for each in names)
    section = (ROOT / "docs/pages/architecture.md").read_text().partition("## Front doors")[2].partition("\n## ")[0]
    assert {name for name in re.findall(r"`([\w.]+)`", section) if name != "__all__"} == set(EXPORTS)


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("store.kube.api.objects", {"aiohttp", "asyncio", "msgspec", "structlog"}),
        ("store.kube.leaderelection.election", {"aiohttp", "yaml"}),
        ("store.kv.protocol", {"aiohttp", "sqlite3", "tenacity", "yaml"}),
        ("store.schema.keys", {"aiohttp", "sqlite3", "tenacity", "yaml"}),
        ("scheduler.hived.algorithm", {"aiohttp", "sqlite3", "tenacity"}),
        ("controllers.tasks.api.names", {"aiohttp", "sqlite3", "tenacity", "yaml"}),
        ("controllers.tasks.io.catalog", {"obstore"}),
        ("rcfarm.config.settings", {"aiohttp", "sqlite3", "tenacity", "yaml"}),
        ("rcfarm.roles.farm", {"aiohttp", "sqlite3", "tenacity", "yaml", "rcfarm.telemetry.kube"}),
    ],
)
def test_a_front_door_imports_nothing_heavy(module: str, heavy: set[str]) -> None:
    """Its package's modules are used where the heavy libraries are not."""
    script = f"import sys, {module}; print(sorted({heavy!r} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ended.stdout.strip() == "[]"


def test_modules_use_no_front_door() -> None:
    """A module of ours imports from the module that defines a name, so a front door never closes a circle."""
    for top in PRODUCT:
        for path in (ROOT / top).rglob("*.py"):
            for package, names in imported(ast.parse(path.read_text())).items():
                assert not names & set(EXPORTS.get(package, "").split()), f"{path}: {package}"


def test_examples_and_pages_use_only_front_doors() -> None:
    """What they import, or name with its package, will still be there in the next version."""
    for path in (ROOT / "examples").rglob("*.py"):
        for package, names in imported(ast.parse(path.read_text())).items():
            assert names <= set(EXPORTS[package].split()), path
    for page in PAGES:
        text = (ROOT / "docs/pages" / page).read_text()
        for package, names in re.findall(r"^from (\S+) import (.*)$", text, re.MULTILINE):
            if package.split(".")[0] in PRODUCT:
                assert set(names.split(", ")) <= set(EXPORTS[package].split()), page
        for named in re.findall(rf"`((?:{'|'.join(PRODUCT)})\.[\w.]+)(?:\(.*?\))?`", text):
            package, _, name = named.rpartition(".")
            if named != "rcfarm.schedulers":  # a group of entry points
                assert named in EXPORTS or name in EXPORTS[package].split(), f"{page}: {named}"
