"""Settings in frameworkcontroller's form, and `podFailureSpec`: the codes of failed pods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from controllers.framework.config import BadConfig, FailureSpec, SnapshotLog, parse_config, read_config, shipped_config
from store.kube.api.objects import Object

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
    assert config.workers == 200
    assert (config.kube_client_qps, config.kube_client_burst) == (80, 120)
    assert config.cache_timeout == 300
    assert config.retain_completed == 30 * 24 * 3600
    assert config.conflict_delay == (60, 900)
    assert not config.compress_large_status
    assert not config.pod_failure_spec


def test_every_field_is_read() -> None:
    """A file written for frameworkcontroller works unchanged."""
    config = parse_config(ALL)
    assert (config.kube_client_qps, config.kube_client_burst, config.workers) == (200, 300, 500)
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


SHIPPED = shipped_config().failures


def pod(*containers: Object, reason: str | None = None, message: str | None = None, **init: Object) -> Object:
    """Return a failed pod. `init`: how its init containers ended."""
    status: Object = {"phase": "Failed", "containerStatuses": list(containers)}
    if init:
        status["initContainerStatuses"] = list(init.values())
    return {"metadata": {"name": "job-worker-0"}, "status": status | {"reason": reason, "message": message}}


def ended(code: int, name: str = "main", **fields: Any) -> Object:
    return {"name": name, "state": {"terminated": {"exitCode": code, **fields}}}


@pytest.mark.parametrize(
    ("code", "phrase", "attributes"),
    [
        (200, "ContainerTransientFailed", ("Transient",)),
        (201, "ContainerTransientConflictFailed", ("Transient", "Conflict")),
        (210, "ContainerPermanentFailed", ("Permanent",)),
    ],
)
def test_the_contracts_exit_codes(code: int, phrase: str, attributes: tuple[str, ...]) -> None:
    """A container, also an init container, classifies its failure by its exit code."""
    for failed in (pod(ended(code)), pod({"name": "main", "state": {}}, init=ended(code, "init"))):
        outcome = FailureSpec().outcome(failed)
        assert (outcome.code, outcome.phrase, outcome.type.attributes) == (code, phrase, attributes)


@pytest.mark.parametrize(
    ("failed", "code", "attributes"),
    [
        (pod(reason="Evicted"), -1000, ("Transient",)),
        (pod(reason="evicted"), -1000, ("Transient",)),
        (pod(reason="NodeLost"), -1001, ("Transient",)),
        (pod(reason="OutOfcpu"), -1002, ("Transient",)),
        (pod(reason="OutOfnvidia.com/gpu"), -1002, ("Transient",)),
        (pod(reason="Preempting"), -1003, ("Transient",)),
        (pod(reason="DeadlineExceeded"), -1004, ("Permanent",)),
        (pod(reason="Forbidden"), -1005, ("Permanent",)),
        (pod(reason="UnexpectedAdmissionError"), -1006, ("Transient",)),
        (pod(reason="InvalidNodeInfo"), -1006, ("Transient",)),
        (pod(ended(137, reason="OOMKilled")), -1200, ("Permanent",)),
        (pod(ended(125, reason="ContainerCannotRun")), -1201, ()),
        (pod(ended(126, reason="ContainerCannotRun")), -1202, ("Permanent",)),
        (pod(ended(127, reason="ContainerCannotRun")), -1203, ("Permanent",)),
        (pod(ended(128, reason="ContainerCannotRun", message="x:\nno such file")), -1203, ("Permanent",)),
        (pod(ended(128, reason="ContainerCannotRun", message="oops")), -1204, ()),
        (pod(ended(130)), 130, ("Transient",)),
        (pod(ended(134)), 134, ()),
        (pod(ended(137, reason="Error")), 137, ("Transient",)),
        (pod(ended(139)), 139, ("Permanent",)),
        (pod(ended(143)), 143, ("Transient",)),
        (pod(ended(200), reason="Evicted"), 200, ("Transient",)),
    ],
)
def test_the_shipped_entries(failed: Object, code: int, attributes: tuple[str, ...]) -> None:
    """They match the texts of Kubernetes and container runtimes; predefined codes come first."""
    outcome = SHIPPED.outcome(failed)
    assert (outcome.code, outcome.type.name, outcome.type.attributes) == (code, "Failed", attributes)


@pytest.mark.parametrize("reason", ["EvictedByUs", "NotEvicted", "OOMKilled"])
def test_reasons_match_whole(reason: str) -> None:
    """A reason that only contains another one does not match; a container's reason is not the pod's."""
    assert SHIPPED.outcome(pod(ended(9), reason=reason)).code == 9


def test_unmatched_pods_keep_the_code_of_the_last_failed_container() -> None:
    """The last one by the time of its end, init containers included."""
    failed = pod(
        ended(3, "a", finishedAt="2024-05-01T12:00:05Z"),
        ended(0, "b", finishedAt="2024-05-01T12:00:09Z"),
        ended(4, "c", finishedAt="2024-05-01T12:00:01Z"),
        init=ended(5, "init", finishedAt="2024-05-01T11:00:00Z"),
    )
    outcome = FailureSpec().outcome(failed)
    assert (outcome.code, outcome.phrase, outcome.type.attributes) == (3, "ContainerUnrecognizedFailed", ())


def test_a_failed_pod_without_failed_containers() -> None:
    """The code is -300."""
    outcome = FailureSpec().outcome(pod(ended(0), {"name": "other"}))
    assert (outcome.code, outcome.phrase) == (-300, "PodFailedWithoutFailedContainer")


def test_the_outcome_holds_the_pods_report() -> None:
    """The outcome holds reason, message and every container, whichever entry matched; the diagnostics show what
    matched.
    """
    outcome = SHIPPED.outcome(pod(ended(137, reason="Error", signal=9), reason=None, message="bye"))
    assert outcome.pod
    assert (outcome.pod.message, outcome.pod.containers[0].signal) == ("bye", 9)
    assert json.loads(outcome.diagnostics.removeprefix("matched ")) == {"containers": [{"code": 137}]}


SPEC = """
podFailureSpec:
- code: 300
  phrase: First
  podPatterns:
  - nameRegex: worker-\\d+$
    messageRegex: disk
  - containers:
    - nameRegex: ^main$
      signalRange: {min: 9, max: 9}
    - nameRegex: side
- code: 301
  phrase: Second
  podPatterns:
  - messageRegex: disk
"""


@pytest.mark.parametrize(
    ("failed", "code"),
    [
        (pod(message="no disk space"), 300),
        ({"metadata": {"name": "job-ps-x"}, "status": {"message": "no disk space"}}, 301),
        (pod(ended(1, signal=9), {"name": "side", "state": {"running": {}}}), 300),
        (pod(ended(1, signal=8), {"name": "side"}), 1),
        (pod(ended(1, signal=9)), 1),
        (pod({"name": "main", "state": {"running": {}}}, {"name": "side"}), -300),
    ],
)
def test_patterns_match_entirely_or_not_at_all(failed: Object, code: int) -> None:
    """One pattern of an entry must match in all its parts; each container pattern needs one container."""
    assert parse_config(SPEC).failures.outcome(failed).code == code
