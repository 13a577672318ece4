"""Tests of `rcfarm schema`: editors must not refuse what rcfarm takes, nor take what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from rcfarm.operations import rc_apply
from rcfarm.operations.documents import BadFile
from tests.support.programs.cli import run

EXAMPLES = Path(__file__).parents[4] / "examples"
FULL = """\
id: shop
replicas: all
node_selector: tier=web
allocation_strategy: dynamic
tolerate_drain: true
spread: rack
pod_labels: {team: shop}
update:
  canary: 2
  max_unavailable: 25%
  soak: 2.5
  analysis:
    - {name: errors, prometheus: {url: "http://prometheus:9090", query: up, condition: "> 0"}, interval: 5}
manifest:
  id: shop
  launchables:
    web:
      command: [sleep, "1"]
      env_from: [{file: /etc/rcfarm/secrets/shop}, {consul: shop}]
      artifact: {url: "https://a.example/shop.tgz", sha256: DIGEST}
      resources: {cpu: 500, memory: 536870912, devices: {gpu: 1}}
  config: {any: [value, 1]}
  ports: {http: 0}
  health: {http: {port: http}, interval: 1}
""".replace("DIGEST", "a" * 64)


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    schema = json.loads(run("schema").out)
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def documents() -> list[Any]:
    found = [(path.name, path.read_text()) for path in sorted(EXAMPLES.rglob("*.yaml"))]
    rcs = [(name, each) for name, text in found for each in yaml.safe_load_all(text) if each and "manifest" in each]
    return [pytest.param(each, id=name) for name, each in rcs] + [pytest.param(yaml.safe_load(FULL), id="full")]


@pytest.mark.parametrize("document", documents())
def test_what_rcfarm_takes_is_valid(validator: Draft202012Validator, document: dict[str, Any]) -> None:
    """The examples, and a file with nearly every field."""
    assert [error.message for error in validator.iter_errors(document)] == []
    assert rc_apply.load("a file", yaml.safe_dump(document).encode())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("replicas: all", "replicas: some"),
        ("replicas: all", "replicas: 1000000"),
        ("replicas: all", "replica: 1"),
        ("max_unavailable: 25%", "max_unavailable: a few"),
        ("soak: 2.5", "soak: -1"),
        ("name: errors, ", ""),
        ("interval: 5", "every: 5"),
        ('command: [sleep, "1"]', "command: sleep"),
        ("{consul: shop}", "{vault: shop}"),
        ("ports: {http: 0}", "ports: {http: web}"),
        ("cpu: 500", "cpus: 500"),
    ],
)
def test_what_rcfarm_refuses_is_invalid(validator: Draft202012Validator, old: str, new: str) -> None:
    text = FULL.replace(old, new)
    assert text != FULL
    assert list(validator.iter_errors(yaml.safe_load(text)))
    with pytest.raises(BadFile):
        rc_apply.load("a file", text.encode())


def test_a_manifest_has_a_schema_of_its_own() -> None:
    ran = run("schema", "manifest")
    checks = Draft202012Validator(ran.json)
    assert not list(checks.iter_errors(yaml.safe_load(FULL)["manifest"]))
    assert list(checks.iter_errors(yaml.safe_load(FULL)))
    refused = run("schema", "quota")
    assert (refused.code, refused.err) == (1, "error: 'quota' is not a kind of file; there are rc and manifest\n")
