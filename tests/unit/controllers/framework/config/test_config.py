"""Settings in frameworkcontroller's form."""

from __future__ import annotations

from pathlib import Path

import pytest

from controllers.framework.config.config import BadConfig, SnapshotLog, parse_config, read_config, shipped_config

ALL = """
kubeApiServerAddress: http://127.0.0.1:8080
kubeConfigFilePath: /tmp/kubeconfig
kubeClientQps: 200
kubeClientBurst: 300
workerNumber: 500
largeFrameworkCompression: true
crdEstablishedCheckIntervalSec: 2
crdEstablishedCheckTimeoutSec: 30
objectLocalCacheCreationTimeoutSec: 60
frameworkCompletedRetainSec: 10
frameworkMinRetryDelaySecForTransientConflictFailed: 1
frameworkMaxRetryDelaySecForTransientConflictFailed: 2
logObjectSnapshot:
  framework: {onFrameworkRetry: false}
  task: {onTaskRetry: true}
  pod: {onPodDeletion: null}
podFailureSpec:
- code: 221
  phrase: OutOfMemory
  type: {attributes: [Permanent]}
  podPatterns:
  - containers:
    - messageRegex: '(?msi)exhausted.*OOM'
      codeRange: {min: 1}
"""


def test_an_empty_file_has_all_defaults() -> None:
    """The file may be empty."""
    config = parse_config("")
    assert config.worker_number == 200
    assert (config.kube_client_qps, config.kube_client_burst) == (80, 120)
    assert config.object_local_cache_creation_timeout_sec == 300
    assert config.framework_completed_retain_sec == 30 * 24 * 3600
    assert config.conflict_delay == (60, 900)
    assert not config.large_framework_compression
    assert not config.pod_failure_spec


def test_every_field_is_read() -> None:
    """A file written for frameworkcontroller works unchanged."""
    config = parse_config(ALL)
    assert (config.kube_client_qps, config.kube_client_burst, config.worker_number) == (200, 300, 500)
    assert config.conflict_delay == (1, 2)
    assert config.pod_failure_spec[0].code == 221
    assert "OnFrameworkRetry" not in config.log_object_snapshot
    assert all(
        trigger in config.log_object_snapshot
        for trigger in ("OnFrameworkDeletion", "OnTaskRetry", "OnTaskDeletion", "OnPodDeletion")
    )


def test_every_snapshot_is_logged_by_default() -> None:
    """An unknown trigger is not logged."""
    assert "OnTaskRetry" in SnapshotLog()
    assert "OnSomething" not in SnapshotLog()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kubeClientQps: 0", "kubeClientQps: must be above 0 and at most 10000"),
        ("kubeClientBurst: 10001", "kubeClientBurst: must be within 0 to 10000"),
        ("workerNumber: 0", "workerNumber: must be above 0"),
        ("crdEstablishedCheckIntervalSec: 0", "crdEstablishedCheckIntervalSec: must be at least 1"),
        ("crdEstablishedCheckTimeoutSec: 9", "crdEstablishedCheckTimeoutSec: must be at least 10"),
        ("objectLocalCacheCreationTimeoutSec: 59", "objectLocalCacheCreationTimeoutSec: must be at least 60"),
        (
            "frameworkMinRetryDelaySecForTransientConflictFailed: 901",
            "frameworkMaxRetryDelaySecForTransientConflictFailed: must be at least "
            "frameworkMinRetryDelaySecForTransientConflictFailed (901)",
        ),
        ("workerNumbr: 3", "workerNumbr: there is no such field; did you mean workerNumber?"),
        ("workerNumber: many", "workerNumber: expected a whole number, got text"),
        ("[1]", "expected a mapping, got a list"),
        (
            "podFailureSpec: [{code: 205, podPatterns: [{nameRegex: a}]}]",
            "podFailureSpec[0].code: 205 is reserved, as all within -999 to 0 and 200 to 219; use another",
        ),
        ("podFailureSpec: [{podPatterns: [{nameRegex: a}]}]", "podFailureSpec[0].code: is missing"),
        ("podFailureSpec: [{code: 5}]", "podFailureSpec[0].podPatterns: must hold at least one pattern"),
        (
            "podFailureSpec: [{code: 5, type: {name: Succeeded}, podPatterns: [{nameRegex: a}]}]",
            "podFailureSpec[0].type.name: must be Failed, not 'Succeeded': only failed pods are matched",
        ),
        (
            "podFailureSpec: [{code: 5, podPatterns: [{nameRegex: a}]}, {code: 5, podPatterns: [{nameRegex: b}]}]",
            "podFailureSpec[1].code: 5 is given twice; keep one",
        ),
        (
            "podFailureSpec: [{code: 5, podPatterns: [{containers: [{reasonRegex: '(a'}]}]}]",
            "podFailureSpec[0].podPatterns[0].containers[0].reasonRegex: a '(' is not closed",
        ),
    ],
)
def test_invalid_settings_are_refused(text: str, message: str) -> None:
    """The start is refused; the message names the field and what to do."""
    with pytest.raises(BadConfig) as caught:
        parse_config(text)
    assert str(caught.value) == message


def test_bad_yaml_is_refused() -> None:
    """The message holds the parser's position."""
    with pytest.raises(BadConfig, match="not valid YAML"):
        parse_config("a: [")


def test_the_file_must_exist(tmp_path: Path) -> None:
    """A misspelled path must not mean defaults."""
    with pytest.raises(BadConfig, match=r"nowhere\.yaml: can't be read"):
        read_config(tmp_path / "nowhere.yaml")


def test_errors_name_the_file(tmp_path: Path) -> None:
    """The message names the file and the field."""
    path = tmp_path / "frameworkcontroller.yaml"
    path.write_text("workerNumber: 0")
    with pytest.raises(BadConfig, match=r"frameworkcontroller\.yaml: workerNumber: "):
        read_config(path)


def test_the_shipped_settings_are_good() -> None:
    """They hold an entry for each of the reasons that Kubernetes itself sets."""
    config = shipped_config()
    assert len(config.pod_failure_spec) == 22
    assert len({entry.phrase for entry in config.pod_failure_spec}) == 22
