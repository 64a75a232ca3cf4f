"""Did compression pay? One honest sentence from what this very run measured."""

from __future__ import annotations

import statistics
import time

import torch

from hvdcomp.training.metrics import Totals
from hvdcomp.training.units import bandwidth


def dense_exchange_s(numel: int, device: torch.device, repeats: int = 5) -> float:
    """Seconds of a dense float32 allreduce of `numel` values, the median on this rank; collective."""
    import horovod.torch as hvd

    values = torch.zeros(max(1, numel), device=device)
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        hvd.allreduce_(values, op=hvd.Average, name="hvdcomp.dense_probe")
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def sentence(totals: Totals, workers: int, dense_s: float, mbit: float | None = None) -> str:
    """Whether compression paid, in plain words.

    Args:
        dense_s: seconds of one dense exchange on this network, without the overlap that Horovod would give it.
        mbit: bandwidth of a modelled network, Mbit/s; None: times were measured.
    """
    spent_s = sum(totals.times[name] for name in ("compress_s", "wait_s", "decide_s")) / max(1, totals.steps)
    if workers == 1:
        return f"One worker sends nothing, so compression cannot pay; it took about {_ms(spent_s)} a step."
    here = "here" if mbit is None else f"on the modelled network of {bandwidth(mbit)}"
    measured = ", measured at the end of this run" if mbit is None else ""
    if set(totals.cf_steps) <= {"1"} and totals.compression_ratio < 1.01:
        return f"Nothing was compressed; a dense exchange takes about {_ms(dense_s)} {here}."
    compared = (
        f"about {_ms(spent_s)} a step to compress, exchange and wait, against {_ms(dense_s)} for a dense exchange"
    )
    ratio = totals.compression_ratio
    share = f"{100 / ratio:.0f} % of the bytes were sent"
    fewer = share if ratio < 1.05 else f"{ratio:.1f} times fewer bytes were sent"
    if spent_s <= dense_s:
        return f"Compression paid {here}: {compared}{measured}; {fewer}."
    hope = _pays_below(totals, workers, spent_s - dense_s)
    return f"Compression did not pay {here}: {compared}{measured}; {fewer}{hope}."


def _pays_below(totals: Totals, workers: int, overhead_s: float) -> str:
    """The bandwidth at which the bytes saved would make up for the time lost."""
    dense_received = 2 * totals.bytes_dense * (workers - 1) / workers  # a ring allreduce
    saved_per_step = (dense_received - totals.bytes_received) / max(1, totals.steps)
    if saved_per_step <= 0:
        return ", but more bytes arrive than of a dense exchange, so no network would change that"
    return f", which would pay on a network slower than about {_rounded(8 * saved_per_step / overhead_s / 1e6)} Mbit/s"


def _rounded(value: float) -> str:
    """Two significant digits, without an exponent."""
    return f"{float(f'{value:.2g}'):g}"


def _ms(seconds: float) -> str:
    return f"{_rounded(seconds * 1e3)} ms"
