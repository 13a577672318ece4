"""The operator that `benchmarks.frameworks` compares with ours: the same duty, written on kopf as its docs advise.

One daemon per Framework, woken through an index of pods; status is written whole, and only when it changed; pods are
created at once. It has neither retries nor rescale, and keeps its state in memory only. Runs in an environment with
kopf: `kopf run benchmarks/kopf_operator.py`, with `KUBECONFIG` set.
"""

from __future__ import annotations

import asyncio
import copy
import os
import ssl
from collections import defaultdict
from datetime import UTC, datetime
from typing import Any

import aiohttp
import kopf
import yaml

LABEL = "FC_FRAMEWORK_NAME"
GROUP = "frameworkcontroller.microsoft.com/v1"
POD_STATES = {"Pending": "AttemptPreparing", "Running": "AttemptRunning"}
wakes: dict[tuple[str, str], asyncio.Event] = defaultdict(asyncio.Event)


class Api:
    """A plain session on the API server: less work per call than any client library does."""

    def __init__(self) -> None:
        with open(os.environ["KUBECONFIG"]) as file:
            config = yaml.safe_load(file)
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        trust = ssl.create_default_context(cafile=cluster["certificate-authority"])
        self._session = aiohttp.ClientSession(
            cluster["server"],
            headers={"Authorization": f"Bearer {user['token']}"},
            connector=aiohttp.TCPConnector(ssl=trust),
        )

    async def send(self, method: str, path: str, body: Any, content_type: str = "application/json") -> Any:
        async with self._session.request(method, path, json=body, headers={"Content-Type": content_type}) as response:
            response.raise_for_status()
            return await response.json()

    async def create(self, kind: str, namespace: str, body: dict[str, Any]) -> Any:
        return await self.send("POST", f"/api/v1/namespaces/{namespace}/{kind}", body)

    async def delete_config_map(self, namespace: str, name: str) -> None:
        body = {"propagationPolicy": "Foreground"}
        await self.send("DELETE", f"/api/v1/namespaces/{namespace}/configmaps/{name}", body)

    async def write_status(self, namespace: str, name: str, status: dict[str, Any]) -> None:
        path = f"/apis/{GROUP}/namespaces/{namespace}/frameworks/{name}"
        await self.send("PATCH", path, {"status": status}, "application/merge-patch+json")


@kopf.on.login()
def login(**options: Any) -> Any:
    return kopf.login_with_kubeconfig(**options)


@kopf.on.startup()
async def start(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: Any) -> None:
    settings.posting.enabled = False
    settings.execution.max_workers = 200
    memo.api = Api()


@kopf.index("pods", labels={LABEL: kopf.PRESENT})
async def pods(body: kopf.Body, namespace: str, labels: Any, **_: Any) -> Any:
    return {(namespace, labels[LABEL]): dict(body)}


@kopf.on.event("pods", labels={LABEL: kopf.PRESENT})
async def wake(namespace: str, labels: Any, **_: Any) -> None:
    wakes[namespace, labels[LABEL]].set()


@kopf.daemon("frameworkcontroller.microsoft.com", "v1", "frameworks", cancellation_timeout=1.0)
async def run(
    spec: Any, name: str, namespace: str, uid: str, pods: kopf.Index[Any, Any], memo: kopf.Memo, **_: Any
) -> None:
    """Run a Framework from creation to Completed; each fact is stored before an action that relies on it."""
    api: Api = memo.api
    status = pending(spec)
    await api.write_status(namespace, name, status)
    config_map = await api.create("configmaps", namespace, config_map_of(namespace, name, uid))
    created = await asyncio.gather(
        *(api.create("pods", namespace, pod) for pod in pods_of(spec, namespace, name, config_map))
    )
    remember(status, config_map, created)
    await api.write_status(namespace, name, status)
    while status["state"] != "Completed":
        await wakes[namespace, name].wait()
        wakes[namespace, name].clear()
        former = copy.deepcopy(status)
        observe(status, pods.get((namespace, name), ()))
        if status == former:
            continue
        await api.write_status(namespace, name, status)
        if status["state"] == "AttemptDeletionPending":
            await api.delete_config_map(namespace, f"{name}-attempt")
            status["state"] = "AttemptDeletionRequested"


def pending(spec: Any) -> dict[str, Any]:
    roles = [
        {
            "name": role["name"],
            "taskStatuses": [
                {"index": index, "state": "AttemptCreationPending", "startTime": now(), "attemptStatus": {}}
                for index in range(role["taskNumber"])
            ],
        }
        for role in spec["taskRoles"]
    ]
    return {
        "state": "AttemptCreationPending",
        "startTime": now(),
        "attemptStatus": {"id": 0, "taskRoleStatuses": roles},
    }


def config_map_of(namespace: str, name: str, uid: str) -> dict[str, Any]:
    owner = owner_reference(GROUP, "Framework", name, uid)
    meta = {"name": f"{name}-attempt", "labels": {LABEL: name}, "ownerReferences": [owner]}
    return {"metadata": {**meta, "namespace": namespace, "finalizers": ["foregroundDeletion"]}}


def pods_of(spec: Any, namespace: str, name: str, config_map: dict[str, Any]) -> list[dict[str, Any]]:
    owner = owner_reference("v1", "ConfigMap", config_map["metadata"]["name"], config_map["metadata"]["uid"])
    return [
        pod_of(role, index, namespace, name, owner) for role in spec["taskRoles"] for index in range(role["taskNumber"])
    ]


def pod_of(role: Any, index: int, namespace: str, name: str, owner: dict[str, Any]) -> dict[str, Any]:
    template = copy.deepcopy(dict(role["task"]["pod"]))
    facts = {
        "FC_FRAMEWORK_NAMESPACE": namespace,
        "FC_FRAMEWORK_NAME": name,
        "FC_TASKROLE_NAME": role["name"],
        "FC_TASK_INDEX": str(index),
    }
    meta = template.setdefault("metadata", {})
    meta["name"] = f"{name}-{role['name']}-{index}"
    meta["ownerReferences"] = [owner]
    meta["annotations"] = {**meta.get("annotations", {}), **facts}
    labels = {key: facts[key] for key in (LABEL, "FC_TASKROLE_NAME", "FC_TASK_INDEX")}
    meta["labels"] = {**meta.get("labels", {}), **labels}
    for container in template["spec"]["containers"]:
        container["env"] = [{"name": key, "value": value} for key, value in facts.items()] + container.get("env", [])
    return {"apiVersion": "v1", "kind": "Pod", **template}


def owner_reference(api_version: str, kind: str, name: str, uid: str) -> dict[str, Any]:
    flags = {"controller": True, "blockOwnerDeletion": True}
    return {"apiVersion": api_version, "kind": kind, "name": name, "uid": uid, **flags}


def tasks_of(status: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (role["name"], str(task["index"])): task
        for role in status["attemptStatus"]["taskRoleStatuses"]
        for task in role["taskStatuses"]
    }


def remember(status: dict[str, Any], config_map: dict[str, Any], created: list[dict[str, Any]]) -> None:
    """Record the UIDs of the created objects in the status."""
    status["state"] = "AttemptPreparing"
    status["attemptStatus"]["configMapUID"] = config_map["metadata"]["uid"]
    tasks = tasks_of(status)
    for pod in created:
        labels = pod["metadata"]["labels"]
        task = tasks[labels["FC_TASKROLE_NAME"], labels["FC_TASK_INDEX"]]
        task["state"] = "AttemptCreationRequested"
        task["attemptStatus"] = {"podName": pod["metadata"]["name"], "podUID": pod["metadata"]["uid"]}


def observe(status: dict[str, Any], seen: Any) -> None:
    """Update the status from the pods."""
    tasks = tasks_of(status)
    alive = {pod["metadata"]["uid"] for pod in seen}
    for pod in seen:
        labels = pod["metadata"]["labels"]
        observe_task(tasks[labels["FC_TASKROLE_NAME"], labels["FC_TASK_INDEX"]], pod)
    states = {task["state"] for task in tasks.values()}
    if status["state"] == "AttemptDeletionRequested":
        if not alive:
            status.update(state="Completed", completionTime=now())
    elif states == {"Completed"}:
        status["state"] = "AttemptDeletionPending"
        status["attemptStatus"]["completionStatus"] = {"code": 0, "phrase": "Succeeded"}
    elif "AttemptRunning" in states:
        status["state"] = "AttemptRunning"


def observe_task(task: dict[str, Any], pod: dict[str, Any]) -> None:
    phase, attempt = pod.get("status", {}).get("phase"), task["attemptStatus"]
    if task["state"] == "Completed" or attempt.get("podUID") != pod["metadata"]["uid"]:
        return
    attempt["podIP"], attempt["podNodeName"] = pod["status"].get("podIP"), pod["spec"].get("nodeName")
    if phase in POD_STATES:
        task["state"] = POD_STATES[phase]
    elif phase in ("Succeeded", "Failed"):
        containers = pod["status"].get("containerStatuses", [])
        codes = [each["state"].get("terminated", {}).get("exitCode", 0) for each in containers]
        task["state"] = "Completed"
        attempt["completionStatus"] = {"code": max(codes, default=0), "phrase": phase}


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
