"""The complete history of a cluster's objects, read from etcd itself: no API server, no cache, no gap.

The API server must store JSON, and must not let etcd compact: start it with `FLAGS`.
"""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

from store.kube.api.objects import Object

FLAGS = ("--storage-media-type=application/json", "--etcd-compaction-interval=0")
_ROOT, _END = "/registry/", "/registry0"  # all keys between them
_MARK = "/registry/~"


class Change(NamedTuple):
    """An object was written, or deleted (`obj` None). `path` is below /registry/. Revisions count up."""

    revision: int
    path: str
    obj: Object | None


def current_revision(etcd: str) -> int:
    """Return the current revision of the etcd at that URL."""
    with _post(etcd, "/v3/kv/range", {"key": _encoded(_ROOT), "range_end": _encoded(_END), "limit": 1}) as answer:
        return int(json.load(answer)["header"]["revision"])


def changes(etcd: str, since: int) -> Iterator[Change]:
    """Yield all changes after the revision `since` until now, in order."""
    with _post(etcd, "/v3/kv/put", {"key": _encoded(_MARK)}) as answer:
        now = int(json.load(answer)["header"]["revision"])
    asked = {"key": _encoded(_ROOT), "range_end": _encoded(_END), "start_revision": since + 1}
    with _post(etcd, "/v3/watch", {"create_request": asked}) as stream:
        for line in stream:
            for event in json.loads(line)["result"].get("events", ()):
                revision, path = int(event["kv"]["mod_revision"]), _decoded(event["kv"]["key"])
                if revision >= now:
                    return
                yield Change(revision, path.removeprefix(_ROOT), _object(event))


def _object(event: Any) -> Object | None:
    value = base64.b64decode(event["kv"].get("value", ""))
    return json.loads(value) if value.startswith(b"{") else None


def _post(etcd: str, path: str, body: Any) -> Any:
    return urllib.request.urlopen(urllib.request.Request(f"{etcd}{path}", json.dumps(body).encode()), timeout=30)


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _decoded(text: str) -> str:
    return base64.b64decode(text).decode()
