"""P19 and P20 of HiveD on the wire: for any JSON body, the answer is well formed and nothing stops."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from controllers.extender.wire import (
    ExtenderBindingResult,
    ExtenderFilterResult,
    ExtenderPreemptionResult,
    decode_bind,
    decode_filter,
    decode_preempt,
)
from scheduler.hived.errors import UserError
from tests.property.hived.world.any_json import ANY
from tests.support.extender.web import POD, WebClient, web_client

CONTAINERS = ANY | st.lists(st.fixed_dictionaries({}, optional={"resources": ANY}), max_size=2)
SPECS = st.fixed_dictionaries({"containers": CONTAINERS})
METADATA = st.fixed_dictionaries(
    {}, optional={name: ANY | st.text() for name in ("name", "namespace", "uid", "annotations", "labels")}
)
PODS = (
    ANY
    | st.just(POD)
    | st.fixed_dictionaries({}, optional={"metadata": METADATA | ANY, "spec": ANY, "status": ANY})
    | st.fixed_dictionaries({"metadata": st.just(POD["metadata"]), "spec": SPECS})
)
VICTIMS = ANY | st.dictionaries(
    st.text(),
    ANY | st.fixed_dictionaries({}, optional={"Pods": ANY | st.lists(ANY | PODS, max_size=2), "NumPDBViolations": ANY}),
    max_size=2,
)
FIELDS = {
    "Pod": PODS,
    "pod": PODS,
    "NodeNames": ANY | st.lists(st.text()),
    "Nodes": ANY | st.fixed_dictionaries({"items": ANY | st.lists(PODS, max_size=2)}),
    "NodeNameToMetaVictims": VICTIMS,
    "NodeNameToVictims": VICTIMS,
    "PodName": ANY | st.text(),
    "PodNamespace": ANY | st.text(),
    "podUID": ANY | st.text(),
    "Node": ANY | st.text(),
}
BODIES = (st.fixed_dictionaries({}, optional=FIELDS) | ANY).map(json.dumps).map(str.encode) | st.binary(max_size=64)


@given(BODIES)
@settings(max_examples=400, deadline=None)
def test_any_body_is_read_or_refused_as_a_user_error(body: bytes) -> None:
    """P20: no body makes a decoder fail in another way, and decoded fields have the right types."""
    for decode in (decode_filter, decode_bind, decode_preempt):
        with suppress(UserError):
            decode(body)
    with suppress(UserError):
        metadata = decode_filter(body).args.pod["metadata"]
        assert all(isinstance(metadata[field], str) for field in ("name", "namespace", "uid"))


@given(st.lists(BODIES, max_size=20))
@settings(max_examples=10, deadline=None)
def test_every_answer_over_http_is_well_formed(bodies: list[bytes]) -> None:
    """P19: filter and bind answer status 200 with one part set; preempt answers, or 400 with a message. Never 500."""

    async def send_all() -> None:
        async with web_client() as client:
            for body in bodies:
                await _check_answers(client, body)

    asyncio.run(send_all())


async def _check_answers(client: WebClient, body: bytes) -> None:
    client.handlers.answer = ExtenderFilterResult(node_names=("a0",))
    answer: dict[str, Any] = json.loads(await client.post("/v1/extender/filter", body))
    assert answer.keys() == {"Nodes", "NodeNames", "FailedNodes", "Error"}
    parts = [bool(answer["Error"]), answer["FailedNodes"] is not None]
    parts.append(answer["NodeNames"] is not None or answer["Nodes"] is not None)
    assert parts.count(True) == 1
    client.handlers.answer = ExtenderBindingResult()
    assert json.loads(await client.post("/v1/extender/bind", body)).keys() == {"Error"}
    client.handlers.answer = ExtenderPreemptionResult()
    status, content_type, text = await client.request("POST", "/v1/extender/preempt", body)
    assert (status, content_type) in ((200, "application/json"), (400, "application/json"))
    assert isinstance(json.loads(text), dict if status == 200 else str)
    assert "Code: 500" not in answer["Error"]
