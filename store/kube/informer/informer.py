"""Informer: a cached, indexed copy of a collection, kept current by one list and one watch, with change handlers.

The model: `run` owns one reflector, which passes the server's state to one `CacheWriter`, which keeps the cache and
calls the handlers, synchronously, on the event loop, right after the cache shows the change. So readers and handlers
always see the same state, there is no buffer that could grow, each handler sees one legal sequence per object (`added`,
any number of `updated`, `deleted`), and `synced` means that handlers have received everything in the first list. A
handler should only add keys to a queue; one that blocks holds up the loop. An exception of a handler is logged and
counted; the handler still receives the next change. Beside the reflector run the resyncs of handlers that asked for
them, and the reads of objects that a label selector no longer shows.

`CacheWriter` has the rules. A name with another UID is another object: `deleted`, then `added`, never an update. A
deletion that an outage hid is reported as a tombstone (`DeletedFinalStateUnknown`). An object that stops matching a
field selector counts as deleted.

With a label selector an absent object need not be gone: a watch reports an object that was deleted, and one that has
only lost the label, as the same event. So `UnmatchedObjects` reads each absent object by name, in a task of its own, a
few at a time; until the answer is known, the object stays in the cache. An object that is gone, or whose name belongs
to another one, is reported once, and the task ends. An object that still exists is *unmatched*: it is reported as
`updated`, kept until `discard` or until its deletion is observed, and read again at growing intervals, because no watch
will report its end. A list or watch that shows the object again closes the question, which ends the task. When the
server forbids these reads, the watch is taken at its word: the object counts as gone. An object that was terminating
when it was last seen is assumed gone without a request: no controller would adopt it any more, and this saves a request
for every pod that ends normally.

`ObjectCache` keeps an object as its own JSON text and decodes it for each reader. A decoded pod is a hundred containers
and 25 KB; its text is 4 KB, costs 10 µs to decode, is invisible to the garbage collector, and can't be changed by a
reader. For the `old` of an update only the rest is decoded when the spec, most of a pod, has not changed: then `old`
and `new` share it. An indexer returns the values under which an object is found, none or several. When it raises for an
object, that is logged, and the object is not found under that index. Keys come in the order in which they were first
put.

Source: client-go's shared informer.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec
import structlog

from store.kube.api.errors import Forbidden, NotFound
from store.kube.api.objects import (
    Object,
    Resource,
    controller_of,
    is_deleting,
    key_of,
    labels_of,
    namespace_of,
    resource_version_of,
    split_key,
    uid_of,
)
from store.kube.api.protocol import KubeReader
from store.kube.informer.reflector import (
    Admission,
    Collection,
    Reflector,
    ReflectorStats,
    Transform,
    new_backoff,
    without_managed_fields,
)

log = structlog.get_logger(__name__)

CONCURRENCY = 8  # concurrent reads of absent objects
REREAD_AFTER = 10.0  # seconds, at least, until an unmatched object is read again; doubles
REREAD_AFTER_CAP = 150.0
_RESYNC_STRIDE = 100  # objects that are reported again before other tasks get a turn on the loop
Indexer: TypeAlias = Callable[[Object], Iterable[str]]
_decode: Callable[[bytes], Object] = msgspec.json.Decoder(dict).decode
_decode_spec: Callable[[bytes], Any] = msgspec.json.Decoder().decode


def by_controller(obj: Object) -> Iterable[str]:
    """Indexer: the UID of the controller that owns the object; orphans are not found."""
    reference = controller_of(obj)
    return () if reference is None else (str(reference["uid"]),)


def by_label(label: str) -> Indexer:
    """Indexer: `NAMESPACE/VALUE` of a label; objects without it are not found."""

    def values(obj: Object) -> Iterable[str]:
        value = labels_of(obj).get(label)
        return () if value is None else (f"{namespace_of(obj)}/{value}",)

    return values


class DeletedFinalStateUnknown(NamedTuple):
    """A tombstone: the object is gone, but its deletion was not observed. `obj` is the last known state, maybe stale.

    Source: client-go's `cache.DeletedFinalStateUnknown`.
    """

    key: str
    obj: Object


class Handler(Protocol):
    """Callbacks for changes. Objects are shared between handlers: never change one in place."""

    def added(self, obj: Object) -> None:
        """The object is new, or the handler is."""

    def updated(self, old: Object, new: Object) -> None:
        """The object, identified by its UID, has another state. On a resync, `old` is `new`."""

    def deleted(self, obj: Object | DeletedFinalStateUnknown) -> None:
        """The object is gone; `obj` is its final state, or a tombstone."""


def last_state(deleted: Object | DeletedFinalStateUnknown) -> Object:
    """Return the last known state of a deleted object, whether its deletion was observed or not."""
    return deleted.obj if isinstance(deleted, DeletedFinalStateUnknown) else deleted


class Informer:
    """A view of `resource` in one namespace or, with "", in all. Returned objects belong to the caller.

    `indexers`: names and functions, see `ObjectCache`. `transform`: see `store.kube.informer.reflector.Admission`.
    `page_size`: objects per page of a list; 0 for one page. `clock` is monotonic, in seconds. `stats`: counters of
    lists and watches by reason, and of events.
    """

    def __init__(
        self,
        api: KubeReader,
        resource: Resource,
        *,
        namespace: str = "",
        label_selector: str = "",
        field_selector: str = "",
        indexers: Mapping[str, Indexer] | None = None,
        transform: Transform | None = without_managed_fields,
        page_size: int = 500,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.resource = resource
        self._clock = clock
        self._admission = Admission(resource, transform)
        asks = bool(label_selector) and not field_selector
        self._unmatched = UnmatchedObjects(api, resource, self._admission, clock=clock, rng=rng) if asks else None
        self._writer = CacheWriter(resource, indexers or {}, self._unmatched)
        self._cache = self._writer.cache
        collection = Collection(resource, namespace, label_selector, field_selector)
        self._reflector = Reflector(
            api, collection, self._admission, self._writer, page_size=page_size, clock=clock, rng=rng
        )
        self.stats: ReflectorStats = self._reflector.stats
        self._resyncs: list[tuple[Handler, float]] = []
        self._group: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Keep the view current until cancelled. After errors of the server the view retries, see `problem`."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            if self._unmatched is not None:
                self._unmatched.start(group)
            for handler, period in self._resyncs:
                group.create_task(self._resync(handler, period))
            try:
                await self._reflector.run()
            finally:
                self._group = None

    def add_handler(self, handler: Handler, *, resync: float = 0.0) -> None:
        """Report everything cached to `handler`, and every change from now on.

        `resync`: the interval in seconds, rounded up, at which each object is reported again as `updated`; 0: never.
        """
        self._writer.add_handler(handler, resyncs=resync > 0)
        if resync > 0:
            self._resyncs.append((handler, float(math.ceil(resync))))
            if self._group is not None:
                self._group.create_task(self._resync(*self._resyncs[-1]))

    @property
    def has_synced(self) -> bool:
        """Return whether handlers have received the whole first list."""
        return self._reflector.listed.is_set()

    async def synced(self) -> None:
        """Wait for `has_synced`."""
        await self._reflector.listed.wait()

    def __len__(self) -> int:
        return len(self._cache)

    def get(self, key: str) -> Object | None:
        """Return the object under `NAMESPACE/NAME`, as last seen."""
        return self._cache.get(key)

    def items(self) -> list[Object]:
        """Return all objects. Each is decoded for the caller: prefer an index where one fits."""
        return self._cache.items()

    def by_index(self, index: str, value: str) -> list[Object]:
        """Return the objects with `value` in the index. Raises KeyError for an index that does not exist."""
        return self._cache.by_index(index, value)

    def discard(self, key: str, uid: str) -> None:
        """Forget an unmatched object that was released. Does nothing for any other object."""
        self._writer.discard(key, uid)

    @property
    def resource_version(self) -> str:
        """The last resource version seen; "" before the first list."""
        return self._reflector.cursor.version

    @property
    def last_seen(self) -> float | None:
        """The time of the server's last answer, on the clock, or None. An idle watch receives one every minute."""
        return self._reflector.last_seen

    @property
    def age(self) -> float:
        """Seconds since `last_seen`; infinite before the first answer."""
        return math.inf if self.last_seen is None else self._clock() - self.last_seen

    def renew(self) -> None:
        """Watch again from where the view stands: an event that must have come is missing."""
        self._reflector.renew()

    @property
    def problem(self) -> str:
        """The reason, in words, why the view can't be kept current at present; "" when it can."""
        return self._reflector.problem

    @property
    def malformed(self) -> int:
        """The number of objects that could not be decoded and were left out."""
        return self._admission.malformed

    @property
    def unreadable(self) -> Mapping[str, str]:
        """The existing objects that can't be decoded, by key, with the reason."""
        return self._admission.unreadable

    @property
    def handler_failures(self) -> int:
        """The number of exceptions of handlers."""
        return self._writer.handler_failures

    async def _resync(self, handler: Handler, period: float) -> None:
        while True:
            await asyncio.sleep(period)
            for number, key in enumerate(tuple(self._cache), start=1):
                obj = self._cache.get(key)
                if obj is not None:
                    self._writer.notify(handler.updated, obj, obj)
                if number % _RESYNC_STRIDE == 0:
                    await asyncio.sleep(0)


class CacheWriter:
    """A sink of reflectors. `unmatched`: finds out about absent objects; None when absent means gone.

    `handler_failures`: how often a handler raised.
    """

    def __init__(
        self, resource: Resource, indexers: Mapping[str, Indexer], unmatched: UnmatchedObjects | None = None
    ) -> None:
        self.cache = ObjectCache(indexers)
        self.handler_failures = 0
        self._resource, self._unmatched = resource, unmatched
        self._handlers: tuple[Handler, ...] = ()
        self._resyncing: tuple[Handler, ...] = ()
        self._final: dict[str, Object] = {}  # last states of absent objects, as the watch reported them

    def add_handler(self, handler: Handler, *, resyncs: bool) -> None:
        """Report everything cached to the handler, and every change from now on. `resyncs`: also each object that a
        list shows unchanged."""
        self._handlers += (handler,)
        if resyncs:
            self._resyncing += (handler,)
        for obj in self.cache.items():
            self.notify(handler.added, obj)

    def notify(self, call: Callable[..., None], *args: object) -> None:
        """Call one handler's method; log and count its exception."""
        try:
            call(*args)
        except Exception:
            self.handler_failures += 1
            log.exception("A handler failed; it still receives the next change", resource=self._resource.plural)

    def present(self, obj: Object) -> None:
        """Take the state of an object that exists."""
        key = key_of(obj)
        known = self.cache.peek(key)
        if known is not None and known.uid != uid_of(obj):
            self.gone(key)
            known = None
        self._forget_question(key)
        if known is None:
            self.cache.put(key, obj)
            for handler in self._handlers:
                self.notify(handler.added, obj)
        elif known.resource_version == resource_version_of(obj):
            for handler in self._resyncing:
                self.notify(handler.updated, obj, obj)
        else:
            self._update(key, known, obj)

    def absent(self, obj: Object) -> None:
        """Take the last state of an object that left the collection."""
        key = key_of(obj)
        known = self.cache.peek(key)
        if known is None:
            return
        if known.uid != uid_of(obj):
            self.gone(key)
            return
        self._final[key] = obj
        if self._unmatched is None or is_deleting(obj):
            self.gone(key)
        else:
            self._unmatched.ask(key, known.uid, self)

    def lost(self, key: str, uid: str) -> None:
        """The object left the collection; its last state can't be decoded."""
        known = self.cache.peek(key)
        if known is not None and uid in ("", known.uid):
            self._missing(key)

    def retain(self, keys: Set[str]) -> None:
        """Objects under other keys left the collection; their departure was not observed."""
        for key in [key for key in self.cache if key not in keys]:
            self._missing(key)

    def found(self, key: str, obj: Object) -> None:
        """An absent object still exists, in this state, but the label selector no longer matches it."""
        self._final.pop(key, None)
        known = self.cache.peek(key)
        assert known is not None, "questions are closed when their object leaves the cache"
        if known.resource_version != resource_version_of(obj):
            self._update(key, known, obj)

    def gone(self, key: str) -> None:
        """Remove an object that does not exist any more."""
        last = self.cache.remove(key)
        deleted = self._final.get(key) or DeletedFinalStateUnknown(key, last)
        self._forget_question(key)
        for handler in self._handlers:
            self.notify(handler.deleted, deleted)

    def discard(self, key: str, uid: str) -> None:
        """Forget an absent object that still exists but that no controller needs any more. Any other stays."""
        known = self.cache.peek(key)
        if known is not None and known.uid == uid and self._unmatched is not None and key in self._unmatched:
            self._final.pop(key, None)
            self.gone(key)

    def _missing(self, key: str) -> None:
        """Handle an object that no list shows."""
        if self._unmatched is None:
            self.gone(key)
        elif key not in self._unmatched:
            known = self.cache.peek(key)
            assert known is not None
            if is_deleting(known.decoded()):
                self.gone(key)
            else:
                self._unmatched.ask(key, known.uid, self)

    def _update(self, key: str, known: Cached, obj: Object) -> None:
        old = known.before(obj, self.cache.put(key, obj))
        for handler in self._handlers:
            self.notify(handler.updated, old, obj)

    def _forget_question(self, key: str) -> None:
        self._final.pop(key, None)
        if self._unmatched is not None:
            self._unmatched.close(key)


class UnmatchedObjects:
    """Asks the API server whether objects of one resource still exist that a watch with a selector has reported as
    deleted: they may only have ceased to match. A question stays open, by key, until it is answered or closed."""

    def __init__(
        self,
        api: KubeReader,
        resource: Resource,
        admission: Admission,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._api, self._resource, self._admission = api, resource, admission
        self._clock, self._rng = clock, rng or random.Random()
        self._slots = asyncio.Semaphore(CONCURRENCY)
        self._open: dict[str, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._may_ask, self._fails = True, False

    def start(self, group: asyncio.TaskGroup) -> None:
        """Ask in tasks of this group from now on; ending the group closes all questions."""
        self._group, self._open = group, {}

    def __contains__(self, key: str) -> bool:
        return key in self._open

    def ask(self, key: str, uid: str, writer: CacheWriter) -> None:
        """Find out whether the object `uid` still exists. An open question about the key continues unchanged."""
        assert self._group is not None, "unmatched objects can only be read while the informer runs"
        if key not in self._open:
            self._open[key] = self._group.create_task(self._follow(key, uid, writer))

    def close(self, key: str) -> None:
        """Close the question about the key; the answer is known."""
        task = self._open.pop(key, None)
        if task is not None:
            task.cancel()

    async def _follow(self, key: str, uid: str, writer: CacheWriter) -> None:
        after_error = new_backoff(self._clock, self._rng)
        of_unmatched = new_backoff(
            self._clock, self._rng, first=REREAD_AFTER, longest=REREAD_AFTER_CAP, reset_after=None
        )
        while True:
            obj: Object | None = None
            try:
                namespace, name = split_key(key)
                async with self._slots:
                    obj = await self._api.get(self._resource, name, namespace)
            except NotFound:
                pass
            except Forbidden as error:
                if self._may_ask:
                    self._may_ask = False
                    log.warning(
                        "Objects that leave the selector count as deleted; grant the verb `get` to distinguish them",
                        resource=self._resource.plural,
                        error=str(error),
                    )
            except Exception as error:  # also an unexpected one: it must not end the informer
                if not self._fails:  # one warning for all reads that fail in a row
                    self._fails = True
                    log.warning(
                        "Could not read absent objects; they count as existing until that succeeds",
                        resource=self._resource.plural,
                        object=key,
                        error=str(error) or repr(error),
                    )
                await asyncio.sleep(after_error.pause(getattr(error, "retry_after", None)))
                continue
            self._fails = False
            if obj is None or uid_of(obj) != uid:
                del self._open[key]
                writer.gone(key)
                return
            if admitted := self._admission.admit(obj):
                try:
                    writer.found(key, admitted)
                except Exception as error:
                    self._admission.refuse(obj, f"it can't be kept: {error!r}")
            await asyncio.sleep(of_unmatched.pause())


class Cached(NamedTuple):
    """One stored object. `text`: all but its spec. `spec`: that, because few updates change it; empty if it has none.
    `values`: its values in each index, in the order of the indexers."""

    uid: str
    resource_version: str
    text: bytes
    spec: bytes
    values: tuple[tuple[str, ...], ...]

    def decoded(self) -> Object:
        obj = _decode(self.text)
        if self.spec:
            obj["spec"] = _decode_spec(self.spec)
        return obj

    def before(self, new: Object, now: Cached) -> Object:
        """Return this state beside `new`, the state `now`: they share a spec that is the same in both."""
        if self.spec and self.spec == now.spec:
            return {**_decode(self.text), "spec": new["spec"]}
        return self.decoded()


class ObjectCache:
    """Objects by key and by indexes. Returned objects belong to the caller."""

    def __init__(self, indexers: Mapping[str, Indexer]) -> None:
        self._indexers = dict(indexers)
        self._encoder, self._buffer = msgspec.json.Encoder(), bytearray()
        self._objects: dict[str, Cached] = {}
        self._indexes: dict[str, dict[str, dict[str, None]]] = {name: {} for name in indexers}

    def __len__(self) -> int:
        return len(self._objects)

    def __iter__(self) -> Iterator[str]:
        """Iterate over all keys."""
        return iter(self._objects)

    def peek(self, key: str) -> Cached | None:
        """Return the object as it is stored: its identity and version, without decoding it."""
        return self._objects.get(key)

    def get(self, key: str) -> Object | None:
        cached = self._objects.get(key)
        return None if cached is None else cached.decoded()

    def items(self) -> list[Object]:
        """Return all objects. Each is decoded: prefer an index when only a few are needed."""
        return [cached.decoded() for cached in self._objects.values()]

    def by_index(self, index: str, value: str) -> list[Object]:
        """Return the objects with `value` in the index. Raises KeyError for an index that does not exist."""
        return [self._objects[key].decoded() for key in self._indexes[index].get(value, ())]

    def put(self, key: str, obj: Object) -> Cached:
        """Store this state of the object. Return it as it is stored."""
        rest = dict(obj)
        spec = self._encoded(rest.pop("spec")) if "spec" in rest else b""
        text = self._encoded(rest)
        old = self._objects.get(key)
        found: list[tuple[str, ...]] = []
        for name, indexer in self._indexers.items():
            try:
                found.append(tuple(dict.fromkeys(indexer(obj))))
            except Exception:
                found.append(())
                log.exception("Could not index an object; it is missing from this index", index=name, object=key)
        before, values = None if old is None else old.values, tuple(found)
        if values != before:
            self._move(key, before, values)
        self._objects[key] = now = Cached(uid_of(obj), resource_version_of(obj), text, spec, values)
        return now

    def remove(self, key: str) -> Object:
        """Remove the object. Return its last state. Raises KeyError when there is none."""
        cached = self._objects.pop(key)
        self._move(key, cached.values, None)
        return cached.decoded()

    def _encoded(self, value: Any) -> bytes:
        self._encoder.encode_into(value, self._buffer)
        return bytes(self._buffer)  # of the exact size: the result of `encode` takes a quarter more

    def _move(self, key: str, old: tuple[tuple[str, ...], ...] | None, new: tuple[tuple[str, ...], ...] | None) -> None:
        nowhere = ((),) * len(self._indexes)
        for index, gone, come in zip(self._indexes.values(), old or nowhere, new or nowhere, strict=True):
            for value in gone:
                if value not in come:
                    index[value].pop(key, None)
                    if not index[value]:
                        del index[value]
            for value in come:
                index.setdefault(value, {})[key] = None
