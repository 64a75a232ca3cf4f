"""Checks of parameters; their messages say what was given, what is allowed, and what the parameter is."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Collection


def check_number(name: str, value: float, low: float, high: float = math.inf, *, hint: str) -> float:
    """`value` as a float if it is a finite number within [low, high], else a ValueError that says what `name` is."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= min(high, sys.float_info.max):
        allowed = f">= {low:g}" if math.isinf(high) else f"between {low:g} and {high:g}"
        raise ValueError(f"{name} must be {allowed}, got {value!r} ({hint})")
    return float(value)


def check_count(name: str, value: int, low: int = 1, *, hint: str) -> int:
    """`value` if it is a whole number of at least `low`, else a ValueError that says what `name` is."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} must be a whole number >= {low}, got {value!r} ({hint})")
    return value


def check_choice(kind: str, value: str, valid: Collection[str]) -> str:
    """`value` if it is in `valid`, else a ValueError that names the nearest valid one and all of them."""
    if value not in valid:
        nearest = difflib.get_close_matches(str(value), valid, n=1, cutoff=0.5)
        guess = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise ValueError(f"unknown {kind} {value!r}; {guess}valid: {', '.join(sorted(valid)) or 'none'}")
    return value
