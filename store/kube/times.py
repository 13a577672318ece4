"""Times as the Kubernetes API writes them: `metav1.Time` in whole seconds, `metav1.MicroTime` in microseconds, UTC."""

from __future__ import annotations

from datetime import UTC, datetime


def format_time(unix_seconds: float) -> str:
    """`metav1.Time`: `2006-01-02T15:04:05Z`."""
    return datetime.fromtimestamp(int(unix_seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def format_micro_time(unix_seconds: float) -> str:
    """`metav1.MicroTime`: `2006-01-02T15:04:05.000000Z`."""
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
