"""Bytes of pods as an API server sends them: a list of all, and a watch in which each is modified again and again.

`python -m benchmarks.pod_server [--pods N] [--events N]` serves them on a free port of loopback, which it prints, until
it is killed. Every list is one page, as from a real server's watch cache; every watch sends N events as fast as they
are read, then stays open. Other requests are not supported.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec

FIRST_VERSION = 1_000_000
CHUNK = 65536
_TEMPLATES = 1000  # pods that events are about
_VERSION_MARK = "@@version@@"


def pod(number: int) -> dict[str, Any]:
    """Return a running pod with an init container, like one of a training job: about 5 KB of JSON."""
    job, index = divmod(number, 4)
    env: list[dict[str, Any]] = [
        {"name": f"FC_{name}", "value": f"{name.lower()}-{job}"} for name in ("FRAMEWORK_NAME", "TASKROLE_NAME")
    ]
    env += [{"name": f"SETTING_{each}", "value": f"value {each} of job {job}"} for each in range(10)]
    env += [{"name": "FC_TASK_INDEX", "value": str(index)}]
    env += [{"name": "FC_POD_UID", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.uid"}}}]
    mounts = [{"name": "barrier", "mountPath": "/mnt/barrier"}]
    container = {
        "image": "registry.example.com/training:1.2",
        "env": env,
        "volumeMounts": mounts,
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
        "imagePullPolicy": "IfNotPresent",
    }
    resources = {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "1"}
    address = f"10.{1 + number // 65536}.{number // 256 % 256}.{number % 256}"
    moment = "2026-01-01T00:00:00Z"
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {
            "name": f"job-{job:05}-worker-{index}",
            "namespace": "team",
            "uid": f"0f6d3c1e-6f3b-4bb2-9d4e-{number:012x}",
            "resourceVersion": _VERSION_MARK,
            "creationTimestamp": moment,
            "labels": {"FC_FRAMEWORK_NAME": f"job-{job:05}", "FC_TASKROLE_NAME": "worker", "FC_TASK_INDEX": str(index)},
            "annotations": {f"FC_NOTE_{each}": f"note {each} of job {job}" for each in range(8)},
            "ownerReferences": [
                {
                    "apiVersion": "v1",
                    "kind": "ConfigMap",
                    "name": f"job-{job:05}-attempt",
                    "uid": f"1f6d3c1e-6f3b-4bb2-9d4e-{job:012x}",
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
            "managedFields": [_managed("rcfarm", moment), _managed("kubelet", moment)],
        },
        "spec": {
            "volumes": [{"name": "barrier", "emptyDir": {}}],
            "initContainers": [{**container, "name": "barrier", "command": ["rcfarm", "barrier"], "resources": {}}],
            "containers": [
                {
                    **container,
                    "name": "worker",
                    "command": ["sh", "-c", "train --port=$FC_PORT"],
                    "ports": [{"containerPort": 2222, "protocol": "TCP"}],
                    "resources": {"limits": resources, "requests": resources},
                }
            ],
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 30,
            "dnsPolicy": "ClusterFirst",
            "nodeName": f"node-{number % 50:03}",
            "securityContext": {},
            "schedulerName": "default-scheduler",
            "tolerations": [
                {
                    "key": f"node.kubernetes.io/{key}",
                    "operator": "Exists",
                    "effect": "NoExecute",
                    "tolerationSeconds": 300,
                }
                for key in ("not-ready", "unreachable")
            ],
        },
        "status": {
            "phase": "Running",
            "conditions": [
                {"type": kind, "status": "True", "lastProbeTime": None, "lastTransitionTime": moment}
                for kind in ("Initialized", "Ready", "ContainersReady", "PodScheduled")
            ],
            "hostIP": "10.0.0.1",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "startTime": moment,
            "containerStatuses": [
                {
                    "name": "worker",
                    "state": {"running": {"startedAt": moment}},
                    "lastState": {},
                    "ready": True,
                    "restartCount": 0,
                    "image": container["image"],
                    "imageID": f"registry.example.com/training@sha256:{'a' * 64}",
                    "containerID": f"containerd://{number:064x}",
                    "started": True,
                }
            ],
            "qosClass": "Guaranteed",
        },
    }


def _managed(manager: str, moment: str) -> dict[str, Any]:
    fields: dict[str, Any] = {f"f:field{each}": {".": {}, "f:name": {}} for each in range(8)}
    return {"manager": manager, "operation": "Update", "apiVersion": "v1", "time": moment, "fieldsV1": fields}


def page(pods: int) -> bytes:
    """Return the response to a list."""
    items = b",".join(_text(pod(number), FIRST_VERSION - pods + number) for number in range(pods))
    return b'{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"%d"},"items":[%b]}' % (
        FIRST_VERSION,
        items,
    )


def event_templates(pods: int) -> list[tuple[bytes, bytes]]:
    """Return the line of an event for each pod, as the parts before and after its resource version."""
    mark = _VERSION_MARK.encode()
    lines = [msgspec.json.encode({"type": "MODIFIED", "object": pod(number)}) for number in range(pods)]
    return [(before, after) for before, _, after in (line.partition(mark) for line in lines)]


def event_chunks(templates: list[tuple[bytes, bytes]], events: int) -> Iterator[bytes]:
    """Yield the body of a watch, split where TCP would split it."""
    buffer = bytearray()
    for number in range(events):
        before, after = templates[number % len(templates)]
        buffer += b"%b%d%b\n" % (before, FIRST_VERSION + 1 + number, after)
        while len(buffer) >= CHUNK:
            yield bytes(buffer[:CHUNK])
            del buffer[:CHUNK]
    yield bytes(buffer)


def _text(obj: dict[str, Any], version: int) -> bytes:
    return msgspec.json.encode(obj).replace(_VERSION_MARK.encode(), b"%d" % version)


class PodServer:
    """Serves enough HTTP for one client: `?watch=true` streams, everything else lists."""

    def __init__(self, pods: int, events: int) -> None:
        self._page = page(pods)
        self._templates = event_templates(min(pods, _TEMPLATES))
        self._events = events

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := await reader.readuntil(b"\r\n\r\n"):
                if b"watch=true" in request.partition(b"\r\n")[0]:
                    await self._watch(writer)
                else:
                    writer.write(_HEAD + b"Content-Length: %d\r\n\r\n" % len(self._page) + self._page)
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _watch(self, writer: asyncio.StreamWriter) -> None:
        writer.write(_HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for chunk in filter(None, event_chunks(self._templates, self._events)):
            writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            await writer.drain()


_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


async def serve(pods: int, events: int) -> None:
    """Serve until cancelled; prints the port first."""
    server = await asyncio.start_server(PodServer(pods, events).answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    """Parse the arguments and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, default=10_000)
    parser.add_argument("--events", type=int, default=0)
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.pods, arguments.events))


if __name__ == "__main__":
    main()
