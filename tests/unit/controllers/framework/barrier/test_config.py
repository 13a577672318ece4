"""The barrier's settings, from the pod's environment."""

from __future__ import annotations

import pytest

from controllers.framework.barrier.config import AttemptInstance, BadConfig, Config, Identity

NAMES = {"FC_FRAMEWORK_NAMESPACE": "ns", "FC_FRAMEWORK_NAME": "gang"}


def test_defaults() -> None:
    """Only the names are required; the pod's identity stays unknown."""
    assert Config.from_environ(NAMES) == Config("ns", "gang")
    assert Config.from_environ({**NAMES, "BARRIER_CHECK_INTERVAL_SEC": ""}).barrier_check_interval_sec == 10
    assert Config("ns", "gang").barrier_check_timeout_sec == 600


def test_everything() -> None:
    """All variables that the operator sets in a container are read."""
    environ = {
        **NAMES,
        "KUBE_APISERVER_ADDRESS": "http://127.0.0.1:8080",
        "KUBECONFIG": "/config",
        "BARRIER_CHECK_INTERVAL_SEC": "+5",
        "BARRIER_CHECK_TIMEOUT_SEC": "1200",
        "FC_FRAMEWORK_UID": "f",
        "FC_FRAMEWORK_ATTEMPT_INSTANCE_UID": "2_c",
        "FC_TASKROLE_NAME": "worker",
        "FC_TASK_INDEX": "3",
        "FC_TASK_ATTEMPT_INSTANCE_UID": "4_p",
    }
    identity = Identity("f", AttemptInstance(2, "c"), "worker", 3, AttemptInstance(4, "p"))
    assert Config.from_environ(environ) == Config("ns", "gang", "http://127.0.0.1:8080", "/config", 5, 1200, identity)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_which_framework(name: str) -> None:
    """The Framework's name and namespace are required."""
    with pytest.raises(BadConfig, match=f"{name} is not set"):
        Config.from_environ({**NAMES, name: ""})


@pytest.mark.parametrize("value", ["4", "5s", " 10", "1_0", "0x10", "٥", "-5", "9" * 30, "5.0"])
def test_bad_intervals(value: str) -> None:
    """An interval is five seconds or more, as plain digits."""
    with pytest.raises(BadConfig, match=r"BARRIER_CHECK_INTERVAL_SEC is .*; set it to"):
        Config.from_environ({**NAMES, "BARRIER_CHECK_INTERVAL_SEC": value})


@pytest.mark.parametrize("value", ["59", "1201", "10m"])
def test_bad_timeouts(value: str) -> None:
    """A timeout is one to twenty minutes."""
    with pytest.raises(BadConfig, match=r"BARRIER_CHECK_TIMEOUT_SEC is .*; set it"):
        Config.from_environ({**NAMES, "BARRIER_CHECK_TIMEOUT_SEC": value})
