"""Figures as people read them."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """ "62.8 MB": three digits, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def duration(seconds: float) -> str:
    """ "12.3 s", "4 min 05 s", "2 h 03 min"."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def bandwidth(mbit: float) -> str:
    """ "100 Mbit/s", "2.5 Gbit/s"."""
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit:g} Mbit/s"
