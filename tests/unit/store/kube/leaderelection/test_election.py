"""Leader election on virtual time: who leads, who must not act any more, and when another takes over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from structlog.testing import capture_logs

from store.kube.api.errors import Forbidden, ServerError, Unreachable
from store.kube.api.objects import CONFIG_MAPS, LEASES, Object
from store.kube.api.protocol import before_sending
from store.kube.leaderelection.election import JITTER, RELEASE_TIMEOUT, TOLERANCE, Election, FencedApi, LeadershipLost
from store.kube.memory.kube import MemoryKube
from tests.support import require
from tests.support.kube.faults.network import Call, Network, ScriptedKube
from tests.support.waiting import SkewedClock, until
from tests.support.waiting import loop_time as now

pytestmark = pytest.mark.looptime

LEASE, DEADLINE, RETRY = 15.0, 10.0, 2.0  # seconds
POLL = (1 + JITTER) * RETRY  # the longest pause of a candidate between two looks
AWAY = Unreachable("connection refused")


class Candidate:
    """An election with its own way to the API, and work that notes what it sees.

    `takes`: seconds that the work needs to end after it was cancelled.
    """

    def __init__(
        self, server: MemoryKube, name: str, *, clock: Callable[[], float] = now, wall_skew: float = 0.0
    ) -> None:
        self.api = ScriptedKube(server)
        self.election = Election(
            self.api,
            "space",
            "operator",
            name,
            clock=clock,
            wall_clock=lambda: 1_600_000_000.0 + wall_skew + now(),
            rng=random.Random(name),
        )
        self.takes = 0.0
        self.started: float | None = None
        self.ended: float | None = None
        self.cancellations = 0
        self.task: asyncio.Task[None] | None = None

    async def lead(self) -> None:
        self.started = now()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancellations += 1
            try:
                await asyncio.sleep(self.takes)
            except asyncio.CancelledError:
                self.cancellations += 1
            raise
        finally:
            self.ended = now()

    def start(self) -> asyncio.Task[None]:
        self.task = asyncio.create_task(self.election.run(self.lead))
        return self.task

    def cancel(self) -> None:
        require(self.task).cancel()

    async def leads(self) -> float:
        """Wait until it does; since when."""
        await until(lambda: self.started is not None)
        assert self.started is not None
        return self.started

    async def outcome(self) -> BaseException | None:
        """Return the result of `run`."""
        assert self.task is not None
        async with asyncio.timeout(3600):
            await asyncio.wait([self.task])
        return asyncio.CancelledError() if self.task.cancelled() else self.task.exception()


@pytest.fixture
def server() -> MemoryKube:
    return MemoryKube(namespaces=["space"])


@pytest.fixture
def first(server: MemoryKube) -> Candidate:
    return Candidate(server, "a")


@pytest.fixture
def second(server: MemoryKube) -> Candidate:
    return Candidate(server, "b")


@asynccontextmanager
async def candidates(*made: Candidate) -> AsyncIterator[None]:
    """Start them, one well before the next; stop them at the end."""
    for candidate in made:
        candidate.start()
        await asyncio.sleep(0.5)
    try:
        yield
    finally:
        for candidate in made:
            candidate.cancel()
            await candidate.outcome()


async def stop(candidate: Candidate) -> None:
    """End a candidate as SIGTERM would."""
    candidate.cancel()
    assert isinstance(await candidate.outcome(), asyncio.CancelledError)


async def stored(server: MemoryKube) -> Object:
    spec: Object = (await server.get(LEASES, "operator", "space"))["spec"]
    return spec


async def test_one_leads_and_the_other_waits(first: Candidate, second: Candidate) -> None:
    """The first candidate creates the lease and keeps it for as long as it lives; the second only looks."""
    async with candidates(first, second):
        await asyncio.sleep(3600)
        assert (first.election.is_leader, second.election.is_leader) == (True, False)
        assert second.started is None
        assert (first.election.leader, second.election.leader) == ("a", "a")
        assert set(second.api.verbs()) == {"get"}
        looks = len(second.api.calls)
        await stop(second)
        assert len(second.api.calls) == looks, "who has not claimed the lease releases nothing"
        assert first.election.is_leader


async def test_who_waits_says_for_whom(server: MemoryKube) -> None:
    """A standby logs each leader once; otherwise its log would end with its start."""
    first, second, third = Candidate(server, "a"), Candidate(server, "b"), Candidate(server, "c")
    with capture_logs() as logs:
        async with candidates(first, second):
            await asyncio.sleep(600)
            first.cancel()
            await asyncio.sleep(60)
            async with candidates(third):
                await asyncio.sleep(600)
    events = [entry for entry in logs if entry["event"] == "Waiting; another candidate leads"]
    logged = [(entry["identity"], entry["leader"]) for entry in events]
    assert logged == [("b", "a"), ("c", "b")]


async def test_the_lease_says_who_leads_since_when(server: MemoryKube, first: Candidate) -> None:
    """The record is what other programs read: holder, whole seconds of its duration, times, transitions."""
    async with candidates(first):
        await asyncio.sleep(3)
        assert await stored(server) == {
            "holderIdentity": "a",
            "leaseDurationSeconds": 15,
            "acquireTime": "2020-09-13T12:26:40.000000Z",
            "renewTime": "2020-09-13T12:26:42.000000Z",
            "leaseTransitions": 0,
        }


async def test_a_renewal_is_one_request(first: Candidate) -> None:
    """The leader renews each retry period by one write on the version that it wrote last, without a read."""
    async with candidates(first):
        await asyncio.sleep(60)
        assert first.api.verbs()[:2] == ["get", "create"]
        assert set(first.api.verbs()[2:]) == {"replace"}
        assert first.api.times("replace") == pytest.approx([2.0 * count for count in range(1, 31)])


async def test_a_candidate_looks_at_jittered_times(first: Candidate, second: Candidate) -> None:
    """Looks are one to 2.2 retry periods apart, so that candidates don't act in step."""
    async with candidates(first, second):
        await asyncio.sleep(600)
        times = second.api.times("get")
        gaps = [later - earlier for earlier, later in pairwise(times)]
        assert min(gaps) >= RETRY
        assert max(gaps) < POLL
        assert max(gaps) - min(gaps) > 1.0


@pytest.mark.parametrize("expired", [False, True])
async def test_of_candidates_that_act_together_one_leads(expired: bool, server: MemoryKube) -> None:
    """They all see no lease, or see it expire, at the same moment, and all write; the API server lets one through."""
    dead, made = Candidate(server, "dead"), [Candidate(server, f"candidate-{number}") for number in range(5)]
    async with candidates(*([dead, *made] if expired else [])):
        dead.api.fault = AWAY
        for candidate in made:
            candidate.api.answer_delay = 0.3 if expired else 0.05
            candidate.task or candidate.start()
        await asyncio.sleep(60)
        assert sum(candidate.started is not None for candidate in made) == 1
    for candidate in made:
        await stop(candidate)


async def test_an_orderly_end_hands_over_at_once(server: MemoryKube, first: Candidate, second: Candidate) -> None:
    """A leader that is stopped releases the lease after its work has ended; another leads at its next look."""
    first.takes = 1.0
    async with candidates(first, second):
        first.cancel()
        stopped = now()
        assert isinstance(await first.outcome(), asyncio.CancelledError)
        await second.leads()
        assert first.ended is not None
        assert stopped + 1.0 == first.ended < require(second.started) <= first.ended + POLL
        assert (await stored(server))["leaseTransitions"] == 1


@pytest.mark.parametrize("hurried", [False, True])
async def test_a_long_orderly_end_keeps_the_lease(hurried: bool, first: Candidate, second: Candidate) -> None:
    """Work that needs longer than the lease to end stays the only one: the lease is renewed until it has ended. A
    second cancellation is passed on to it."""
    first.takes = 1000.0 if hurried else 100.0
    async with candidates(first, second):
        first.cancel()
        await asyncio.sleep(99)
        assert second.started is None
        assert first.election.is_leader
        if hurried:
            first.cancel()
        await second.leads()
        assert first.cancellations == (2 if hurried else 1)


async def test_connection_errors_end_the_leadership_at_the_deadline(first: Candidate, second: Candidate) -> None:
    """Renewals fail by connection errors; at the renew deadline, counted from when the last good one was
    sent, the work is cancelled. Another candidate leads only after the lease, long after the work has ended."""
    async with candidates(first, second):
        await asyncio.sleep(5)
        sent = first.api.times("replace")[-1]
        first.api.fault = AWAY
        error = await first.outcome()
        assert isinstance(error, LeadershipLost)
        assert "connection refused" in str(error)
        assert first.ended == pytest.approx(sent + DEADLINE)
        await second.leads()
        assert sent + LEASE <= require(second.started) <= sent + LEASE + POLL + RETRY


async def test_requests_that_hang_end_it_just_as_early(first: Candidate) -> None:
    """A dead network: no attempt to renew outlasts the deadline, and there is time for a second one."""
    async with candidates(first):
        await asyncio.sleep(5)
        sent = first.api.times("replace")[-1]
        first.api.request_delay = 3600
        assert isinstance(await first.outcome(), LeadershipLost)
        ended = require(first.ended)
        assert ended == pytest.approx(sent + DEADLINE)
        assert len([at for at in first.api.times("replace") if sent < at < ended]) == 2


async def test_the_deadline_counts_from_when_a_renewal_was_sent(first: Candidate) -> None:
    """A renewal that was answered late does not make us believe in a longer lease."""
    async with candidates(first):
        await asyncio.sleep(1)
        first.api.answer_delay = 4.0
        await asyncio.sleep(2)
        sent = first.api.times("replace")[-1]
        await asyncio.sleep(3.5)
        first.api.fault = AWAY
        assert isinstance(await first.outcome(), LeadershipLost)
        assert first.ended == pytest.approx(sent + DEADLINE)


async def test_a_blip_loses_nothing(first: Candidate, second: Candidate) -> None:
    """The API is unavailable for less than the deadline: the leader stays, and no other candidate leads."""
    async with candidates(first, second):
        await asyncio.sleep(5)
        first.api.fault = second.api.fault = ServerError("etcd has no leader", status=500)
        await asyncio.sleep(7)
        assert first.election.last_error == "etcd has no leader"
        first.api.fault = second.api.fault = None
        await asyncio.sleep(600)
        assert first.election.is_leader
        assert first.cancellations == 0
        assert second.started is None
        assert first.election.last_error == ""


async def test_an_outage_for_all_ends_with_one_leader(first: Candidate, second: Candidate) -> None:
    """After hours without an API exactly one leads again."""
    async with candidates(first, second):
        first.api.fault = second.api.fault = AWAY
        await asyncio.sleep(7200)
        assert isinstance(await first.outcome(), LeadershipLost)
        assert second.started is None
        second.api.fault = None
        back = now()
        assert await second.leads() - back <= LEASE + 2 * POLL


@pytest.mark.parametrize("skew", [-3e7, 3e7])
async def test_clocks_may_differ_by_any_amount(skew: float, server: MemoryKube, second: Candidate) -> None:
    """Expiry is judged by when we saw the record change: a holder whose clock is a year off keeps its lease, and one
    that is gone loses it on time."""
    first = Candidate(server, "a", wall_skew=skew)
    async with candidates(first, second):
        await asyncio.sleep(600)
        assert second.started is None
        first.api.fault = AWAY
        gone = now()
        assert await second.leads() - gone <= LEASE + POLL + RETRY


async def test_a_candidate_waits_for_as_long_as_the_holder_was_promised(server: MemoryKube, first: Candidate) -> None:
    """The holder's record says for how long it may rely on it, whatever the candidate's own settings are."""
    spec = {"holderIdentity": "old", "leaseDurationSeconds": 60, "leaseTransitions": 7}
    await server.create(LEASES, {"metadata": {"name": "operator"}, "spec": spec}, "space")
    async with candidates(first):
        await asyncio.sleep(59)
        assert first.started is None
        await first.leads()
        assert (await stored(server))["leaseTransitions"] == 8


async def test_a_paused_holder_knows_at_its_first_look() -> None:
    """The process was stopped past the deadline: the very first look says so, before any timer or request could."""
    server, clock = MemoryKube(namespaces=["space"]), SkewedClock()
    candidate = Candidate(server, "a", clock=clock)
    async with candidates(candidate):
        await asyncio.sleep(1.4)  # the lease was taken at 0
        fenced = FencedApi(candidate.api, candidate.election)
        clock.skew = 8.0
        await fenced.create(CONFIG_MAPS, {"metadata": {"name": "one"}}, "space")
        clock.skew = 8.2
        assert not candidate.election.is_leader
        with pytest.raises(LeadershipLost):
            await fenced.create(CONFIG_MAPS, {"metadata": {"name": "two"}}, "space")
        assert len((await fenced.list(CONFIG_MAPS, "space")).items) == 1, "reading is always allowed"
        assert isinstance(await candidate.outcome(), LeadershipLost)


@pytest.mark.parametrize("paused", ["before the call", "before the bytes leave"])
@pytest.mark.parametrize("verb", ["create", "replace", "patch", "delete"])
async def test_a_paused_holder_writes_nothing_through_the_fence(server: MemoryKube, verb: str, paused: str) -> None:
    """Each writing verb checks when it is called, and has the transport check again."""
    clock = SkewedClock()
    sent: list[Call] = []

    class Sending(Network):
        async def before(self, call: Call) -> None:
            clock.skew = DEADLINE
            check = before_sending.get()
            assert check is not None, "the fence leaves its check"
            check()
            sent.append(call)

    candidate = Candidate(server, "a", clock=clock)
    async with candidates(candidate):
        await candidate.leads()
        clock.skew = DEADLINE if paused == "before the call" else 0.0
        fenced, body = (
            FencedApi(Sending(server), candidate.election),
            {"metadata": {"name": "one", "namespace": "space"}},
        )
        writes: dict[str, Callable[[], Awaitable[object]]] = {
            "create": lambda: fenced.create(CONFIG_MAPS, body, "space"),
            "replace": lambda: fenced.replace(CONFIG_MAPS, body),
            "patch": lambda: fenced.patch(CONFIG_MAPS, "one", "space", {"data": {}}),
            "delete": lambda: fenced.delete(CONFIG_MAPS, "one", "space"),
        }
        with pytest.raises(LeadershipLost, match="space/operator"):
            await writes[verb]()
    assert sent == []


async def test_a_paused_holder_does_not_take_the_lease_back() -> None:
    """While the process was stopped another candidate took over: it then stops without another write to the lease."""
    server, clock = MemoryKube(namespaces=["space"]), SkewedClock()
    first, second = Candidate(server, "a", clock=clock), Candidate(server, "b")
    async with candidates(first, second):
        await asyncio.sleep(3)
        first.api.request_delay = 1000.0  # nothing it sends goes out, and its clock does not show it
        clock.skew = -1000.0
        await second.leads()
        clock.skew = 0.0
        first.api.request_delay = 0.0
        assert isinstance(await first.outcome(), LeadershipLost)
        assert (await stored(server))["holderIdentity"] == "b"


async def test_a_lease_that_another_wrote_ends_the_work_at_once(server: MemoryKube, first: Candidate) -> None:
    """An operator gave the lease to another by hand: the next renewal sees it and does not wait for the deadline."""
    async with candidates(first):
        await asyncio.sleep(2.5)
        await server.patch(LEASES, "operator", "space", {"spec": {"holderIdentity": "chosen"}})
        error = await first.outcome()
        assert isinstance(error, LeadershipLost)
        assert "chosen holds it" in str(error)
        assert first.ended == pytest.approx(4.0)
        assert (await stored(server))["holderIdentity"] == "chosen"


@pytest.mark.parametrize("event", ["changed", "deleted", "answer lost"])
async def test_what_does_not_end_a_leadership(event: str, server: MemoryKube, first: Candidate) -> None:
    """A label, or a field that we don't know, on a lease that is ours: they stay. A deleted lease is created again. A
    renewal without an answer that the API server carried out: the conflict that follows is with ourselves."""
    async with candidates(first):
        await asyncio.sleep(3)
        change: Object = {"metadata": {"labels": {"x": "y"}}, "spec": {"strategy": "s"}}
        if event == "changed":
            await server.patch(LEASES, "operator", "space", change)
        elif event == "deleted":
            await server.delete(LEASES, "operator", "space")
        else:
            first.api.lost = AWAY
            await asyncio.sleep(2)
            first.api.lost = None
        await asyncio.sleep(60)
        assert (first.election.is_leader, first.cancellations) == (True, 0)
        lease = await server.get(LEASES, "operator", "space")
        assert (lease["metadata"].get("labels") == {"x": "y"}) is (event == "changed")
        assert ("strategy" in lease["spec"]) is (event == "changed")


async def test_a_claim_whose_answer_was_lost_is_recognised(server: MemoryKube, first: Candidate) -> None:
    """The lease was created for us though we did not hear of it: we lead at the next look, not after its end."""
    first.api.faults["get"] = AWAY
    first.start()
    await asyncio.sleep(1)
    spec = {"holderIdentity": "a", "leaseDurationSeconds": 15}
    await server.create(LEASES, {"metadata": {"name": "operator"}, "spec": spec}, "space")
    first.api.faults.clear()
    await first.leads()
    assert require(first.started) <= POLL + 0.01
    await stop(first)


async def test_without_permission_it_waits_and_says_so(first: Candidate) -> None:
    """A candidate that may not read the lease never leads; the reason is there for readiness."""
    first.api.fault = Forbidden('leases "operator" is forbidden', status=403)
    async with candidates(first):
        await asyncio.sleep(60)
        assert first.started is None
        assert first.election.last_error == 'leases "operator" is forbidden'


async def test_work_that_ends_by_itself_releases_the_lease(server: MemoryKube, first: Candidate) -> None:
    """`run` returns with the work. The record names no holder any more, and keeps its count of transitions."""
    await first.election.run(lambda: asyncio.sleep(5))
    assert now() == pytest.approx(5.0)
    left = await stored(server)
    assert "holderIdentity" not in left
    assert (left["leaseDurationSeconds"], left["leaseTransitions"]) == (1, 0)
    assert first.election.leader == ""


@pytest.mark.parametrize("cancelled", [False, True])
async def test_an_error_of_the_work_is_raised(cancelled: bool, server: MemoryKube, first: Candidate) -> None:
    """An error of the work, also while it is being stopped, is raised, and the lease is released."""

    async def lead() -> None:
        try:
            await asyncio.sleep(5)
        finally:
            raise RuntimeError("broken")

    task = asyncio.create_task(first.election.run(lead))
    await asyncio.sleep(1)
    if cancelled:
        task.cancel()
    with pytest.raises(RuntimeError, match="broken"):
        await task
    assert "holderIdentity" not in await stored(server)


async def test_a_release_that_hangs_does_not_hold_the_end_up(server: MemoryKube, first: Candidate) -> None:
    """An orderly end with a dead network is bounded; the lease expires."""
    async with candidates(first):
        await asyncio.sleep(1)
        first.api.request_delay = 3600
        first.cancel()
        began = now()
        await first.outcome()
        assert now() - began <= RELEASE_TIMEOUT
        assert (await stored(server))["holderIdentity"] == "a"


@pytest.mark.parametrize("lost", [False, True], ids=["under way", "answer lost"])
@pytest.mark.parametrize("verb", ["create", "replace"])
async def test_an_orderly_end_releases_a_lease_that_was_written_without_an_answer(
    verb: str, lost: bool, server: MemoryKube, first: Candidate, second: Candidate
) -> None:
    """The claim or renewal that the end interrupts, or whose answer was lost, has arrived: the lease is free all the
    same, and another candidate leads at its next look."""
    first.start()
    if verb == "replace":
        await asyncio.sleep(1.5)
    if lost:
        first.api.lost = AWAY
    else:
        first.api.answer_delay = 1.0
    await asyncio.sleep(1.0 if verb == "replace" else 0.5)
    assert (first.api.verbs()[-1], (await stored(server))["holderIdentity"]) == (verb, "a")
    first.api.answer_delay, first.api.lost = 0.0, None
    await stop(first)
    assert "holderIdentity" not in await stored(server)
    assert (first.started is not None) is (verb == "replace")
    ended = now()
    async with candidates(second):
        assert await second.leads() <= ended + POLL + 0.01


async def test_a_renewal_that_arrives_during_the_release_does_not_prevent_it(
    server: MemoryKube, first: Candidate
) -> None:
    """A cancelled request may still be carried out, even between the release's own read and write."""
    async with candidates(first):
        await asyncio.sleep(1)
        await server.patch(LEASES, "operator", "space", {"metadata": {"labels": {"x": "y"}}})
        first.api.request_delay = 0.5
        releasing = asyncio.create_task(stop(first))
        await asyncio.sleep(1.2)
        assert first.api.verbs()[-3:] == ["replace", "get", "replace"]
        await server.patch(LEASES, "operator", "space", {"spec": {"renewTime": "2020-09-13T12:26:42.000000Z"}})
        first.api.request_delay = 0.0
        await releasing
        assert "holderIdentity" not in await stored(server)
        assert first.election.leader == ""


@pytest.mark.parametrize("deleted", [False, True])
async def test_a_release_leaves_the_lease_of_another_alone(deleted: bool, server: MemoryKube, first: Candidate) -> None:
    """An operator gave the lease to another candidate, or deleted it, since the last renewal."""
    async with candidates(first):
        await asyncio.sleep(1)
        if deleted:
            await server.delete(LEASES, "operator", "space")
        else:
            await server.patch(LEASES, "operator", "space", {"spec": {"holderIdentity": "chosen"}})
        await stop(first)
        found = (await server.list(LEASES, "space")).items
        assert [lease["spec"]["holderIdentity"] for lease in found] == ([] if deleted else ["chosen"])


async def test_work_that_does_not_end_is_reported(first: Candidate) -> None:
    """Cancelled work that continues past the lease and a tolerance is a reason to restart the process."""
    first.takes = 3600
    async with candidates(first):
        await asyncio.sleep(0.1)
        first.api.fault = AWAY
        await asyncio.sleep(LEASE + TOLERANCE - 1)
        assert first.election.stalled() == ""
        await asyncio.sleep(2)
        assert "space/operator" in first.election.stalled()
    assert isinstance(await first.outcome(), LeadershipLost)


@pytest.mark.parametrize(
    ("lease", "renew", "retry"), [(10, 10, 2), (15, 16, 2), (15, 2.4, 2), (15, 10, 0), (15, 10, -1)]
)
def test_timings_that_can_t_work_are_refused(lease: float, renew: float, retry: float) -> None:
    """Lease > renew deadline > 1.2 retry periods > 0, else two candidates could lead, or none for long."""
    with pytest.raises(ValueError, match="must be"):
        Election(
            ScriptedKube(MemoryKube()), "space", "operator", "a",
            lease_duration=lease, renew_deadline=renew, retry_period=retry,
        )  # fmt: skip
