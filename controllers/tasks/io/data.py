"""DataStore: named blobs below one base, in memory, in a directory, or behind a URL.

A *reference* is the URL of one blob: the store's base, then parts joined by "/". References come from plugins, records
and remote jobs, so none of them is trusted: a store reads and writes only below its own base, reads at most
`max_dataset_size_bytes`, and every call ends within `timeout` seconds.

Credentials in a base (user information, query) are used for requests and stand in no reference, error or `repr`.

A directory is walked one component at a time, with descriptors and without following symbolic links, so that a link
that another process plants cannot lead out of it. Writes replace the whole blob in one step.

Object stores and HTTP servers are reached through obstore, an optional dependency that is imported on first use.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast
from urllib.parse import unquote, urlsplit, urlunsplit

from controllers.tasks.api.data import DataMetadata
from store.errors import RcfarmError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

MAX_DATASET_SIZE = 10 * 2**20  # bytes
TIMEOUT = 60.0  # seconds
MAX_REFERENCE = 1024  # characters; S3 takes no longer key
_THREADS = 16  # calls of one backend at the same time; one that hangs keeps its thread
_RETRIES = 3  # of one request to a URL, within the time limit
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@=+,-]{0,254}")
_STATUS = re.compile(r"\b(?:status|error) ?\(?:? ?(\d{3})\b|\b([45]\d\d) [A-Z][a-z]")
_URLS = ("s3", "gs", "az", "http", "https")
_FORMS = "memory:, an absolute directory, file:///DIR, s3://BUCKET/PREFIX, gs://…, az://… or http(s)://HOST/PREFIX"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OUTSIDE = (errno.ELOOP, errno.ENOTDIR)  # a symbolic link, or a file, where a directory is expected

T = TypeVar("T")


class DataError(RcfarmError):
    """A blob could not be read or written. `reference` names it."""

    def __init__(self, reference: str, reason: str) -> None:
        self.reference, self.reason = reference, reason
        super().__init__(reference, reason)

    def __str__(self) -> str:
        return f"{self.reference}: {self.reason}"


class BadReference(DataError, ValueError):
    """A reference that is not below the store's base, or has a part that no reference may have."""


class DataNotFound(DataError):
    """There is no such blob."""


class DataTooLarge(DataError):
    """The blob is larger than the limit, in bytes. `size` is None where only the excess is known."""

    def __init__(self, reference: str, limit: int, size: int | None = None) -> None:
        self.limit, self.size = limit, size
        of = f"of {size} bytes is" if size is not None else "is"
        super().__init__(reference, f"the data {of} larger than the limit of {limit} bytes (max_dataset_size_bytes)")


class DataDenied(DataError):
    """The store's credentials do not allow the call, or are missing."""


class DataUnavailable(DataError):
    """No usable answer within the time limit. A write may or may not have been applied; a retry can help."""


class Backend(Protocol):
    """Blobs by path, which `DataStore` has checked. Methods raise `DataError` with the path as the reference."""

    async def size(self, path: str) -> int:
        """Return the size in bytes. Raises `DataNotFound`."""

    async def read(self, path: str, limit: int) -> bytes:
        """Return the blob. Raises `DataNotFound`, and `DataTooLarge` above `limit` bytes."""

    async def write(self, path: str, content: bytes) -> None:
        """Create or replace the blob."""

    async def delete(self, prefix: str) -> None:
        """Remove the blob `prefix` and every blob below it; no error if there is none."""

    def close(self) -> None:
        """Release threads and connections."""


class DataStore:
    """Blobs below `base`, a URL without credentials. Safe for concurrent calls in one event loop.

    `max_dataset_size_bytes`: bound of one blob, read or written. `timeout`: seconds for one call.
    """

    def __init__(
        self, base: str, backend: Backend, *, max_dataset_size_bytes: int = MAX_DATASET_SIZE, timeout: float = TIMEOUT
    ) -> None:
        self.base = base.rstrip("/")
        self.max_dataset_size_bytes = max_dataset_size_bytes
        self._backend, self._timeout = backend, timeout

    def __repr__(self) -> str:
        return f"DataStore({self.base!r})"

    def construct_reference(self, reference: str, *parts: str) -> str:
        """Return `reference` extended by `parts`; each part may hold several, joined by "/". Raises `BadReference`.

        A part consists of ASCII letters, digits and `_.@=+,-`, does not begin with a dot, and has at most 255
        characters: it means the same in a file system, a URL and an object store.
        """
        joined = "/".join([reference.rstrip("/"), *parts])
        self._path(joined)
        return joined

    async def head(self, reference: str) -> DataMetadata:
        """Return the blob's metadata, without reading it. Raises `DataError`, but not for an absent blob."""
        path = self._path(reference)
        try:
            async with self._bounded(reference):
                return DataMetadata(True, await self._backend.size(path))
        except DataNotFound:
            return DataMetadata(False)

    async def read(self, reference: str, *, limit: int | None = None) -> bytes:
        """Return the blob. `limit`: bytes, lower than the store's own. Raises `DataNotFound`, `DataTooLarge` and the
        other `DataError`s."""
        path = self._path(reference)
        limit = self.max_dataset_size_bytes if limit is None else min(limit, self.max_dataset_size_bytes)
        async with self._bounded(reference):
            return await self._backend.read(path, limit)

    async def write(self, reference: str, content: bytes) -> None:
        """Create or replace the blob in one step: readers see the former content or the new. Raises `DataTooLarge`
        before anything is written, and the other `DataError`s."""
        path = self._path(reference)
        if len(content) > self.max_dataset_size_bytes:
            raise DataTooLarge(reference, self.max_dataset_size_bytes, len(content))
        async with self._bounded(reference):
            await self._backend.write(path, content)

    async def delete(self, prefix: str) -> None:
        """Remove the blob `prefix` and every blob below it. Idempotent. Raises `DataError`."""
        path = self._path(prefix)
        async with self._bounded(prefix):
            await self._backend.delete(path)

    def close(self) -> None:
        """Release threads and connections."""
        self._backend.close()

    def _path(self, reference: str) -> str:
        """Return the path below the base."""
        shown = reference if len(reference) <= MAX_REFERENCE else f"{reference[:80]}…"
        if not reference.startswith(f"{self.base}/"):
            raise BadReference(_without_credentials(shown), f"not below {self.base}, the base of this store")
        path = reference[len(self.base) + 1 :]
        for part in path.split("/"):
            if _PART.fullmatch(part) is None:
                raise BadReference(
                    f"{self.base}/…",
                    f"{part[:80]!r} can't be a part of a reference: ASCII letters, digits and _.@=+,- are, at most "
                    "255, not beginning with a dot or punctuation",
                )
        if len(path) > MAX_REFERENCE:
            raise BadReference(shown, f"longer than {MAX_REFERENCE} characters")
        return path

    @contextlib.asynccontextmanager
    async def _bounded(self, reference: str) -> AsyncIterator[None]:
        """Apply the time limit, and put the full reference in the place of the path in errors."""
        try:
            async with asyncio.timeout(self._timeout):
                yield
        except TimeoutError:
            raise DataUnavailable(reference, f"no answer within {self._timeout:g} s") from None
        except DataError as error:
            error.reference = reference
            raise


class MemoryBackend:
    """Blobs of this process alone."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}

    async def size(self, path: str) -> int:
        return len(self._get(path))

    async def read(self, path: str, limit: int) -> bytes:
        content = self._get(path)
        if len(content) > limit:
            raise DataTooLarge(path, limit, len(content))
        return content

    async def write(self, path: str, content: bytes) -> None:
        self.blobs[path] = bytes(content)

    async def delete(self, prefix: str) -> None:
        for path in [path for path in self.blobs if path == prefix or path.startswith(f"{prefix}/")]:
            del self.blobs[path]

    def close(self) -> None:
        pass

    def _get(self, path: str) -> bytes:
        try:
            return self.blobs[path]
        except KeyError:
            raise DataNotFound(path, "there is no such data") from None


class _InThreads:
    """Runs blocking calls in threads of its own: a file system or a server that hangs holds up neither the event loop
    nor other users of threads."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="data")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, path: str, call: Callable[[], T]) -> T:
        with self._translated(path):
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _translated(self, path: str) -> AbstractContextManager[None]:
        """Turn errors into `DataError`s with the path."""
        raise NotImplementedError


class DirectoryBackend(_InThreads):
    """Blobs as files below `root`, which is created when first needed."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    async def size(self, path: str) -> int:
        def call() -> int:
            with self._opened(path) as file:
                return os.fstat(file).st_size

        return await self._run(path, call)

    async def read(self, path: str, limit: int) -> bytes:
        def call() -> bytes:
            with self._opened(path) as file:
                size = os.fstat(file).st_size
                if size > limit:
                    raise DataTooLarge(path, limit, size)
                with open(file, "rb", closefd=False) as reader:
                    content = reader.read(limit + 1)  # the file may grow while it is read
            if len(content) > limit:
                raise DataTooLarge(path, limit)
            return content

        return await self._run(path, call)

    async def write(self, path: str, content: bytes) -> None:
        def call() -> None:
            with self._folder(path, create=True) as (folder, name):
                temporary = f".{secrets.token_hex(8)}"
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                file = os.open(temporary, flags, 0o640, dir_fd=folder)
                try:
                    with open(file, "wb") as writer:
                        writer.write(content)
                        writer.flush()
                        os.fsync(file)
                    os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
                except BaseException:
                    with contextlib.suppress(OSError):
                        os.unlink(temporary, dir_fd=folder)
                    raise
                os.fsync(folder)

        await self._run(path, call)

    async def delete(self, prefix: str) -> None:
        def call() -> None:
            with contextlib.suppress(FileNotFoundError), self._folder(prefix) as (folder, name):
                _remove(folder, name)

        await self._run(prefix, call)

    @contextlib.contextmanager
    def _translated(self, path: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise DataNotFound(path, "there is no such data") from None
        except PermissionError as error:
            raise DataDenied(path, os.strerror(error.errno or 0)) from None
        except OSError as error:
            if error.errno in _OUTSIDE:
                raise BadReference(path, "leads through a symbolic link or a file; neither is followed") from None
            raise DataUnavailable(path, os.strerror(error.errno or 0)) from None

    @contextlib.contextmanager
    def _folder(self, path: str, *, create: bool = False) -> Iterator[tuple[int, str]]:
        """Open the folder of the path without following a link below the root; yields it and the last part's name."""
        *parents, name = path.split("/")
        if create:
            self._root.mkdir(parents=True, exist_ok=True)
        folder = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in parents:
                if create:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, 0o750, dir_fd=folder)
                        os.fsync(folder)
                inner = os.open(part, _DIRECTORY, dir_fd=folder)
                os.close(folder)
                folder = inner
            yield folder, name
        finally:
            os.close(folder)

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[int]:
        """Open a regular file for reading. A pipe or device is refused, not waited for."""
        with self._folder(path) as (folder, name):
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            if stat.S_ISDIR(mode := os.fstat(file).st_mode):
                raise FileNotFoundError(errno.ENOENT, "a folder")
            if not stat.S_ISREG(mode):
                raise BadReference(path, "not a regular file")
            yield file
        finally:
            os.close(file)


def _remove(folder: int, name: str) -> None:
    """Remove a file, or a folder with its contents; a link is removed itself."""
    try:
        inner = os.open(name, _DIRECTORY, dir_fd=folder)
    except OSError as error:
        if error.errno not in _OUTSIDE:
            raise
        os.unlink(name, dir_fd=folder)
        return
    try:
        for each in os.listdir(inner):
            with contextlib.suppress(FileNotFoundError):
                _remove(inner, each)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=folder)


class UrlBackend(_InThreads):
    """Blobs behind a URL: S3 and what speaks its API, Google Cloud Storage, Azure, or plain HTTP with GET, HEAD and
    PUT (and, to delete, WebDAV). `store` is obstore's.

    obstore's coroutines are not used: its threads complete them, and one that does so while the interpreter exits
    aborts the process (PyO3's pyo3-async-runtimes, issue 40).
    """

    def __init__(self, store: ObjectStore) -> None:
        super().__init__()
        self._store = store

    async def size(self, path: str) -> int:
        import obstore

        return await self._run(path, lambda: obstore.head(self._store, path)["size"])

    async def read(self, path: str, limit: int) -> bytes:
        import obstore

        def call() -> bytes:
            answer = obstore.get(self._store, path)
            if answer.meta["size"] > limit:
                raise DataTooLarge(path, limit, answer.meta["size"])
            return bytes(answer.bytes())

        return await self._run(path, call)

    async def write(self, path: str, content: bytes) -> None:
        import obstore

        await self._run(path, lambda: obstore.put(self._store, path, content, use_multipart=False))

    async def delete(self, prefix: str) -> None:
        import obstore

        def call() -> None:
            with contextlib.suppress(FileNotFoundError):
                obstore.delete(self._store, prefix)
            for page in obstore.list(self._store, prefix):
                with contextlib.suppress(FileNotFoundError):
                    obstore.delete(self._store, [each["path"] for each in page])

        await self._run(prefix, call)

    @contextlib.contextmanager
    def _translated(self, path: str) -> Iterator[None]:
        """Drop the text of obstore's errors, which has the URL with its credentials."""
        from obstore import exceptions

        try:
            yield
        except (DataError, TimeoutError):
            raise
        except (FileNotFoundError, exceptions.NotFoundError):
            raise DataNotFound(path, "there is no such data") from None
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError):
            raise DataDenied(path, "the server refused the credentials; check those of the data store") from None
        except Exception as error:
            status = _STATUS.search(str(error).partition("\n")[0])
            reason = (
                f"the server answered {status[1] or status[2]}" if status else f"no answer ({type(error).__name__})"
            )
            raise DataUnavailable(path, reason) from None


def open_data(
    url: str,
    *,
    options: Mapping[str, str] | None = None,
    max_dataset_size_bytes: int = MAX_DATASET_SIZE,
    timeout: float = TIMEOUT,
) -> DataStore:
    """Return the data store that `url` names: `memory:`, a directory, or an object store.

    `options`: obstore's settings of the object store, such as `endpoint`, `region` or `access_key_id`; by default the
    variables of the provider's own tools (AWS_*, GOOGLE_*, AZURE_*) apply. Raises `BadReference` for another URL, and
    `DataUnavailable` if the library for object stores is not installed.
    """
    try:
        scheme, place, path, *_ = urlsplit(url)
    except ValueError:  # its text may have the credentials
        raise BadReference("the base of the data store", f"not a URL; expected {_FORMS}") from None
    backend: Backend
    if url == "memory:":
        base, backend = "memory://data", MemoryBackend()
    elif url.startswith("/") or scheme == "file":
        root = Path(unquote(path) if scheme == "file" else url)
        if not root.is_absolute():
            raise BadReference(url, f"expected {_FORMS}")
        base, backend = root.as_uri(), DirectoryBackend(root)
    elif scheme in _URLS and place:
        base, backend = _without_credentials(url), UrlBackend(_object_store(url, options or {}, timeout))
    else:
        raise BadReference(_without_credentials(url), f"expected {_FORMS}")
    return DataStore(base, backend, max_dataset_size_bytes=max_dataset_size_bytes, timeout=timeout)


def _object_store(url: str, options: Mapping[str, str], timeout: float) -> ObjectStore:
    base = _without_credentials(url)
    try:
        from obstore.store import HTTPStore, from_url
    except ImportError:
        raise DataUnavailable(base, "object stores need obstore: pip install 'rcfarm[objects]'") from None
    limit = timedelta(seconds=timeout / 2)  # of one request, and of its retries: the thread ends within the time limit
    common: dict[str, Any] = {
        "client_options": {"allow_http": not url.startswith("https:"), "timeout": limit, "connect_timeout": limit / 2},
        "retry_config": {"max_retries": _RETRIES, "retry_timeout": limit},
    }
    try:
        if url.startswith("http"):
            parts = urlsplit(url)
            if parts.username:
                pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
                basic = f"Basic {base64.b64encode(pair.encode()).decode()}"
                common["client_options"]["default_headers"] = {"authorization": basic}
            return HTTPStore.from_url(parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl(), **common)
        opened: Any = from_url
        return cast("ObjectStore", opened(url, config=options, **common))  # its type names each provider's options
    except Exception as error:
        raise BadReference(base, f"can't be opened ({type(error).__name__}); check its options") from None


def _without_credentials(url: str) -> str:
    """Return the URL without user information, query and fragment."""
    try:
        parts = urlsplit(url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "")).rstrip("/")
    except ValueError:
        return "the URL"
