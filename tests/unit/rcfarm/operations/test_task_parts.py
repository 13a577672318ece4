"""The plugin's own part of a task in a file is checked before anything is submitted, with line and field."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rcfarm.operations.documents import BadFile
from rcfarm.operations.task_file import Contents, load

ROOT = Path(__file__).parents[4]
HTTP = """task: t
http:
  remote: squares
  create: {path: /jobs, body: {n: 3}}
  get: {path: "/jobs/{{ .Job }}"}
  phases: {DONE: success}
"""
RC = """task: t
inputs: {version: 1.4.2}
rc:
  rc:
    id: web
    manifest:
      id: web
      launchables:
        main:
          command: [sleep, "9"]
"""
POD = """task: t
pod:
  pod:
    spec:
      containers:
      - name: main
        image: example.org/work:1
"""
FRAMEWORK = """task: t
framework:
  framework:
    spec:
      executionType: Start
      taskRoles:
      - name: worker
        taskNumber: 1
        task:
          pod: {spec: {containers: [{name: main, image: "example.org/work:1"}]}}
"""


def _loaded(text: str) -> Contents:
    return load("work.yaml", text.encode())


@pytest.mark.parametrize("text", [HTTP, RC, POD, FRAMEWORK, "task: t\npython: {function: square}\n"])
def test_what_is_right_passes(text: str) -> None:
    [task] = _loaded(text).tasks
    assert task.spec.config


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("task: t\nprocess:\n  command: []\n", 3, "process.command: must name a program"),
        ("task: t\nprocess: [a]\n", 2, "process: must be a mapping: the fields of the task's kind"),
        ("task: t\nprocess:\n  command: [a]\n  selector: 'pool in'\n", 4, "process.selector: "),
        (
            "task: t\nprocess:\n  command: [a]\n  stop_signal: SIGNO\n",
            4,
            "process.stop_signal: 'SIGNO' is not a signal",
        ),
        ("task: t\nprocess:\n  command: [a]\n  start_timeout: 0\n", 4, "process.start_timeout: must be a number"),
        ("task: t\nprocess:\n  command: [a]\n  artifact: {url: 'ftp://x', sha256: a}\n", 4, "process.artifact.url: "),
        ("task: t\nprocess:\n  command: [a]\n  env: {'A=B': x}\n", 4, "process.env.A=B: 'A=B' can't name a variable"),
        ('task: t\nprocess:\n  command: [a, "\\0"]\n', 2, "can't hold a NUL character"),
        ("task: t\nprocess: {command: [a]}\nenvironment: {'': x}\n", 3, "environment: '' can't name a variable"),
        ("task: t\ntype: process\nconfig:\n  comand: [a]\n", 4, "config.comand: unknown field; did you mean command?"),
        ("schedule: s\ncron: '0 3 * * *'\ntask:\n  process:\n    comand: [a]\n", 5, "task.process.comand: unknown"),
        ("task: t\ninputs: {a: 1}\nprocess:\n  command: [x, '{{ .Inputs.b }}']\n", 4, "there is no input 'b'"),
        (HTTP.replace("remote: squares", "remot: squares"), 3, "http.remot: unknown field; did you mean remote?"),
        (HTTP.replace("success", "done"), 6, "http.phases.DONE: "),
        (HTTP.replace("DONE: success", ""), 6, "http.phases: name the phase of at least one status"),
        (HTTP + "  status: state\n", 7, "http.status: 'state' is no path"),
        (HTTP + "  outputs:\n    n: result\n", 8, "http.outputs.n: 'result' is no path"),
        (HTTP + "  delete: {path: /x, headers: {Host: a}}\n", 7, "http.delete.headers.Host: this header can't be set"),
        ("task: t\npython: {functon: square}\n", 2, "python.functon: unknown field; did you mean function?"),
        ("task: t\npython:\n  function: square\n  timeout: -1\n", 4, "python.timeout: -1 is not a number of seconds"),
        (RC.replace("command:", "comand:"), 10, "rc.rc.manifest.launchables.main.comand: unknown field"),
        (RC.replace("id: web\n    man", "id: Web\n    man"), 5, "rc.rc.id: 'Web' is not a DNS label"),
        (RC + "    replicas: three\n", 11, 'rc.rc.replicas: expected a whole number or `all`, got "three"'),
        (RC.replace("id: web\n    man", 'id: "{{ .Inputs.name }}"\n    man'), 5, "there is no input 'name'"),
        (RC + "  patience: -1\n", 11, "rc.patience: -1 is not a number of seconds"),
        (RC + "  on_abort: stop\n", 11, "rc.on_abort: "),
        (POD + "  primary: side\n", 8, "pod.primary: the pod has no container 'side'"),
        (POD + "        command: run\n", 8, "pod.pod.spec.containers.0.command: must be a list"),
        (POD + "        resources:\n          limits: {cpu: two}\n", 4, "not a quantity"),
        (POD.replace("spec:", "spec:\n      restartPolicy: Always"), 5, "use Never or OnFailure"),
        (POD + "    kind: Pod\n", 8, "pod.pod.kind: a pod here has metadata and spec"),
        (FRAMEWORK.replace("name: worker", "name: My-Worker"), 7, "must be 1 to 63 lower-case letters and digits"),
        (FRAMEWORK.replace("taskNumber: 1", "taskNumber: many"), 8, "taskNumber: expected a whole number"),
        (FRAMEWORK + "  on_abort: leave\n", 11, "framework.on_abort: "),
        (FRAMEWORK + "    status: {}\n", 11, "framework.framework.status: a Framework here has metadata and spec"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text: str, line: int, message: str) -> None:
    with pytest.raises(BadFile) as raised:
        _loaded(text)

    assert str(raised.value).startswith(f"work.yaml:{line}: ")
    assert message in str(raised.value)


def test_texts_that_are_templates_are_judged_by_their_type_alone() -> None:
    """An id that an input completes can't be judged before the task runs."""
    _loaded(RC.replace("id: web\n    man", 'id: "web-{{ .Inputs.version }}"\n    man'))
    with pytest.raises(BadFile, match=r":10: rc\.rc\.manifest\.launchables\.main\.command: "):
        _loaded(
            RC.replace("id: web\n    man", 'id: "w-{{ .Inputs.version }}"\n    man').replace('[sleep, "9"]', "sleep")
        )


def test_inputs_that_are_a_file_are_not_judged() -> None:
    _loaded('task: t\nprocess: {command: [x, "{{ .Inputs.b }}"]}\n')


def test_http_fields_may_come_from_the_remote_system() -> None:
    _loaded("task: t\nhttp: {remote: squares}\n")


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "pages").glob("tasks*.md")), ids=lambda page: page.name)
def test_the_examples_of_the_pages_pass(page: Path) -> None:
    for text in re.findall(r"```yaml\n((?:task|quota|schedule): .*?)```", page.read_text(), re.DOTALL):
        _loaded(text)
