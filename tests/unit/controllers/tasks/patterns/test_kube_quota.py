"""What a quota's refusal says, and which creations wait after it."""

from __future__ import annotations

from decimal import Decimal

from controllers.tasks.patterns.kube_quota import CreateGate, parse_refusal, pod_demand
from tests.support import require

REFUSED = (
    'pods "job-0" is forbidden: exceeded quota: team, requested: pods=1,requests.cpu=1500m, '
    "used: pods=4,requests.cpu=3, limited: pods=5,requests.cpu=4"
)


def cpu(amount: str) -> dict[str, Decimal]:
    return pod_demand({"spec": {"containers": [{"resources": {"requests": {"cpu": amount}}}]}})


def test_the_amounts_of_a_refusal_are_read() -> None:
    found = require(parse_refusal(REFUSED))

    assert found.requested == {"pods": 1, "requests.cpu": Decimal("1.5")}
    assert found.limited == {"pods": 5, "requests.cpu": 4}
    assert found.impossible == []


def test_only_a_request_above_the_limit_is_impossible() -> None:
    equal = parse_refusal("exceeded quota: q, requested: cpu=4, used: cpu=1, limited: cpu=4")
    above = parse_refusal("exceeded quota: q, requested: cpu=4001m,pods=1, used: cpu=1,pods=0, limited: cpu=4,pods=1")

    assert require(equal).impossible == []
    assert require(above).impossible == ["cpu"]


def test_a_message_that_cannot_be_read_has_no_amounts() -> None:
    assert parse_refusal("exceeded quota: q") is None
    assert parse_refusal("requested: cpu=lots, used: cpu=1, limited: cpu=2") is None


def test_a_pods_demand_has_the_names_of_a_quota() -> None:
    pod = {
        "spec": {
            "initContainers": [{"resources": {"requests": {"cpu": "3"}}}, {"resources": {"requests": {"cpu": "1"}}}],
            "containers": [
                {"resources": {"requests": {"cpu": "500m", "nvidia.com/gpu": "1"}, "limits": {"cpu": "2"}}},
                {"resources": {"limits": {"memory": "1Gi"}}},
            ],
            "overhead": {"cpu": "250m"},
        }
    }

    demand = pod_demand(pod)

    assert demand["requests.cpu"] == demand["cpu"] == Decimal("3.25")
    assert demand["limits.cpu"] == Decimal("2.25")
    assert demand["memory"] == demand["limits.memory"] == 1024**3
    assert demand["requests.nvidia.com/gpu"] == demand["pods"] == demand["count/pods"] == 1
    assert "nvidia.com/gpu" not in demand


def test_pauses_double_up_to_a_limit_and_a_success_forgets_them() -> None:
    gate, now, pauses = CreateGate(), 100.0, []
    for _ in range(7):
        pauses.append(gate.refused(now, {}))
        now += pauses[-1]
        assert gate.delay({}, now) == 0

    assert pauses == [1, 2, 4, 8, 16, 20, 20]
    gate.succeeded()
    assert gate.refused(now, {}) == 1


def test_smaller_requests_pass_while_those_of_a_ceiling_wait() -> None:
    gate = CreateGate()
    gate.refused(0.0, {"requests.cpu": Decimal(2)})

    assert gate.delay(cpu("2"), 0.5) == 0.5
    assert gate.delay(cpu("3"), 0.5) == 0.5
    assert gate.delay(cpu("1999m"), 0.5) == 0
    assert gate.delay(cpu("2"), 1.0) == 0


def test_a_refusal_of_a_smaller_request_lowers_the_ceiling_and_does_not_prolong_the_pause() -> None:
    gate = CreateGate()
    gate.refused(0.0, {"requests.cpu": Decimal(2)})

    assert gate.refused(0.5, {"requests.cpu": Decimal(1)}) == 0.5
    assert gate.delay(cpu("1"), 0.6) > 0
    assert gate.delay(cpu("500m"), 0.6) == 0
    assert gate.refused(1.0, {"requests.cpu": Decimal(3)}) == 2
    assert gate.ceilings == {"requests.cpu": 1}


def test_without_a_ceiling_everything_waits_for_as_long_as_the_server_asks() -> None:
    gate = CreateGate()

    assert gate.refused(0.0, {}, retry_after=30.0) == 30
    assert gate.delay(cpu("1m"), 29.0) == 1
