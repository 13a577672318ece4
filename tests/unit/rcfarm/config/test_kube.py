"""Settings of `rcfarm jobs`: the operator's configuration, and the fields of a frameworkcontroller.yaml."""

from __future__ import annotations

from pathlib import Path

import pytest

from controllers.framework.config import FrameworkConfig, shipped_config
from rcfarm.config.kube import ExtenderSettings, Lease
from rcfarm.config.settings import BadSettings, JobsSettings, KubeSettings
from rcfarm.config.sources import load

THEIRS = """\
kubeApiServerAddress: http://10.0.0.1:8080
kubeClientQps: 200
kubeClientBurst: 300
workerNumber: 500
largeFrameworkCompression: true
crdEstablishedCheckIntervalSec: 2
crdEstablishedCheckTimeoutSec: 90
objectLocalCacheCreationTimeoutSec: 120
frameworkCompletedRetainSec: 3600
frameworkMinRetryDelaySecForTransientConflictFailed: 5
frameworkMaxRetryDelaySecForTransientConflictFailed: 50
logObjectSnapshot:
  task: {onTaskRetry: false}
  pod: {onPodDeletion: false}
podFailureSpec:
- code: 221
  phrase: OutOfGpu
  type: {attributes: [Transient, Conflict]}
  podPatterns:
  - containers: [{codeRange: {min: 77, max: 77}}]
"""


def file(tmp_path: Path, name: str, text: str) -> str:
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


def test_the_defaults_are_frameworkcontrollers_with_our_entries() -> None:
    """Without settings, frameworkcontroller's defaults and the shipped completion codes apply."""
    assert JobsSettings().operator() == shipped_config()


def test_every_setting_of_frameworkcontroller_has_a_name_here(tmp_path: Path) -> None:
    """Its file is read unchanged: each field becomes one of our settings, and reaches the operator."""
    settings = load(overrides={"jobs.framework_config": file(tmp_path, "frameworkcontroller.yaml", THEIRS)})
    assert (settings.kube.server, settings.kube.qps, settings.kube.burst) == ("http://10.0.0.1:8080", 200, 300)
    operator = settings.jobs.operator()
    assert operator.workers == 500
    assert operator.compress_large_status
    assert operator.cache_timeout == 120
    assert operator.retain_completed == 3600
    assert operator.conflict_delay == (5, 50)
    assert "OnTaskRetry" not in operator.log_object_snapshot
    assert "OnTaskDeletion" in operator.log_object_snapshot
    assert [entry.phrase for entry in operator.pod_failure_spec] == ["OutOfGpu"]


def test_an_empty_file_is_frameworkcontroller_without_settings(tmp_path: Path) -> None:
    """Without a podFailureSpec there are no entries, as in frameworkcontroller; all else has its default."""
    settings = load(overrides={"jobs.framework_config": file(tmp_path, "frameworkcontroller.yaml", "")})
    assert settings.jobs.operator() == FrameworkConfig()


def test_what_is_set_here_wins_over_the_file(tmp_path: Path) -> None:
    """TOML, variables and flags override the file, however it is named."""
    theirs = file(tmp_path, "frameworkcontroller.yaml", THEIRS)
    toml = file(tmp_path, "rcfarm.toml", f'[jobs]\nframework_config = "{theirs}"\nworkers = 7\n')
    settings = load(Path(toml), environ={"RCFARM_KUBE_QPS": "9"}, overrides={"jobs.cache_timeout": "600"})
    assert (settings.jobs.workers, settings.kube.qps, settings.jobs.cache_timeout) == (7, 9, 600)
    assert settings.jobs.retain_completed == 3600


def test_our_extensions_are_read_from_it_too(tmp_path: Path) -> None:
    """Our additions to that file have the same meaning there."""
    theirs = file(tmp_path, "f.yaml", "nativeMode: true\ndefaultCompletionPolicy: true\n")
    jobs = load(overrides={"jobs.framework_config": theirs}).jobs
    assert (jobs.mode, jobs.default_completion_policy) == ("native", True)
    assert jobs.operator().native_mode


@pytest.mark.parametrize("field", ["headless_services", "disruption_budgets"])
def test_what_native_mode_alone_can_do(field: str) -> None:
    """In compatible mode, where its permissions are not installed, it is refused, not ignored."""
    native = load(overrides={"jobs.mode": "native", f"jobs.{field}": "true"}).jobs.operator()
    assert getattr(native, field) is True
    with pytest.raises(BadSettings, match=f"^jobs.{field}: must be false in compatible mode"):
        load(overrides={f"jobs.{field}": "true"}).jobs.operator()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("workerNumber: 0", "workerNumber"),
        ("workerNumbr: 3", "did you mean workerNumber"),
        ("podFailureSpec: [{code: 205, podPatterns: [{}]}]", "205"),
        ("a: [", "not valid YAML"),
    ],
)
def test_an_invalid_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    """The start is refused, and the message names the file and the field."""
    theirs = file(tmp_path, "bad.yaml", text)
    with pytest.raises(BadSettings, match=message) as error:
        load(overrides={"jobs.framework_config": theirs})
    assert "bad.yaml" in str(error.value)


def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    """A misspelt path must not mean defaults."""
    with pytest.raises(BadSettings, match=r"nowhere\.yaml"):
        load(overrides={"jobs.framework_config": str(tmp_path / "nowhere.yaml")})


def test_failure_entries_can_be_settings(tmp_path: Path) -> None:
    """In TOML they have the form of frameworkcontroller's; an empty list means none."""
    toml = file(
        tmp_path,
        "rcfarm.toml",
        '[[jobs.pod_failure_spec]]\ncode = 221\nphrase = "OutOfGpu"\n'
        "podPatterns = [{containers = [{codeRange = {min = 77, max = 77}}]}]\n",
    )
    assert [entry.code for entry in load(Path(toml)).jobs.operator().pod_failure_spec] == [221]
    assert JobsSettings(pod_failure_spec=()).operator().pod_failure_spec == ()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (JobsSettings(workers=0), "jobs.workers: must be above 0"),
        (JobsSettings(cache_timeout=59), "jobs.cache_timeout: must be at least 60"),
        (
            JobsSettings(conflict_delay_min=5, conflict_delay_max=4),
            "jobs.conflict_delay_max: must be at least jobs.conflict_delay_min (5)",
        ),
        (JobsSettings(pod_failure_spec=({"code": 205},)), "jobs.pod_failure_spec"),
        (JobsSettings(pod_failure_spec=({"code": "many"},)), "jobs.pod_failure_spec[0].code"),
    ],
)
def test_bad_operator_settings_are_named_as_here(settings: JobsSettings, message: str) -> None:
    """Errors use our names of settings, not frameworkcontroller's."""
    with pytest.raises(BadSettings) as error:
        settings.operator()
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (JobsSettings(renew_deadline=20), "jobs.renew_deadline"),
        (JobsSettings(lease="a/b/c"), "jobs.lease"),
        (JobsSettings(lease=""), "jobs.lease"),
        (ExtenderSettings(lease="a/b/c"), "extender.lease"),
        (ExtenderSettings(retry_period=20), "extender.retry_period"),
        (ExtenderSettings(reload_interval=0), "extender.reload_interval"),
        (KubeSettings(namespaces=("all", "one")), "kube.namespaces"),
        (KubeSettings(namespaces=("Big",)), "kube.namespaces"),
        (KubeSettings(namespaces=()), "kube.namespaces"),
        (KubeSettings(qps=-1), "kube.qps"),
        (KubeSettings(call_timeout=0), "kube.call_timeout"),
    ],
)
def test_settings_that_can_t_work_are_refused(
    settings: JobsSettings | ExtenderSettings | KubeSettings, message: str
) -> None:
    """The message names the setting."""
    with pytest.raises(BadSettings, match=message):
        settings.checked()


def test_the_lease_has_a_namespace() -> None:
    """It is the one in the setting, else the default; `off` means no election."""
    assert JobsSettings().election.lease_in("here") == Lease("here", "rcfarm-jobs")
    assert JobsSettings(lease="there/mine").election.lease_in("here") == Lease("there", "mine")
    assert JobsSettings(lease="off").election.lease_in("here") is None


def test_namespaces_are_named_or_all() -> None:
    """`all` selects every namespace."""
    assert KubeSettings().watched == ()
    assert load(environ={"RCFARM_KUBE_NAMESPACES": "a,b"}).kube.watched == ("a", "b")
