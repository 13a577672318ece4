"""The notifier: sends incidents to PagerDuty, or to any receiver of JSON, and says when they are resolved.

The model: an incident is a record in the store, so that restarts and changes of the farm neither lose nor repeat it.

- Each farm *keeps* the records of what it answers for: its RCs, and its own writes to the audit log; the farm that
  leads, the brake and the lost nodes. It compares what is wrong with the records, on every change, and creates,
  reopens or resolves them, fenced by its member record.
- One farm, the one that leads, *sends*: of each record its beginning, and, once it is resolved, its end; then the
  record is marked, or removed. A farm that dies between the two sends again, which the incident's key makes harmless.

At most `MOST` incidents of a kind are open for each farm; one more stands for the rest. One request is in flight at a
time, for at most `TIME_LIMIT`; what can't be sent is tried again with a growing pause, as it is then: an incident that
was resolved before it could be sent is not sent at all. No redirect is followed, because the key would go with it.

A record that the store refuses, as where the token may not write it, is kept in memory, and this farm sends it itself.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec

from rcfarm.config import BadSettings, token_in
from rcfarm.config.settings import FarmSettings
from rcfarm.farm import incidents
from rcfarm.farm.brake import BrakeWatch
from rcfarm.farm.incidents import Trouble
from rcfarm.farm.shard import RC
from rcfarm.telemetry.prometheus import FarmMetrics
from scheduler.nodes import NodeTable
from store.errors import RcfarmError
from store.kv import ops
from store.kv.protocol import BadRecord, Op, OwnershipLost, Store, StoreError, TxnConflict
from store.kv.view import Change, TreeView
from store.schema.keys import Keys
from store.schema.records import Incident, IncidentKind, decode, encode, utc_now
from store.timing import Backoff

MOST = 20  # open incidents of one kind, of each farm
TIME_LIMIT = 10.0  # seconds for one request
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds between attempts
STORE_PAUSE = 1.0  # seconds until a write to the store is tried again
SWEEP = 600.0  # seconds between looks for incidents of RCs that no longer exist
MOST_READ = 2000  # bytes of an answer
RC_KINDS: tuple[IncidentKind, ...] = ("rc", "rollout")

Name = tuple[IncidentKind, str]


class CannotSend(RcfarmError):
    """An event was not accepted. `is_about_it`: another event may be."""

    def __init__(self, message: str, *, is_about_it: bool = False, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.is_about_it, self.retry_after = is_about_it, retry_after


class Notifier:
    """The incidents of one farm. Run `view`, and `run` in each term. `leads()`: whether this farm sends for all.

    `audit_problem()`: why this farm can't write the audit log, or "". `clock`: monotonic, in seconds.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        settings: FarmSettings,
        *,
        leads: Callable[[], bool],
        live: Callable[[], Container[str]],
        brake: BrakeWatch,
        nodes: NodeTable,
        audit_problem: Callable[[], str],
        metrics: FarmMetrics,
        clock: Callable[[], float],
        log: Any,
    ) -> None:
        self._store, self._keys, self._settings = store, keys, settings
        self._leads, self._live, self._brake, self._nodes = leads, live, brake, nodes
        self._audit_problem, self._metrics, self._clock, self._log = audit_problem, metrics, clock, log
        self._owned: set[str] = set()
        self._gone: set[str] = set()  # RCs that were owned, or are in a record, and do not exist any more
        self._troubles: dict[str, tuple[Trouble, float]] = {}  # of owned RCs, and since when
        self._unrecorded: dict[Name, Incident] = {}  # that the store has refused
        self._changed, self._to_send = asyncio.Event(), asyncio.Event()
        self.view: TreeView[Incident] = TreeView(
            store, keys.incidents, self._decode, on_change=self._fold, name="incidents", clock=clock
        )

    @property
    def unsent(self) -> int:
        """The number of events that wait to be sent, by this farm's view."""
        records = [record.value for record in self.view.records.values()]
        return sum(not each.sent or each.resolved for each in (*records, *self._unrecorded.values()))

    def owned(self, rc: RC) -> None:
        """Look at an RC that this farm owns, because it was taken or has changed."""
        self._owned.add(rc.id)
        self._gone.discard(rc.id)
        spec, status = (rc.spec.value if rc.spec else None), (rc.status.value if rc.status else None)
        trouble, known = incidents.of_rc(spec, status), self._troubles.get(rc.id)
        if trouble is None:
            records = (self._keys.incident(kind, rc.id) for kind in RC_KINDS)
            if self._troubles.pop(rc.id, None) or any(key in self.view.records for key in records):
                self._changed.set()
        elif known is None or known[0][:2] != trouble[:2]:
            self._troubles[rc.id] = trouble, self._clock()
            self._changed.set()

    def released(self, rc_id: str, *, is_gone: bool) -> None:
        """Note that this farm does not own the RC any more. `is_gone`: it was deleted."""
        self._owned.discard(rc_id)
        self._troubles.pop(rc_id, None)
        if is_gone:
            self._gone.add(rc_id)
        self._changed.set()

    def look(self) -> None:
        """Look again at the brake, the nodes, the farms and the audit log: something of them has changed."""
        self._changed.set()

    async def run(self, member_key: str, session: str) -> None:
        """Keep the records and send, until cancelled."""
        await self.view.synced()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep(ops.check_session(member_key, session)))
            tasks.create_task(self._send(ops.check_session(member_key, session)))

    def _decode(self, key: str, value: bytes) -> Incident:
        incident = decode(Incident, key, value)
        if key != self._keys.incident(incident.kind, incident.about):
            raise BadRecord(key, f"about: is {incident.kind} {incident.about}, which is not the key's")
        return incident

    def _fold(self, changes: list[Change[Incident]]) -> None:
        self._changed.set()
        self._to_send.set()

    # What is wrong, and what is recorded of it

    async def _keep(self, fence: Op) -> None:
        swept = -SWEEP
        while True:
            self._changed.clear()
            if self._leads() and self._clock() - swept >= SWEEP:
                swept = self._clock()
                await self._find_gone()
            try:
                wake = await self._reconcile(fence)
            except StoreError as error:
                if isinstance(error, OwnershipLost | TxnConflict):
                    self._log.debug("An incident was changed by another farm", error=str(error))
                else:
                    self._log.warning("An incident could not be recorded; retrying", error=str(error))
                await asyncio.sleep(STORE_PAUSE)
                continue
            try:
                async with asyncio.timeout(min(wake, SWEEP)):
                    await self._changed.wait()
            except TimeoutError:
                pass  # a trouble has lasted for long enough, or it is time to look for RCs that are gone

    async def _find_gone(self) -> None:
        for record in list(self.view.records.values()):
            incident = record.value
            if incident.kind not in RC_KINDS or incident.about in self._owned:
                continue
            try:
                if await self._store.get(self._keys.spec(incident.about), consistent=True) is None:
                    self._gone.add(incident.about)
            except StoreError:
                return  # the next look finds them

    async def _reconcile(self, fence: Op) -> float:
        """Bring the records in line with what is wrong. Return the seconds until that changes by the clock."""
        present = {(each.value.kind, each.value.about): each for each in self.view.records.values()}
        troubles, wake = self._wanted(present)
        for name, record in present.items():
            incident = record.value
            key = self._keys.incident(*name)
            if name in troubles and incident.resolved:
                reopened = msgspec.structs.replace(incident, resolved=False)  # before its end was sent
                await self._write([fence, ops.cas(key, encode(reopened), record.modify_index)])
            elif name not in troubles and not incident.resolved and self._answers_for(name):
                if incident.sent:
                    ended = msgspec.structs.replace(incident, resolved=True, problem="")
                    await self._write([fence, ops.cas(key, encode(ended), record.modify_index)])
                else:
                    await self._write([fence, ops.delete_cas(key, record.modify_index)])
        for name in self._unrecorded.keys() - troubles.keys():
            self._unrecorded[name] = msgspec.structs.replace(self._unrecorded[name], resolved=True)
            self._to_send.set()
        for name in troubles.keys() - present.keys() - self._unrecorded.keys():
            trouble = troubles[name]
            incident = Incident(
                kind=trouble.kind,
                about=trouble.about,
                summary=trouble.summary,
                severity=trouble.severity,
                since=utc_now(),
                farm=self._settings.name,
            )
            try:
                await self._write([fence, ops.create(self._keys.incident(*name), encode(incident))])
            except TxnConflict:
                raise
            except StoreError as error:
                self._log.warning("An incident can't be recorded; sending it unrecorded", about=name, error=str(error))
                self._unrecorded[name] = incident
                self._to_send.set()
        return wake

    def _wanted(self, present: Container[Name]) -> tuple[dict[Name, Trouble], float]:
        """Return what is wrong that this farm answers for, and for how long it stays so by the clock."""
        now, wake = self._clock(), SWEEP
        found: dict[Name, Trouble] = {}
        further: Counter[IncidentKind] = Counter()
        for trouble, since in self._all_troubles():
            name, left = trouble[:2], since + self._settings.notify_after - now
            if name not in present and not trouble.at_once and left > 0:
                wake = min(wake, left)
            elif name in present or sum(kind == trouble.kind for kind, _ in found) < MOST:
                found[name] = trouble
            else:
                further[trouble.kind] += 1
        for kind, number in further.items():
            others = incidents.of_others(kind, self._settings.name, number)
            found[others[:2]] = others
        return found, wake

    def _all_troubles(self) -> Iterable[tuple[Trouble, float]]:
        now, farm = self._clock(), self._settings.name
        fleet = [incidents.of_audit(farm, self._audit_problem())]
        if self._leads():
            fleet.append(incidents.of_brake(self._brake.engaged, self._brake.reason_is_known))
            fleet += [incidents.of_node(name) for name, node in self._nodes.nodes().items() if node.lost]
        yield from ((trouble, now) for trouble in fleet if trouble is not None)
        yield from self._troubles.values()

    def _answers_for(self, name: Name) -> bool:
        """Return whether this farm may resolve the incident."""
        kind, about = name
        if kind in ("brake", "node") and not about.startswith("others-of-"):
            return self._leads()
        if kind in RC_KINDS and not about.startswith("others-of-"):
            return about in self._owned or about in self._gone
        farm = about.removeprefix("others-of-")
        return farm == self._settings.name or (self._leads() and farm not in self._live())

    async def _write(self, writing: list[Op]) -> None:
        try:
            self.view.apply(await self._store.txn(writing), writing)
        except TxnConflict:
            await self.view.refresh_key(writing[1].key)
            raise

    # What is sent

    async def _send(self, fence: Op) -> None:
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        connector = aiohttp.TCPConnector(limit=1)
        async with aiohttp.ClientSession(
            connector=connector, trust_env=True, cookie_jar=aiohttp.DummyCookieJar()
        ) as connections:
            while True:
                self._to_send.clear()
                try:
                    done = await self._send_all(connections, fence)
                except CannotSend as error:
                    pause = min(backoff.pause(error.retry_after), LONGEST_PAUSE)
                    self._log.warning("An incident could not be sent; retrying", error=str(error), retry_in=pause)
                    await asyncio.sleep(pause)
                except StoreError as error:
                    self._log.info("Sent incidents could not be recorded; they may be sent again", error=str(error))
                    await asyncio.sleep(STORE_PAUSE)
                else:
                    if done:
                        backoff.reset()
                    await self._to_send.wait()

    async def _send_all(self, connections: aiohttp.ClientSession, fence: Op) -> bool:
        """Send what is to be sent, the oldest first. Return whether anything was. Raises `CannotSend`."""
        done, refused = False, None
        for name, incident in list(self._unrecorded.items()):
            if not incident.sent or incident.resolved:
                await self._post(connections, incident)
                done = True
            if incident.resolved:
                self._unrecorded.pop(name)
            else:
                self._unrecorded[name] = msgspec.structs.replace(incident, sent=utc_now())
        if not self._leads():
            return done
        waiting = [each for each in self.view.records.items() if not each[1].value.sent or each[1].value.resolved]
        for key, record in sorted(waiting, key=lambda each: each[1].value.since):
            incident = record.value
            try:
                await self._post(connections, incident)
            except CannotSend as error:
                if incident.problem != str(error):
                    noted = msgspec.structs.replace(incident, problem=str(error))
                    await self._write([fence, ops.cas(key, encode(noted), record.modify_index)])
                if not error.is_about_it:
                    raise
                refused = error
                continue
            if incident.resolved:
                await self._write([fence, ops.delete_cas(key, record.modify_index)])
            else:
                marked = msgspec.structs.replace(incident, sent=utc_now(), problem="")
                await self._write([fence, ops.cas(key, encode(marked), record.modify_index)])
            done = True
        if refused:
            raise refused
        return done

    async def _post(self, connections: aiohttp.ClientSession, incident: Incident) -> None:
        """Send one event. Raises `CannotSend`."""
        settings = self._settings
        key, headers = self._key(), {}
        if settings.notify_format == "json" and key:
            headers["Authorization"] = f"Bearer {key}"
        installation = settings.notify_name or self._keys.root
        event = incidents.body(incident, settings.notify_format, installation=installation, routing_key=key)
        result: Literal["sent", "failed"] = "failed"
        tls = _tls(settings.notify_ca_file)
        try:
            async with (
                asyncio.timeout(TIME_LIMIT),
                connections.post(
                    settings.notify_url, json=event, headers=headers, allow_redirects=False, ssl=tls
                ) as answer,
            ):
                text = " ".join((await answer.content.read(MOST_READ)).decode(errors="replace").split())[:200]
                if 200 <= answer.status < 300:
                    result = "sent"
                    self._log.info("Incident sent", kind=incident.kind, about=incident.about, ended=incident.resolved)
                    return
                raise _refusal(answer, text.replace(key, "…") if key else text)
        except TimeoutError:
            raise CannotSend(f"no answer within {TIME_LIMIT:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise CannotSend(f"{type(error).__name__}: {error}") from None
        finally:
            self._metrics.notified(result)

    def _key(self) -> str:
        path = self._settings.notify_key_file
        try:
            return token_in("farm.notify_key_file", path) if path else ""
        except BadSettings as error:
            raise CannotSend(str(error)) from None


def _tls(ca_file: Path | None) -> ssl.SSLContext | bool:
    """Return how the receiver is verified. Raises `CannotSend`."""
    try:
        return ssl.create_default_context(cafile=str(ca_file)) if ca_file else True
    except OSError as error:  # of which `ssl.SSLError` is one
        raise CannotSend(f"farm.notify_ca_file: {ca_file} can't be used: {error}") from None


def _refusal(answer: aiohttp.ClientResponse, text: str) -> CannotSend:
    status = f"{answer.status} {answer.reason}"
    if 300 <= answer.status < 400:
        return CannotSend(f"{status}: redirects are not followed; correct farm.notify_url", is_about_it=False)
    after = answer.headers.get("Retry-After", "")
    return CannotSend(
        f"{status}: {text}" if text else status,
        is_about_it=answer.status in (400, 413, 422),
        retry_after=float(after) if after.isdigit() else 0.0,
    )
