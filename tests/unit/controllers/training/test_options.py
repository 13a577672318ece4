"""The init containers of PyTorch workers, from the default template or from a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from controllers.training.options import BadTemplate, InitContainers, TrainingOptions
from controllers.training.pytorch import PyTorchJobs
from store.kube.memory.kube import MemoryKube
from tests.support.training.manifests import built_pod, pytorch_job

TEMPLATE = """\
- name: wait
  image: {{.InitContainerImage}}
  command: [wait-for, "{{ .MasterAddr }}", "{{- .MaxTries -}}"]
- name: more
  image: more:1
"""


def test_both_containers_of_a_template_file_follow_those_of_the_pod(tmp_path: Path) -> None:
    """The three placeholders are filled in, as the training-operator does."""
    file = tmp_path / "init.yaml"
    file.write_text(TEMPLATE)
    options = TrainingOptions(init_containers=InitContainers.load("image:1", 3, file))
    job = pytorch_job(Master=1, Worker=1)
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["initContainers"] = [{"name": "own", "image": "x"}]
    own, wait, more = built_pod(PyTorchJobs(MemoryKube(), options=options), job, "Worker")["spec"]["initContainers"]
    assert own["name"] == "own"
    assert wait == {"name": "wait", "image": "image:1", "command": ["wait-for", "m-master-0", "3"]}
    assert more == {"name": "more", "image": "more:1"}


def test_without_a_file_ours_is_used(tmp_path: Path) -> None:
    assert InitContainers.load("image:1", 3, tmp_path / "none").render("m") == InitContainers("image:1", 3).render("m")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- name: wait\n  image: '{{.Image}}'\n", "{{.Image}} is not one of {{.MasterAddr}}"),
        ("name: wait\n", "expected a YAML list of containers"),
        ("- name: wait\n", "each with a name and an image"),
        ("- {name: a, image: b", "not valid YAML"),
    ],
)
def test_a_bad_template_is_refused_at_the_start(tmp_path: Path, text: str, message: str) -> None:
    """The error names the file."""
    file = tmp_path / "init.yaml"
    file.write_text(text)
    with pytest.raises(BadTemplate) as error:
        InitContainers.load("image:1", 3, file)
    assert str(error.value).startswith(str(file))
    assert message in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadTemplate, match=str(tmp_path)):
        InitContainers.load("image:1", 3, tmp_path)
