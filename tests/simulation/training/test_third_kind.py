"""The example of a third kind in virtual time. The page *Adding a kind of training job* shows parts of this file."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from textwrap import indent

import pytest
import yaml

from store.kube.api.objects import Object
from store.kube.memory.kube import MemoryKube
from tests.support.modules import load_module
from tests.support.training.cluster import Cluster, cluster
from tests.support.training.manifests import built_pod, environment
from tests.support.waiting import until

pytestmark = pytest.mark.looptime

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "training"
PAGE = (ROOT / "docs" / "pages" / "adding-a-training-kind.md").read_text()


XGBoostJobs = load_module(EXAMPLE / "xgboost_operator.py").XGBoostJobs


def sample() -> Object:
    found: Object = yaml.safe_load((EXAMPLE / "xgboost.yaml").read_text())
    found["metadata"]["namespace"] = "default"
    return found


async def only(found: Cluster, pod: str) -> bool:
    return set(await found.pods()) == {pod}


async def test_a_master_and_its_workers_run_to_the_end() -> None:
    """The master's success is the job's; the workers, which never end, are stopped as its policy says."""
    async with cluster(XGBoostJobs) as found:
        await found.create(sample())
        await found.all_running(3)
        assert await found.variable("boost-worker-1", "RANK") == "2"
        assert await found.variable("boost-master-0", "WORKER_ADDRS") == "boost-worker-0,boost-worker-1"
        await found.plan("boost-master-0", exit_code="0", run_seconds="0")
        await found.condition("boost", "Succeeded")
        await until(lambda: only(found, "boost-master-0"))


def test_the_variables_are_the_original_ones() -> None:
    """In its order; those of LightGBM only where there are workers."""
    operator, job = XGBoostJobs(MemoryKube()), sample() | {"metadata": {"name": "b", "namespace": "n", "uid": "u"}}
    found = environment(built_pod(operator, job, "Worker", 1))
    assert found == [
        ("MASTER_PORT", "9999"),
        ("MASTER_ADDR", "b-master-0"),
        ("WORLD_SIZE", "3"),
        ("RANK", "2"),
        ("PYTHONUNBUFFERED", "1"),
        ("WORKER_PORT", "9999"),
        ("WORKER_ADDRS", "b-worker-0,b-worker-1"),
    ]
    alone = json.loads(json.dumps(job))
    del alone["spec"]["xgbReplicaSpecs"]["Worker"]
    assert [name for name, _ in environment(built_pod(operator, alone, "Master"))][-1] == "PYTHONUNBUFFERED"


async def test_a_job_without_its_master_is_blocked() -> None:
    """Condition and Event name the field, under a reason with the kind's name."""
    async with cluster(XGBoostJobs) as found:
        job = sample()
        del job["spec"]["xgbReplicaSpecs"]["Master"]
        await found.create(job)
        blocked = await found.condition("boost", "Blocked")
        assert blocked["message"].startswith("spec.xgbReplicaSpecs.Master.replicas: ")
        await asyncio.sleep(5)
        assert "XGBoostJobFailedValidation" in [reason for _, reason, _ in await found.events()]


def test_the_definition_is_printed() -> None:
    script = str(EXAMPLE / "xgboost_operator.py")
    ended = subprocess.run(
        [sys.executable, script, "--definition"],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert json.loads(ended.stdout)["metadata"]["name"] == "xgboostjobs.kubeflow.org"


def test_the_page_shows_parts_of_the_example() -> None:
    """Each block of code is in its file as shown, except for the indentation."""
    shown = re.findall(r'^```\w+ title="(.+?)"\n(.*?)^```', PAGE, re.DOTALL | re.MULTILINE)
    assert len(shown) == 4
    for name, snippet in shown:
        text = (Path(__file__) if name.startswith("test_") else EXAMPLE / name).read_text()
        assert any(indent(snippet, " " * width) in text for width in (0, 4, 8)), f"{name} does not have:\n{snippet}"
    assert set(re.findall(r"^```(\w+)$", PAGE, re.MULTILINE)) <= {"console"}
