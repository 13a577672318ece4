"""Quantities in Kubernetes' notation: `500m`, `2`, `1.5Gi`."""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal

_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:([eE][+-]?\d{1,3})|([numkMGTPE]|[KMGTPE]i))?", re.ASCII)
_DECIMAL = {suffix: Decimal(1000) ** power for power, suffix in enumerate("num", start=-3)} | {
    suffix: Decimal(1000) ** power for power, suffix in enumerate("kMGTPE", start=1)
}
_BINARY = {f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", start=1)}
_FACTORS = _DECIMAL | _BINARY


def parse_quantity(value: str | float) -> Decimal:
    """Return the number that a quantity stands for. Raises ValueError, naming the value, for anything else."""
    match = _QUANTITY.fullmatch(str(value))
    if match is None:
        raise ValueError(f"{value!r} is not a quantity; write it like 500m, 2 or 1.5Gi")
    number, exponent, suffix = match.groups()
    return Decimal(number + (exponent or "")) * _FACTORS.get(suffix, Decimal(1))


def format_quantity(number: Decimal) -> str:
    """Return a quantity: whole numbers as they are, others in thousandths (rounded up, as by the API server)."""
    if number == number.to_integral_value():
        return str(int(number))
    return f"{int((number * 1000).to_integral_value(ROUND_CEILING))}m"
