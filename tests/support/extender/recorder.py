"""An extender with scripted answers that records kube-scheduler's calls.

Findings about kube-scheduler 1.20.2 with an extender as HiveD's users configure it
(`tests/integration/extender/test_hived_wire.py` checks all of them, `tests/data/hived` keeps the bodies):

- One pod at a time: `filter`, then `bind` right after a filter that answered a node. Bodies have CapitalCase keys;
  `Nodes` is null, `NodeNames` are the nodes that passed the scheduler's own filters, in an order that changes.
- The text of `Error` and the reasons in `FailedNodes` reach the pod's condition and its FailedScheduling Events. A
  reason may be under a node that does not exist. A node that was not suggested is refused.
- A pod that got no node is retried once more when its own condition has been written, after some 50 ms, and then
  only when something happens in the cluster (a pod leaves a node, a node is added or changes in what matters), or 60 to
  90 s later. The same holds after every error: the extender unreachable, a `bind` refused.
- `preempt` is never called: 1.20.0 to 1.20.9 and 1.21.0 to 1.21.3 ignore extenders when they preempt
  (kubernetes#102971). They nominate a node without naming a victim when it has a pod of lower priority, and when two
  nodes have one, they panic and exit: there, the plugin DefaultPreemption has to be switched off. Fixed releases call
  `preempt` within the same attempt, milliseconds after `filter`, with the nodes that have such pods; a node without
  victims of the scheduler's own has `"Pods": null` there. Later ones leave such nodes out and so don't call at all.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

ENABLE = "hivedscheduler.microsoft.com/pod-scheduling-enable"

Answer = Callable[[Any], Any]


class Call(NamedTuple):
    """A call of kube-scheduler. `verb`: the end of the path."""

    verb: str
    headers: dict[str, str]
    body: Any


class Recorder:
    """`answers` by verb: maps a body to an answer. `calls`: all calls, in order."""

    def __init__(self) -> None:
        self.url = ""
        self.calls: list[Call] = []
        self.answers: dict[str, Answer] = {}

    def of(self, verb: str, pod: str) -> list[Any]:
        """Return the bodies of a verb for a pod."""
        return [call.body for call in self.calls if call.verb == verb and _pod_name(call.body) == pod]


def extender_entry(url: str, **changes: Any) -> dict[str, Any]:
    """Return an extender entry of a `KubeSchedulerConfiguration`, as HiveD's users write it. `url`: of the server."""
    entry = {
        "urlPrefix": f"{url}/v1/extender",
        "filterVerb": "filter",
        "preemptVerb": "preempt",
        "bindVerb": "bind",
        "enableHTTPS": False,
        "httpTimeout": "5s",
        "nodeCacheCapable": True,
        "ignorable": False,
        "managedResources": [{"name": ENABLE, "ignoredByScheduler": True}],
    }
    return entry | changes


def goes_to(node: str) -> Answer:
    """Return a filter that answers one node."""
    return lambda _: {"Nodes": None, "NodeNames": [node], "FailedNodes": None, "Error": ""}


def fails(error: str = "", **nodes: str) -> Answer:
    """Return a filter that answers no node: an error, or reasons by node."""
    return lambda _: {"Nodes": None, "NodeNames": None, "FailedNodes": nodes or None, "Error": error}


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report errors in answers, but not those of a killed kube-scheduler."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def recording() -> Iterator[Recorder]:
    """Serve a recorder on loopback until the end of the block."""
    recorder = Recorder()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            verb = self.path.rpartition("/")[2]
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            recorder.calls.append(Call(verb, dict(self.headers), body))
            answer = json.dumps(recorder.answers[verb](body)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = _Server(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    serving.start()
    recorder.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield recorder
    finally:
        server.shutdown()
        server.server_close()
        serving.join()


def _pod_name(body: Any) -> Any:
    return body["Pod"]["metadata"]["name"] if "Pod" in body else body["PodName"]
