"""Checks of parameters; their messages say what was given, what is allowed, and what the parameter is."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Collection
from typing import Any


def check_number(name: str, value: Any, low: float, high: float = math.inf, *, hint: str) -> float:
    """`value` as a float if it is a finite number within [low, high], else a ValueError that says what `name` is."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    number = _as_float(value) if is_number else math.nan
    if not low <= number <= high or math.isinf(number):
        allowed = f">= {low:g}" if math.isinf(high) else f"between {low:g} and {high:g}"
        kind = "" if is_number else "a number "
        raise ValueError(f"{name} must be {kind}{allowed}, got {value!r} ({hint})")
    return number


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def check_count(name: str, value: Any, low: int = 1, *, hint: str) -> int:
    """`value` if it is a whole number of at least `low`, else a ValueError that says what `name` is."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < low:
        raise ValueError(f"{name} must be a whole number >= {low}, got {value!r} ({hint})")
    return int(value)


def check_flag(name: str, value: Any, *, hint: str) -> bool:
    """`value` if it is True or False, else a ValueError: any other value would count as one of them by accident."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r} ({hint})")
    return value


def check_choice(kind: str, value: str, valid: Collection[str]) -> str:
    """`value` if it is in `valid`, else a ValueError that names the nearest valid one and all of them."""
    if value not in valid:
        nearest = difflib.get_close_matches(str(value), valid, n=1, cutoff=0.5)
        guess = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise ValueError(f"unknown {kind} {value!r}; {guess}valid: {', '.join(sorted(valid)) or 'none'}")
    return value
