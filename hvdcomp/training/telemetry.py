"""What our optimizer tells beyond Horovod's, in the words of metrics.jsonl; nothing under HVDCOMP_DISABLE=1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple
from typing import Any

from hvdcomp.exchange import StepRecord
from hvdcomp.schedules import UnitForm

_ROUNDS = ("compress_s", "encode_s", "decode_s", "exchange_s", "wait_s", "decide_s")
_EXCLUSIVE = ("compress_s", "wait_s", "decide_s")  # exchange_s spans waiting, and backward where they overlap


class Telemetry:
    """Reads and steers a wrapped optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        trained = (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
        self._dense_nbytes = sum(p.numel() * p.element_size() for p in trained)

    def step_record(self, iteration_s: float) -> dict[str, Any]:
        """The last step in the words of metrics.jsonl; a stock optimizer knows no times but the whole."""
        record = self._optimizer.last_step
        if record is None:
            dense = {"cf": 1.0, "decision": -1, "levels": None, "gains": None, "skipped": False}
            nbytes = dict.fromkeys(("bytes_sent", "bytes_dense"), self._dense_nbytes) | {"bytes_received": None}
            nbytes |= {"messages": None, "elements": None}
            return dense | nbytes | {"compute_s": None} | dict.fromkeys(_ROUNDS) | {"iteration_s": iteration_s}
        times = {name: getattr(record, name) for name in _ROUNDS}
        return {
            "cf": record.cf,
            "decision": record.level,
            "levels": record.levels,
            "gains": record.gains,
            "skipped": record.skipped,
            **_decided(record, getattr(self._optimizer.schedule, "units", ())),
            "bytes_sent": record.bytes_sent,
            "bytes_dense": record.bytes_dense,
            "bytes_received": record.bytes_received,
            "messages": record.messages,
            "elements": record.elements,
            "compute_s": max(0.0, iteration_s - sum(times[name] for name in _EXCLUSIVE)),
            **times,
            "iteration_s": iteration_s,
        }

    def layer_bytes(self) -> dict[str, tuple[float, int]]:
        """Of each tensor the bytes that the last step sent for it, and the dense ones; nothing of a stock optimizer."""
        record = self._optimizer.last_step
        return {} if record is None else record.layer_bytes

    def untimed(self) -> AbstractContextManager[Any]:
        """What happens inside is no part of an iteration's time."""
        context: AbstractContextManager[Any] = self._optimizer.untimed()
        return context

    def tell(self, samples: int, loss: float, next_lr: float) -> None:
        """What a schedule may ask of the coming step: this worker's samples and loss, and the rate of the one after."""
        self._optimizer.samples = samples
        self._optimizer.loss, self._optimizer.next_lr = loss, next_lr

    def check_replicas(self) -> None:
        """Collective. Raises hvdcomp.ReplicaError when ranks hold different parameters."""
        self._optimizer.check_replicas()

    def state(self) -> dict[str, Any]:
        """This rank's compressor state."""
        return dict(self._optimizer.compressor_state_dict())

    def restore(self, states: Sequence[Mapping[str, Any]], on_world_change: str) -> None:
        """Load this worker's own state, or those of all workers of another world."""
        chosen = states[0] if len(states) == 1 else list(states)
        self._optimizer.load_compressor_state_dict(chosen, on_world_change=on_world_change)

    @property
    def residual_nbytes(self) -> int:
        return int(self._optimizer.residual_nbytes)


def _decided(record: StepRecord, units: Sequence[UnitForm]) -> dict[str, Any]:
    """What a schedule was told, by which its decisions can be replayed, and which units' settings it changed."""
    found: dict[str, Any] = {}
    if record.statistics is not None and not record.skipped:
        found["statistics"] = record.statistics.to_vector()
    if record.cfs:
        found["cfs"] = record.cfs
    evidence = record.evidence
    if evidence is not None and evidence.phase_steps:
        found["phase"] = {
            "steps": evidence.phase_steps,
            "units": {unit.name: unit.shape for unit in units},
            "sums": [astuple(sums) for sums in evidence.sums],
            "overlaps": [astuple(overlap) for overlap in evidence.overlaps],
        }
    if record.switched:
        found["switched"] = record.switched
    return found
