"""The training-operator's arguments, as its Deployments have them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllers.training import kinds as training
from rcfarm.cli.daemons import training_flags
from rcfarm.cli.daemons.training_flags import BadFlag, translate
from rcfarm.config import kube
from rcfarm.config.settings import Settings
from rcfarm.config.sources import load

ROOT = Path(__file__).parents[5]


def settings(*arguments: str, **environ: str) -> Settings:
    """Return the settings that the translated arguments lead to."""
    ours = translate(arguments, environ).ours
    names = {"--kinds": "jobs.kinds", "--lease": "jobs.lease", "--listen": "web.listen", "--log-level": "log.level"}
    names |= {"--namespace": "kube.namespaces", "--kubeconfig": "kube.kubeconfig"}
    given = dict(zip(ours[::2], ours[1::2], strict=True))
    given.pop("--set", "")
    sets = dict(ours[at + 1].split("=", 1) for at in range(0, len(ours), 2) if ours[at] == "--set")
    return load(overrides={**{names[flag]: value for flag, value in given.items()}, **sets})


def test_without_arguments_it_runs_as_the_original() -> None:
    """Both kinds everywhere, no Frameworks, no election; probes and metrics at the original's ports."""
    found = settings()
    assert found.jobs.kinds == ("pytorchjob", "tfjob")
    assert found.jobs.lease == "off"
    assert (found.web.listen, found.web.metrics_listen) == ("0.0.0.0:8081", "0.0.0.0:8080")
    assert found.kube.watched == ()
    assert found.kube.qps == 0


def test_each_flag_has_its_setting() -> None:
    """With `=` or without, with one dash or two, repeated or not."""
    found = settings(
        "--enable-scheme=TFJob", "-enable-scheme", "pytorchjob", "--leader-elect", "--gang-scheduler-name=volcano",
        "--namespace", "team", "--controller-threads=5", "--kube-api-qps=40.5", "--kube-api-burst", "80",
        "--pytorch-init-container-image=busybox:1", "--pytorch-init-container-template-file=/x.yaml",
        "--pytorch-init-container-max-tries=7", "--metrics-bind-address=0", "--health-probe-bind-address=127.0.0.1:1",
        "--zap-log-level=debug",
    )  # fmt: skip
    assert found.jobs.kinds == ("pytorchjob", "tfjob")
    assert found.jobs.lease == "1ca428e5.training-operator.kubeflow.org"
    assert found.jobs.gang_scheduler == "volcano"
    assert found.kube.watched == ("team",)
    assert (found.jobs.workers, found.kube.qps, found.kube.burst) == (5, 40.5, 80)
    assert (found.jobs.init_container_image, found.jobs.init_container_template) == ("busybox:1", "/x.yaml")
    assert found.jobs.init_container_tries == 7
    assert (found.web.listen, found.web.metrics_listen, found.log.level) == ("127.0.0.1:1", "", "debug")


@pytest.mark.parametrize(
    ("arguments", "gang"),
    [
        (["--gang-scheduler-name=none"], ""),
        (["--gang-scheduler-name=my-scheduler"], "my-scheduler"),
        (["--enable-gang-scheduling=true"], "volcano"),
        (["--enable-gang-scheduling=false"], ""),
    ],
)
def test_gangs_of_all_releases(arguments: list[str], gang: str) -> None:
    """`none` is 1.6's, `--enable-gang-scheduling` is of 1.5 and before."""
    assert settings(*arguments).jobs.gang_scheduler == gang


def test_the_environment_names_the_namespace_and_the_election_can_be_off() -> None:
    assert settings(KUBEFLOW_NAMESPACE="team").kube.watched == ("team",)
    assert settings("--leader-elect=false").jobs.lease == "off"
    assert settings("--leader-elect", "--leader-election-id=mine").jobs.lease == "mine"
    assert settings("--kube-api-qps=-1").kube.qps == 0


def test_what_is_not_needed_is_ignored_with_a_warning() -> None:
    """Webhooks, other kinds and zap's formats; arguments of rcfarm itself stay."""
    flags = translate(["--webhook-server-port=9443", "--enable-scheme=tfjob,mpijob", "--set", "jobs.workers=3"], {})
    assert [warning.split(" is ignored")[0] for warning in flags.warnings] == [
        "--enable-scheme=mpijob",
        "--webhook-server-port",
    ]
    assert "ValidatingWebhookConfiguration" in flags.warnings[1]
    assert flags.others == ["--set", "jobs.workers=3"]
    assert flags.ours[:2] == ["--kinds", "tfjob"]


@pytest.mark.parametrize(("kind", "named"), [("foojob", "'foojob' is not a kind"), ("mpijob", "none of them is named")])
def test_a_kind_that_is_not_run_is_an_error(kind: str, named: str) -> None:
    with pytest.raises(BadFlag, match=named):
        translate([f"--enable-scheme={kind}"], {})


@given(st.lists(st.sampled_from(["--leader-elect", "--namespace", "-v=2", "x", "--", "--namespace=", "-kubeconfig"])))
def test_any_arguments_can_be_translated(arguments: list[str]) -> None:
    """What is not the original's is left in its order."""
    left = iter(arguments)
    assert all(word in left for word in translate(arguments, {}).others)


def test_the_program_says_what_it_ignores(tmp_path: Path) -> None:
    """Without a cluster it ends with rcfarm's error, after the warnings."""
    program = "from rcfarm.cli.daemons.drop_in import training_operator; training_operator()"
    command = [sys.executable, "-c", program, "--webhook-server-port=9443", "-v=2", "--leader-elect"]
    variables = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("warning: --webhook-server-port is ignored")
    assert "no Kubernetes API server is configured" in ended.stderr


def test_the_kinds_are_those_that_rcfarm_runs() -> None:
    """The settings and the translation name them without importing their operators."""
    kinds = tuple(kind.resource.kind.lower() for kind in training.KINDS)
    assert ("framework", *kinds) == kube.KINDS
    assert kinds == training_flags.KINDS
