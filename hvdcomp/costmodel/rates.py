"""What encoding and decoding costs: so long a tensor, so long an element, so long a byte of payload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvdcomp.compressors import available
from hvdcomp.costmodel.traffic import Work


class UnknownRates(LookupError):
    """Nobody measured what a method costs on a device."""


@dataclass(frozen=True)
class Cost:
    """Seconds of each tensor, of each of its elements, and of each byte of payload.

    Decoding reads the payloads of all workers where they come by allgather.
    """

    unit_s: float = 0.0
    element_s: float = 0.0
    byte_s: float = 0.0

    def seconds(self, work: Work) -> float:
        return self.unit_s * work.units + self.element_s * work.elements + self.byte_s * work.nbytes

    def scaled(self, factor: float) -> Cost:
        """So many times the seconds."""
        return Cost(factor * self.unit_s, factor * self.element_s, factor * self.byte_s)


@dataclass(frozen=True)
class Rates:
    """What a method costs on a device."""

    encode: Cost = Cost()
    decode: Cost = Cost()

    def scaled(self, factor: float) -> Rates:
        """So many times the seconds."""
        return Rates(self.encode.scaled(factor), self.decode.scaled(factor))


def key_of(name: str, params: Mapping[str, Any]) -> str:
    """What rates are filed under, such as "powersgd:rank=4": the parameters that are not the default's.

    A compression factor is none of them: what it changes are the bytes of payload.
    """
    defaults = available()[name].parameters() if name in available() else {}
    own = {k: v for k, v in sorted(params.items()) if k != "cf" and (k == "rank" or defaults.get(k) != v)}
    if "rank" in defaults and "rank" not in own:
        own = {"rank": defaults["rank"], **own}
    return ":".join([name, *(f"{k}={v}" for k, v in own.items())])


def rates_of(rates: Mapping[str, Rates], name: str, params: Mapping[str, Any]) -> Rates:
    """A method's.

    Raises:
        UnknownRates: they are not among these.
    """
    key = key_of(name, params)
    if key not in rates:
        raise UnknownRates(
            f"what {key} costs on this device is not known: measure it (hvdcomp probe --methods {key}); known: "
            f"{', '.join(sorted(rates)) or 'nothing'}"
        )
    return rates[key]
