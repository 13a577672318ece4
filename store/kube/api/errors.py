"""Errors of the Kubernetes API, by HTTP status and `Status.reason`.

KubeError
├── NoConfig               no API server is configured, or the configuration can't be used
├── Unreachable            no answer came; a write may or may not have been applied
├── Unreadable             an answer came that can't be decoded; a write may have been applied
├── BadRequest       400   the request itself is wrong
├── Unauthorized     401   the server does not know us, or our token expired
├── Forbidden        403   we lack the permission; also a quota or an admission plugin that refuses
├── NotFound         404
├── Conflict         409   the object changed since we read it, or a precondition did not hold
│   └── AlreadyExists 409  the name is taken
├── Expired          410   the resource version, or the continue token, is too old
├── TooLarge         413
├── Invalid          422   the object is refused by validation
├── TooManyRequests  429   try again after `retry_after`
├── ServerTimeout    504   the server gave up waiting; a write may or may not have been applied
└── ServerError      5xx   anything else that is the server's fault
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from store.errors import RcfarmError


class KubeError(RcfarmError):
    """An error of the API. `status`: the HTTP status, 0 when no answer came. `reason`: for programs, as in
    `metav1.Status`. `retry_after`: seconds that the server asks us to wait, or None. `details`: of the Status.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        reason: str = "",
        retry_after: float | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.retry_after = retry_after
        self.details = dict(details or {})


class NoConfig(KubeError):
    """No API server is configured, or the configuration can't be used; the message says what to do."""


class Unreachable(KubeError):
    """No answer came: connection refused or lost, or our own timeout. A write may or may not have been applied."""


class Unreadable(KubeError):
    """An answer came that can't be decoded, such as one nested too deep. A write may have been applied."""


class BadRequest(KubeError):
    """400: the request itself is wrong."""


class Unauthorized(KubeError):
    """401: the API server does not know our credentials, or no longer accepts them."""


class Forbidden(KubeError):
    """403: we lack the permission; a quota or an admission plugin that refuses answers the same."""


class NotFound(KubeError):
    """404: no such object, namespace or kind."""


class Conflict(KubeError):
    """409: the object changed since we read it, or a precondition (UID, resource version) did not hold."""


class AlreadyExists(Conflict):
    """409: another object has the name."""


class Expired(KubeError):
    """410: the resource version or continue token is too old; list again."""


class TooLarge(KubeError):
    """413: the object is larger than the server takes."""


class Invalid(KubeError):
    """422: validation refused the object; it will never be accepted as it is."""


class TooManyRequests(KubeError):
    """429: the server sheds load; retry after `retry_after` seconds."""


class ServerError(KubeError):
    """5xx: the server failed."""


class ServerTimeout(ServerError):
    """504: the server gave up waiting. A write may or may not have been applied."""


_BY_STATUS: dict[int, type[KubeError]] = {
    400: BadRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Expired,
    413: TooLarge,
    422: Invalid,
    429: TooManyRequests,
    504: ServerTimeout,
}
MAX_RETRY_AFTER = 300.0  # seconds: an upper bound of the server's Retry-After
_TOO_LARGE_RESOURCE_VERSION = "ResourceVersionTooLarge"  # the cause in Status.details of a 504 on a list


def error_from_status(status: Mapping[str, Any], *, retry_after: float | None = None) -> KubeError:
    """Return the typed error of a `metav1.Status` object, as an answer or as the object of a watch's ERROR event."""
    written = status.get("code")
    code = written if isinstance(written, int) and written else 500
    reason = str(status.get("reason") or "")
    details = status.get("details")
    details = details if isinstance(details, dict) else {}
    kind = (
        AlreadyExists if reason == "AlreadyExists" else _BY_STATUS.get(code, ServerError if code >= 500 else KubeError)
    )
    asked = details.get("retryAfterSeconds")
    if retry_after is None and isinstance(asked, int | float) and asked > 0:
        retry_after = min(float(asked), MAX_RETRY_AFTER)
    message = str(status.get("message") or reason or f"HTTP {code}")
    return kind(message, status=code, reason=reason, retry_after=retry_after, details=details)


def is_too_large_resource_version(error: KubeError) -> bool:
    """Return whether a list was refused because the server has not reached the requested resource version yet."""
    causes = error.details.get("causes")
    return any(
        isinstance(cause, dict) and cause.get("reason") == _TOO_LARGE_RESOURCE_VERSION
        for cause in (causes if isinstance(causes, list) else ())
    ) or (isinstance(error, ServerTimeout) and "Too large resource version" in str(error))
