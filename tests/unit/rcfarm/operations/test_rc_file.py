"""The file of `rc apply`: what is read, and how every mistake is named."""

from __future__ import annotations

import json

import pytest

from rcfarm.operations.documents import STANDARD_INPUT, BadFile
from rcfarm.operations.rc_apply import load
from store.schema.manifest import MAX_MANIFEST_BYTES, parse

HELLO = """\
id: hello
replicas: 3
node_selector: pool=web
manifest:
  id: hello-pod
  launchables:
    web:
      command: [python3, -m, http.server]
"""


def test_a_document_is_an_rc_with_its_manifest() -> None:
    """Every field arrives; the manifest's bytes parse to what was written."""
    (document,) = load("hello.yaml", HELLO.encode())

    assert (document.at, document.rc_id, document.pod_id) == ("hello.yaml:1", "hello", "hello-pod")
    assert (document.fields.replicas, document.fields.node_selector) == (3, "pool=web")
    assert document.fields.pod_labels is None
    assert parse(document.raw_manifest).launchables["web"].command == ["python3", "-m", "http.server"]


def test_layout_and_comments_do_not_change_the_manifest() -> None:
    """The same manifest written otherwise has the same bytes, so it is the same manifest."""
    (first,) = load("a", HELLO.encode())
    fields = {"replicas": 3, "manifest": {"launchables": {"web": {"command": ["python3", "-m", "http.server"]}}}}
    fields["manifest"]["id"] = "hello-pod"  # type: ignore[index]
    (second,) = load("b", b"# a comment\n" + json.dumps(fields).encode())

    assert first.raw_manifest == second.raw_manifest


def test_several_documents_are_several_rcs() -> None:
    """Documents keep their order and their lines; an empty one between two separators is nothing. Without an id an RC
    is called as its pods."""
    text = HELLO + "---\n---\n" + HELLO.replace("id: hello\n", "", 1)

    assert [(d.rc_id, d.at) for d in load("all.yaml", text.encode())] == [
        ("hello", "all.yaml:1"),
        ("hello-pod", "all.yaml:11"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f:1: the file is empty"),
        ("---\n", "f:1: the file is empty"),
        ("- a\n", "f:1: an rc is a mapping of fields"),
        ("id: x\n", "f:1: the field manifest is missing"),
        ("\napiVersion: v1\nkind: Pod\n", "f:2: this is a Kubernetes object, not an rc; `kubectl apply -f f`"),
        (HELLO + "replica: 4\n", "f:9: replica: unknown field; did you mean replicas?"),
        (HELLO + "zzz: 4\n", "f:9: zzz: unknown field"),
        (HELLO + "replicas: 4\n", "f:9: replicas: given twice; keep one of them"),
        (HELLO.replace("3", "three"), 'f:2: replicas: expected a whole number or `all`, got "three"'),
        (HELLO.replace("3", "true"), "f:2: replicas: expected a whole number or `all`, got true"),
        (HELLO.replace("id: hello\n", "id: Hello World\n", 1), "f:1: id: 'Hello World' is not a DNS label"),
        (HELLO + "pod_labels: [a]\n", "f:9: pod_labels: expected a mapping, got a list"),
        (
            HELLO + "update: {min_healthy_time: 10s}\n",
            "f:9: update.min_healthy_time: expected a number, got text '10s'; a time is a number of seconds",
        ),
        (HELLO + "rc_labels: {a: 1}\n", "f:9: rc_labels.a: expected text, got a whole number; put it in quotes"),
        (
            HELLO.replace("command", "comand"),
            "f:8: manifest.launchables.web.comand: unknown field; did you mean command?",
        ),
        (
            HELLO + "      env_from: [{consull: a}]\n",
            "f:9: manifest.launchables.web.env_from.0.consull: unknown field; did you mean consul?",
        ),
        (
            HELLO.replace("command: [python3, -m, http.server]", "{}"),
            "f:7: manifest.launchables.web: the field command is missing",
        ),
        (HELLO.replace("-m,", "8080,"), "f:8: manifest.launchables.web.command.1: expected text, got a whole number"),
        (
            HELLO.replace("[python3, -m, http.server]", "[]"),
            "f:8: manifest.launchables.web.command: must name a program",
        ),
        (
            HELLO + f"      artifact: {{sha256: {'a' * 64}, url: 'file:///tmp/a%00b'}}\n",
            "f:9: manifest.launchables.web.artifact.url: not a URL: ",
        ),
        (HELLO + "  ports: {http: 99999}\n", "f:9: manifest.ports.http: 99999 is not a port"),
        (HELLO + "  health: {http: {port: web}}\n", "f:9: manifest.health: port 'web' is not one of ports"),
        (HELLO + "  config: {since: 2020-01-01}\n", "f:4: manifest: can't be written as JSON"),
        (HELLO + "  config: &a {again: *a}\n", "f:9: the alias *a refers to itself"),
        (HELLO + f"  config: {{text: {'x' * MAX_MANIFEST_BYTES}}}\n", f"bytes; the limit is {MAX_MANIFEST_BYTES}: "),
        (HELLO + "  : : [\n", "not valid YAML"),
        ("a: \x01", "f:1: not valid YAML"),
        (HELLO + "---\n" + HELLO, "f:10: rc hello is given twice, first at f:1"),
    ],
)
def test_a_mistake_is_named_with_its_line(text: str, message: str) -> None:
    """Every kind of mistake names the file, the line and the field."""
    with pytest.raises(BadFile) as error:
        load("f", text.encode())

    assert message in str(error.value)
    assert str(error.value).startswith("f:")


def test_the_command_for_another_file_can_be_typed() -> None:
    """Standard input is `-` in it, as on the command line that read it."""
    with pytest.raises(BadFile, match="`kubectl apply -f -` applies it"):
        load(STANDARD_INPUT, b"apiVersion: v1\nkind: Pod\n")


def test_bytes_that_are_not_text_are_refused() -> None:
    """A binary file is not YAML, and says so."""
    with pytest.raises(BadFile, match="f:1: not valid YAML"):
        load("f", b"id: caf\xe9\n")
