"""A circuit: when it pauses, who probes, and in which order the line moves on."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllers.tasks.circuit import FAULTS, LONGEST_PAUSE, Circuit
from tests.support.waiting import loop_time

pytestmark = pytest.mark.looptime


class Caller:
    """Calls for executions in the order in which the circuit lets them. `works` decides the fate of a call."""

    def __init__(self) -> None:
        self.works = False
        self.calls: list[tuple[float, str]] = []
        self.counted: list[str] = []
        self.changes = 0
        self.circuit = Circuit("job", self.arrive, clock=loop_time, wall=loop_time, on_change=self._changed)

    def arrive(self, execution: str) -> None:
        asyncio.get_running_loop().call_soon(self._call, execution)

    def _call(self, execution: str) -> None:
        if not self.circuit.passes(execution):
            return
        self.calls.append((loop_time(), execution))
        if self.works:
            self.circuit.succeeded(execution)
        elif self.circuit.failed(execution, "down"):
            self.counted.append(execution)

    def _changed(self) -> None:
        self.changes += 1


async def test_faults_of_different_executions_pause_all_and_probes_back_off() -> None:
    caller = Caller()
    for number in range(100):
        caller.arrive(f"e{number:02}")
    await asyncio.sleep(3600.0)
    assert caller.counted == [f"e{number:02}" for number in range(FAULTS - 1)]
    times = [at for at, _ in caller.calls[FAULTS:]]
    assert times[:4] == pytest.approx([1.0, 3.0, 7.0, 15.0])
    assert len(times) == pytest.approx(3600 / LONGEST_PAUSE, abs=6)
    probed = [execution for _, execution in caller.calls[FAULTS : FAULTS + 60]]
    assert len(set(probed)) == 60  # they rotate
    assert caller.circuit.pause is not None
    assert caller.circuit.pause.since == 0.0
    assert caller.circuit.pause.probe_at > loop_time()
    assert caller.changes == len(times) + 1


async def test_the_line_moves_on_in_its_order_after_a_success() -> None:
    caller = Caller()
    for number in range(FAULTS):
        caller.arrive(f"bad-{number}")
    await asyncio.sleep(0.5)
    for number in range(50):
        caller.arrive(f"e{number:02}")
    await asyncio.sleep(0.1)
    caller.works = True
    before = len(caller.calls)
    await asyncio.sleep(1.0)
    went = [execution for _, execution in caller.calls[before:]]
    assert went == [*(f"e{number:02}" for number in range(50)), "bad-4"]
    assert caller.circuit.pause is None
    assert len(caller.circuit) == 0
    assert caller.circuit.passes("new")


async def test_one_execution_that_always_fails_pauses_nothing() -> None:
    caller = Caller()
    for _ in range(100):
        caller.arrive("poison")
    await asyncio.sleep(1.0)
    assert len(caller.counted) == 100


async def test_a_success_in_between_starts_the_count_again() -> None:
    caller = Caller()
    for number in range(100):
        caller.works = number % FAULTS == 0
        caller._call(f"e{number}")
    assert caller.circuit.pause is None


async def test_a_probe_that_does_not_call_gives_its_turn_to_the_next() -> None:
    caller = Caller()
    for number in range(FAULTS + 3):
        caller.arrive(f"e{number}")
    await asyncio.sleep(0.5)
    caller.circuit.forget("e5")
    caller.works = True
    caller._call = lambda execution: turns.append(execution)  # type: ignore[method-assign]
    turns: list[str] = []
    await asyncio.sleep(1.0)
    caller.circuit.left(turns[0])
    caller.circuit.forget("e7")
    await asyncio.sleep(1.0)
    assert turns == ["e6", "e7", "e4"]  # the one that failed comes last


async def test_a_plugin_that_fails_again_at_once_is_probed_less_and_less_often() -> None:
    caller, pauses = Caller(), []
    for burst in range(6):
        for number in range(FAULTS):
            caller._call(f"e{burst}-{number}")
        assert caller.circuit.pause is not None
        pauses.append(caller.circuit.pause.probe_at - loop_time())
        caller.circuit.succeeded("probe")
        for number in range(FAULTS):
            caller.circuit.forget(f"e{burst}-{number}")
    assert pauses == pytest.approx([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    for _ in range(4):
        caller.circuit.succeeded("e")
    for number in range(FAULTS):
        caller._call(f"again-{number}")
    assert caller.circuit.pause is not None
    assert caller.circuit.pause.probe_at - loop_time() == pytest.approx(4.0)


async def test_executions_that_always_fail_pause_nothing_while_others_succeed() -> None:
    """Not even when they fail one after the other; but once nothing succeeds any more, they do."""
    caller = Caller()
    for number in range(FAULTS - 1):
        caller._call(f"bad-{number}")
    for _ in range(20):
        caller.circuit.succeeded("good")
        for number in range(FAULTS - 1):
            caller._call(f"bad-{number}")
        await asyncio.sleep(1.0)
    caller.circuit.succeeded("good")
    caller._call("bad-new")
    for number in range(FAULTS - 1):
        caller._call(f"bad-{number}")
    assert caller.circuit.pause is None
    await asyncio.sleep(10.0)
    for number in range(FAULTS - 1):
        caller._call(f"bad-{number}")
    assert caller.circuit.pause is not None


async def test_the_first_probe_is_one_that_has_not_failed() -> None:
    caller = Caller()
    for number in range(FAULTS):
        caller.arrive(f"bad-{number}")
    await asyncio.sleep(0.1)
    caller.arrive("fresh")
    await asyncio.sleep(1.0)
    assert caller.calls[-1][1] == "fresh"


async def test_an_execution_that_does_not_come_for_its_turn_is_forgotten_and_holds_up_nothing() -> None:
    """Where it may have gone elsewhere unnoticed: an execution that arrives takes its turn, or the next one does."""
    woken: list[str] = []
    circuit = Circuit("remote", woken.append, clock=loop_time, wall=loop_time, turn=5.0)
    for number in range(FAULTS + 2):
        assert circuit.passes(f"e{number}") == (number < FAULTS)
        if number < FAULTS:
            circuit.failed(f"e{number}", "down")
    await asyncio.sleep(1.5)
    assert woken == ["e5"]
    await asyncio.sleep(5.0)
    assert woken == ["e5", "e6"]
    assert "e5" not in circuit
    assert circuit.passes("new")
    assert not circuit.passes("e6")
    circuit.succeeded("new")
    await asyncio.sleep(100.0)
    assert len(circuit) == 0
    assert circuit.passes("e0")
    circuit.close()


@given(st.lists(st.sampled_from(["arrive", "succeed", "fail", "leave", "forget", "time"]), max_size=200), st.randoms())
def test_nothing_is_lost_and_only_one_probes(moves: list[str], rng: object) -> None:
    """Whatever happens: while paused at most one is through, and at the end everything that waits goes on."""

    async def play() -> None:
        woken: deque[str] = deque()
        circuit = Circuit("job", woken.append, clock=lambda: 0.0, wall=lambda: 0.0)
        through: list[str] = []
        waiting: set[str] = set()

        def arrive(execution: str) -> None:
            waiting.discard(execution)
            if circuit.passes(execution):
                if execution not in through:
                    through.append(execution)
            else:
                waiting.add(execution)

        for number, move in enumerate(moves):
            if move == "arrive":
                arrive(f"e{number % 17}")
            elif move == "time" and circuit._timer is not None:
                circuit.close()
                circuit._probe()
            elif through:
                execution = through.pop(rng.randrange(len(through)))  # type: ignore[attr-defined]
                match move:
                    case "succeed":
                        circuit.succeeded(execution)
                    case "fail":
                        if not circuit.failed(execution, "down"):
                            waiting.add(execution)
                    case "leave":
                        circuit.left(execution)
                    case _:
                        circuit.forget(execution)
            while woken:
                arrive(woken.popleft())
            assert circuit.pause is None or len(circuit._through) <= 1
        for _ in range(1000):
            if circuit._timer is not None:
                circuit.close()
                circuit._probe()
            while woken:
                arrive(woken.popleft())
            for execution in through:
                circuit.succeeded(execution)
            through.clear()
        assert not waiting
        assert not len(circuit)
        assert not circuit._through or circuit.pause is not None
        circuit.close()

    asyncio.run(play())
