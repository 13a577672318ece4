"""HiveD's web server over real HTTP: paths, wire forms and errors as HiveD's users know them."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp.web import BaseRequest
from structlog.testing import capture_logs

from controllers.extender import server
from controllers.extender.pod_states import ExtenderCall
from controllers.extender.server import NAMES_BODY, PART
from controllers.extender.wire import (
    ExtenderArgs,
    ExtenderBindingArgs,
    ExtenderBindingResult,
    ExtenderFilterResult,
    ExtenderPreemptionArgs,
    ExtenderPreemptionResult,
    MetaVictims,
)
from scheduler.hived.errors import NotNow, PlatformError, UserError
from tests.support.extender.web import POD, WebClient, web_client
from tests.support.raw_http import exchange, request

FILTER, BIND, PREEMPT = "/v1/extender/filter", "/v1/extender/bind", "/v1/extender/preempt"
DATA = Path(__file__).parents[3] / "data" / "hived"
REFUSED = UserError("pod research/train-0: no such virtual cluster")


@pytest_asyncio.fixture
async def client() -> AsyncIterator[WebClient]:
    async with web_client() as made:
        yield made


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (ExtenderFilterResult(node_names=("a0",)), '{"Nodes":null,"NodeNames":["a0"],"FailedNodes":null,"Error":""}'),
        (
            ExtenderFilterResult(failed_nodes={"hivedscheduler": "Pod is waiting: no cell"}),
            '{"Nodes":null,"NodeNames":null,"FailedNodes":{"hivedscheduler":"Pod is waiting: no cell"},"Error":""}',
        ),
    ],
)
async def test_filter_answers_every_field(client: WebClient, result: ExtenderFilterResult, text: str) -> None:
    """P19: exactly one of NodeNames, FailedNodes and Error is set; the others are present, as Go writes them."""
    client.handlers.answer = result
    assert await client.post(FILTER, body(Pod=POD, NodeNames=["a0", "a1"])) == text
    assert client.handlers.asked == [ExtenderArgs(POD, ["a0", "a1"])]


@pytest.mark.parametrize(
    "fields",
    [
        {"pod": POD, "nodenames": ["a0"]},
        {"POD": POD, "NODENAMES": ["a0"], "nodes": None},
        {"Pod": POD, "NodeNames": ["a0"], "Unknown": {"x": [1]}},
    ],
)
async def test_keys_match_whatever_their_case(client: WebClient, fields: dict[str, Any]) -> None:
    """Older kube-schedulers send lower-case keys, newer ones CapitalCase; unknown keys are ignored."""
    client.handlers.answer = ExtenderFilterResult(node_names=("a0",))
    await client.post(FILTER, json.dumps(fields).encode())
    assert client.handlers.asked == [ExtenderArgs(POD, ["a0"])]


async def test_filter_without_node_names_is_about_none(client: WebClient) -> None:
    """As in HiveD, null or absent names are an empty list."""
    client.handlers.answer = ExtenderFilterResult(node_names=("a0",))
    await client.post(FILTER, body(Pod=POD, NodeNames=None))
    await client.post(FILTER, body(Pod=POD))
    assert client.handlers.asked == [ExtenderArgs(POD, []), ExtenderArgs(POD, [])]


async def test_whole_nodes_are_answered_with_a_whole_node(client: WebClient) -> None:
    """A kube-scheduler with `nodeCacheCapable: false` sends nodes and reads only `Nodes` of the answer."""
    client.handlers.answer = ExtenderFilterResult(node_names=("a1",))
    nodes = [{"metadata": {"name": name}, "status": {"capacity": {"cpu": "8"}}} for name in ("a0", "a1")]
    answer = json.loads(await client.post(FILTER, body(Pod=POD, Nodes={"items": nodes})))
    assert answer == {
        "Nodes": {"metadata": {}, "items": [nodes[1]]},
        "NodeNames": None,
        "FailedNodes": None,
        "Error": "",
    }
    assert client.handlers.asked == [ExtenderArgs(POD, ["a0", "a1"])]


async def test_bind_answers_an_empty_error(client: WebClient) -> None:
    """The answer has this one field."""
    client.handlers.answer = ExtenderBindingResult()
    sent = body(PodName="train-0", PodNamespace="research", PodUID="5e1f", Node="a0")
    assert await client.post(BIND, sent) == '{"Error":""}'
    assert client.handlers.asked == [ExtenderBindingArgs("train-0", "research", "5e1f", "a0")]


async def test_bind_needs_all_its_fields(client: WebClient) -> None:
    """The user error names the missing fields."""
    text = await client.post(BIND, body(PodName="train-0", PodUID="5e1f", Node=""))
    assert json.loads(text)["Error"] == (
        "Code: 400, Message: hivedscheduler: User Error: ExtenderBindingArgs: PodNamespace, Node must not be empty"
    )
    assert client.handlers.asked == []


async def test_preempt_answers_victims_by_node(client: WebClient) -> None:
    """UIDs, not pods; null without victims."""
    client.handlers.answer = ExtenderPreemptionResult({"a0": MetaVictims(("u1", "u2"))})
    sent = body(Pod=POD, NodeNameToMetaVictims={"a0": {"Pods": [{"UID": "x"}], "NumPDBViolations": 2}, "a1": None})
    assert await client.post(PREEMPT, sent) == (
        '{"NodeNameToMetaVictims":{"a0":{"Pods":[{"UID":"u1"},{"UID":"u2"}],"NumPDBViolations":0}}}'
    )
    assert client.handlers.asked == [ExtenderPreemptionArgs(POD, {"a0": MetaVictims(("x",), 2), "a1": MetaVictims(())})]
    client.handlers.answer = ExtenderPreemptionResult()
    assert await client.post(PREEMPT, sent) == '{"NodeNameToMetaVictims":null}'


async def test_preempt_takes_lower_case_and_whole_pods(client: WebClient) -> None:
    """Kubernetes 1.14's spelling, and the form of `nodeCacheCapable: false`."""
    client.handlers.answer = ExtenderPreemptionResult()
    lower = {"a0": {"pods": [{"uid": "x"}], "numPDBViolations": 1}}
    await client.post(PREEMPT, body(pod=POD, nodeNameToMetaVictims=lower))
    await client.post(PREEMPT, body(Pod=POD, NodeNameToVictims={"a0": {"Pods": [POD], "NumPDBViolations": 1}}))
    assert client.handlers.asked == [
        ExtenderPreemptionArgs(POD, {"a0": MetaVictims(("x",), 1)}),
        ExtenderPreemptionArgs(POD, {"a0": MetaVictims(("5e1f",), 1)}),
    ]


async def test_victims_need_a_uid(client: WebClient) -> None:
    """The user error names the node; the scheduler is not called."""
    sent = body(Pod=POD, NodeNameToMetaVictims={"a0": {"Pods": [{"UID": "x"}, {"metadata": {}}]}})
    status, _, text = await client.request("POST", PREEMPT, sent)
    assert (status, "NodeNameToMetaVictims[a0]: each of Pods must have a UID" in text) == (400, True)
    assert client.handlers.asked == []


@pytest.mark.parametrize("path", [FILTER, BIND])
async def test_filter_and_bind_report_errors_with_status_200(client: WebClient, path: str) -> None:
    """kube-scheduler reads only the field Error; it gets code and message."""
    client.handlers.answer = REFUSED
    sent = body(Pod=POD, NodeNames=[], PodName="train-0", PodNamespace="research", PodUID="5e1f", Node="a0")
    answer = json.loads(await client.post(path, sent))
    assert answer["Error"] == f"Code: 400, Message: hivedscheduler: User Error: {REFUSED}"
    assert [value for field, value in answer.items() if field != "Error"] == [None] * (len(answer) - 1)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (REFUSED, 400, f"User Error: {REFUSED}"),
        (NotNow("not all pods are known yet"), 503, "Not Now: not all pods are known yet"),
        (PlatformError("the counters disagree"), 500, "Platform Error: the counters disagree"),
        (ValueError("not a number"), 500, "Platform Error: not a number"),
        (KeyError(), 500, "Platform Error: KeyError"),
    ],
)
async def test_errors(client: WebClient, error: Exception, code: int, message: str) -> None:
    """An answer without a field for errors has the status, and the message as a JSON string. A defect is logged with
    its stack; nothing stops.
    """
    client.handlers.answer = error
    with capture_logs() as logs:
        answer = json.loads(await client.post(FILTER, body(Pod=POD)))
        status, content_type, text = await client.request("POST", PREEMPT, body(Pod=POD))
    assert answer["Error"] == f"Code: {code}, Message: hivedscheduler: {message}"
    assert (status, content_type, json.loads(text)) == (code, "application/json", f"hivedscheduler: {message}")
    stacks = [entry.get("exc_info") for entry in logs if entry["log_level"] == "error"]
    assert stacks == ([error, error] if code == 500 else [])
    assert code == 500 or {entry["log_level"] for entry in logs} == {"info"}


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"", "ExtenderArgs can't be read"),
        (b"{", "ExtenderArgs can't be read"),
        (b"[1]", "ExtenderArgs can't be read"),
        (b"null", "Pod must not be null"),
        (b'{"NodeNames":["a0"]}', "Pod must not be null"),
        (b'{"Pod":{"metadata":{"name":7}}}', "Pod can't be read: Expected `str`, got `int` - at `$.metadata.name`"),
        (b'{"Pod":{}}', "Object missing required field `metadata`"),
        (b'{"Pod":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "can't be read"),
        (b'{"NodeNames":"a0"}', "NodeNames can't be read"),
        (b'{"NodeNames":["\\ud800"]}', "can't be read"),
        (b"\xff", "can't be read"),
    ],
)
async def test_an_invalid_body_is_a_user_error(client: WebClient, sent: bytes, message: str) -> None:
    """P20: it names the field; the scheduler is not called."""
    error = json.loads(await client.post(FILTER, sent))["Error"]
    assert error.startswith("Code: 400, Message: hivedscheduler: User Error: ")
    assert message in error
    assert client.handlers.asked == []


async def test_a_body_beyond_the_limit_is_refused(client: WebClient) -> None:
    """The error says what to do: only whole nodes get that large."""
    error = json.loads(await client.post(FILTER, b" " * (NAMES_BODY + 1)))["Error"]
    assert "nodeCacheCapable: true" in error
    assert "extender.node_cache_capable = false" in error


async def test_whole_nodes_may_be_large() -> None:
    """Where kube-scheduler sends whole nodes their list may be large; a pod, or a list of names, may not."""
    node = {"metadata": {"name": "a0", "annotations": {"about": "x" * NAMES_BODY}}}
    async with web_client(node_cache_capable=False) as client:
        client.handlers.answer = ExtenderFilterResult(node_names=("a0",))
        answer = json.loads(await client.post(FILTER, body(Pod=POD, Nodes={"items": [node]})))
        assert answer["Nodes"]["items"] == [node]
        for name, value in (("NodeNames", ["x" * NAMES_BODY]), ("Pod", node)):
            error = json.loads(await client.post(FILTER, body(**{"Pod": POD, name: value})))["Error"]
            assert f"{name} has 1048" in error
        error = json.loads(await client.post(FILTER, body(Pod=POD, Nodes={"items": [{}] * NAMES_BODY})))["Error"]
        assert "Nodes does not consist of Kubernetes objects" in error


async def test_victims_may_come_as_whole_pods() -> None:
    """Of whole pods only the UIDs are used, however large they are."""
    pod = {"metadata": {"uid": "v1", "name": "v"}, "spec": {"about": "x" * NAMES_BODY}}
    async with web_client(node_cache_capable=False) as client:
        client.handlers.answer = ExtenderPreemptionResult({})
        await client.post(PREEMPT, body(Pod=POD, NodeNameToVictims={"a0": {"Pods": [pod], "NumPDBViolations": 1}}))
        [asked] = client.handlers.asked
    assert isinstance(asked, ExtenderPreemptionArgs)
    assert asked.node_name_to_meta_victims == {"a0": MetaVictims(("v1",), 1)}


async def test_a_large_body_is_decoded_outside_of_the_loop(client: WebClient) -> None:
    """While the largest accepted body is decoded, other requests are answered."""
    client.handlers.answer = ExtenderFilterResult(node_names=("a0",))
    names = [f"node-{number:05}" for number in range(60_000)]
    large = asyncio.create_task(client.post(FILTER, body(Pod=POD, NodeNames=names)))
    while not large.done():
        async with asyncio.timeout(1.0):
            assert (await client.get("/"))[0] == 200
    assert '"NodeNames":["a0"]' in await large


async def test_only_a_few_large_bodies_are_read_at_once(client: WebClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is refused after a while with `NotNow`; a small one is answered at once."""
    monkeypatch.setattr(server, "BODY_SECONDS", 0.5)
    client.handlers.answer = ExtenderFilterResult(node_names=("a0",))
    address = client.url.removeprefix("http://")
    stalled = request(FILTER, "Content-Length: 900000", method="POST")
    held = [asyncio.create_task(exchange(address, stalled)) for _ in range(server.LARGE_AT_ONCE)]
    await asyncio.sleep(0.1)
    assert '"NodeNames":["a0"]' in await client.post(FILTER, body(Pod=POD))
    assert all(b"was not complete after 0.5 s" in answer for answer in await asyncio.gather(*held))
    assert '"NodeNames":["a0"]' in await client.post(FILTER, body(Pod=POD, NodeNames=["x" * 100_000]))


async def test_a_compressed_body_is_refused(client: WebClient) -> None:
    """kube-scheduler compresses none, and a small one could expand without limit."""
    packed = {"Content-Encoding": "gzip"}
    sent = gzip.compress(body(Pod=POD))
    async with client.session.post(client.url + FILTER, data=sent, headers=packed) as answer:
        error = (await answer.json())["Error"]
    assert error.startswith("Code: 400, Message: hivedscheduler: User Error: ExtenderArgs can't be read")
    assert client.handlers.asked == []


async def test_calls_are_measured_by_result(client: WebClient) -> None:
    """Each call is recorded once, with the kind of its error."""
    for answer in (ExtenderFilterResult(node_names=("a0",)), REFUSED, PlatformError("x"), NotNow("y")):
        client.handlers.answer = answer
        await client.post(FILTER, body(Pod=POD))
    assert client.metrics.results == [
        (ExtenderCall.FILTER, "ok"),
        (ExtenderCall.FILTER, "user_error"),
        (ExtenderCall.FILTER, "platform_error"),
        (ExtenderCall.FILTER, "not_now"),
    ]


async def test_a_repeated_refusal_is_logged_at_debug_level(client: WebClient) -> None:
    """kube-scheduler asks for an invalid pod forever; each call is answered."""
    client.handlers.answer = UserError("pod x/y: virtualCluster: is empty")
    with capture_logs() as logs:
        await client.post(FILTER, body(Pod=POD))
        client.handlers.answer.is_news = False
        answer = await client.post(FILTER, body(Pod=POD))
    assert [entry["log_level"] for entry in logs] == ["info", "debug"]
    assert "virtualCluster: is empty" in answer


async def test_the_root_lists_the_paths(client: WebClient) -> None:
    """As HiveD does."""
    assert await client.get("/") == (
        200,
        '{"paths":["/","/v1/extender/filter","/v1/extender/bind","/v1/extender/preempt",'
        '"/v1/inspect/affinitygroups/","/v1/inspect/clusterstatus","/v1/inspect/clusterstatus/physicalcluster",'
        '"/v1/inspect/clusterstatus/virtualclusters/","/v1/inspect/snapshot"]}',
    )


@pytest.mark.parametrize(
    "path",
    ["/v1", "/v1/extender/filter/", "/v1/inspect/clusterstatus/", "/v1/inspect/clusterstatus/physicalcluster/", "/x/y"],
)
async def test_other_paths_do_not_exist(client: WebClient, path: str) -> None:
    """404 with a JSON string; a trailing slash makes another path."""
    status, text = await client.get(path)
    assert (status, json.loads(text)) == (404, f"hivedscheduler: User Error: Path not found: {path}")


@pytest.mark.parametrize("path", ["/v1/inspect/affinitygroups", "/v1/inspect/clusterstatus/virtualclusters"])
async def test_collections_are_redirected_to_their_slash(client: WebClient, path: str) -> None:
    """As Go's mux does for paths that end in a slash."""
    client.inspection.documents = {"groups": [b"{}"], "virtual": [b"{}"]}
    async with client.session.get(client.url + path, allow_redirects=False) as answer:
        assert (answer.status, answer.headers["Location"]) == (301, path + "/")
    async with client.session.get(client.url + path) as followed:
        assert (followed.status, await followed.text()) == (200, "{}")


@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("affinitygroups/", "groups"),
        ("affinitygroups/research/train", "group research/train"),
        ("affinitygroups/research/train/", "group research/train/"),
        ("affinitygroups/a%2Fb%20%C3%A9", "group a/b é"),
        ("clusterstatus", "cluster"),
        ("clusterstatus/physicalcluster", "physical"),
        ("clusterstatus/virtualclusters/", "virtual"),
        ("clusterstatus/virtualclusters/vision", "virtual vision"),
    ],
)
async def test_inspection_answers_snapshots(client: WebClient, path: str, document: str) -> None:
    """Names may contain slashes. Inspection is GET only."""
    client.inspection.documents = {document: [b'{"a":', b"1}"]}
    assert await client.get(f"/v1/inspect/{path}") == (200, '{"a":1}')
    status, _, text = await client.request("POST", f"/v1/inspect/{path}", b"{}")
    assert status == 400
    assert json.loads(text).startswith("hivedscheduler: User Error: NotImplemented: POST: /v1/inspect/")


async def test_inspection_of_what_does_not_exist_is_a_user_error(client: WebClient) -> None:
    """400 as in HiveD, not 404."""
    status, text = await client.get("/v1/inspect/affinitygroups/none")
    assert (status, json.loads(text)) == (400, "hivedscheduler: User Error: group none does not exist")


async def test_a_large_snapshot_does_not_block_calls(client: WebClient) -> None:
    """A filter that comes while a snapshot is sent is answered before the snapshot's end, which arrives whole."""
    pieces = [b"%07d," % number * 512 for number in range(20_000)]
    client.inspection.documents = {"cluster": pieces}
    client.handlers.answer = ExtenderFilterResult(node_names=("a0",))
    inspecting = asyncio.create_task(client.get("/v1/inspect/clusterstatus"))
    for _ in range(3):
        await client.post(FILTER, body(Pod=POD, NodeNames=["a0"]))
        assert not inspecting.done()
    assert (await inspecting)[1] == b"".join(pieces).decode()


async def test_other_tasks_run_after_each_part_of_a_snapshot(client: WebClient) -> None:
    """However fast it is read: no turn of the loop sends more than one part, or two at the beginning."""
    taken = 0

    def pieces() -> Iterator[bytes]:
        nonlocal taken
        for _ in range(300):
            taken += 1
            yield bytes(PART)

    client.inspection.documents = {"cluster": pieces()}
    url = client.url + "/v1/inspect/clusterstatus"
    reading = asyncio.create_task(asyncio.to_thread(lambda: urllib.request.urlopen(url).read()))
    most = before = 0
    while not reading.done():
        await asyncio.sleep(0)
        most, before = max(most, taken - before), taken
    assert len(await reading) == 300 * PART
    assert most <= 2


async def test_a_reader_that_leaves_harms_no_call(client: WebClient) -> None:
    """The connection is cut in the middle of a snapshot; calls are still answered, and no error is logged."""
    client.inspection.documents = {"cluster": [bytes(65536)] * 1000}
    with capture_logs() as logs:
        async with client.session.get(client.url + "/v1/inspect/clusterstatus") as answer:
            await answer.content.readexactly(100)
            answer.close()
        client.handlers.answer = ExtenderFilterResult(node_names=("a0",))
        await client.post(FILTER, body(Pod=POD))
    assert [entry for entry in logs if entry["log_level"] == "error"] == []


async def test_bodies_of_a_real_kube_scheduler(client: WebClient) -> None:
    """Bodies recorded from Kubernetes 1.20."""

    def recorded(call: str) -> bytes:
        return (DATA / f"{call}.json").read_bytes()

    client.handlers.answer = ExtenderFilterResult(node_names=("gpu-1",))
    await client.post(FILTER, recorded("filter"))
    client.handlers.answer = ExtenderPreemptionResult()
    await client.post(PREEMPT, recorded("preempt"))
    client.handlers.answer = ExtenderBindingResult()
    await client.post(BIND, recorded("bind"))
    filtered, preempted, bound = client.handlers.asked
    said = json.loads(recorded("filter"))
    assert filtered == ExtenderArgs(said["Pod"], said["NodeNames"])
    assert isinstance(preempted, ExtenderPreemptionArgs)
    assert preempted.pod == json.loads(recorded("preempt"))["Pod"]
    assert bound == ExtenderBindingArgs("train-worker-0", "default", said["Pod"]["metadata"]["uid"], "gpu-1")


@pytest.mark.parametrize("path", [FILTER, BIND, PREEMPT, "/v1/inspect/affinitygroups/none"])
async def test_a_refused_call_leaves_no_reference_cycle(client: WebClient, path: str) -> None:
    """The process keeps survivors of a full collection permanently, so a refused call in a reference cycle would leak
    if it is in flight at that moment.
    """
    method = "GET" if path.startswith("/v1/inspect") else "POST"
    await client.request(method, path, b"[]")
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        assert (await client.request(method, path, b"[]"))[2]
        gc.collect()
        assert not [found for found in gc.garbage if isinstance(found, UserError | BaseRequest)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
