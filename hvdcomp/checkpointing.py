"""A worker's compressor state as plain dictionaries, and what becomes of it when the number of workers changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hvdcomp.buckets import Part, Spec
from hvdcomp.compressors.requests import OWN
from hvdcomp.exchange import Exchange, Transport
from hvdcomp.schedules import Schedule

VERSION = 2
POLICIES = ("mean", "drop", "error")
_KEYS = {
    "version",
    "worker",
    "workers",
    "step",
    "levels",
    "sending",
    "of_buckets",
    "residuals",
    "states",
    "schedule",
    "assignment",
}


def empty(transport: Transport) -> dict[str, Any]:
    """The state before the first exchange."""
    return {
        "version": VERSION,
        "worker": transport.worker,
        "workers": transport.workers,
        "step": 0,
        "levels": None,
        "sending": None,
        "of_buckets": {},
        "residuals": {},
        "states": {},
        "schedule": None,
        "assignment": None,
    }


def state_of(exchange: Exchange) -> dict[str, Any]:
    """One worker's state; residuals by parameter name in the parameter's shape, compressors' tensors by unit name.

    Raises:
        RuntimeError: an exchange is under way, so that residuals hold gradients too.
    """
    if exchange.under_way:
        raise RuntimeError("the compressor state cannot be saved between backward() and step(): call it after step()")
    decides = exchange.coordinator or exchange.assignment
    schedule = decides.schedule if decides is not None else None
    parts = [part for bucket in exchange.buckets for part in bucket.parts]
    return empty(exchange.transport) | {
        "step": exchange.step,
        "levels": exchange.levels,
        "sending": exchange.sending,
        "of_buckets": {index: [list(levels), cf] for index, (levels, cf) in exchange.of_buckets.items()},
        "residuals": {name: view.clone() for part in parts for name, view in residual_views(part).items()},
        "states": {
            part.unit.name: {key: tensor.clone() for key, tensor in part.unit.state.items()}
            for part in parts
            if part.unit.state
        },
        "schedule": None if schedule is None else {"name": schedule.name, "state": schedule.state_dict()},
        "assignment": None if exchange.assignment is None else exchange.assignment.state_dict(),
    }


def residual_views(part: Part) -> dict[str, Tensor]:
    """Each member's share of a unit's residual, in the member's shape; none without error feedback."""
    if part.feedback is None:
        return {}
    flat = part.feedback.residual
    return {
        member.name: flat[offset : offset + member.numel].view(member.shape)
        for offset, member in zip(part.offsets, part.members, strict=True)
    }


def choose(
    given: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    transport: Transport,
    specs: Mapping[str, Spec],
    on_world_change: str,
) -> dict[str, Any]:
    """The state that this worker goes on from.

    Raises:
        ValueError: the states do not fit the model, this worker, or the number of workers.
    """
    if on_world_change not in POLICIES:
        raise ValueError(f"on_world_change must be one of {', '.join(POLICIES)}, got {on_world_change!r}")
    states = [given] if isinstance(given, Mapping) else list(given)
    for state in states:
        _check(state, specs)
    saved = {state["worker"]: state for state in states}
    if not states or len(saved) < len(states) or len({(s["workers"], s["step"]) for s in states}) > 1:
        raise ValueError("the compressor states must come from one step of one run, one of each worker")
    if states[0]["workers"] == transport.workers:
        if transport.worker not in saved:
            raise ValueError(
                f"worker {transport.worker} was given the compressor state of worker "
                f"{', '.join(map(str, sorted(saved)))}: residuals differ between workers, so each must load its own"
            )
        return dict(saved[transport.worker])
    return _for_another_world(saved, transport, on_world_change)


def _for_another_world(
    saved: dict[int, Mapping[str, Any]], transport: Transport, on_world_change: str
) -> dict[str, Any]:
    workers = next(iter(saved.values()))["workers"]
    if on_world_change == "error":
        raise ValueError(
            f"the compressor state was saved by {workers} workers, and there are {transport.workers}: "
            "choose on_world_change='mean' (with the states of all workers that saved) or 'drop'"
        )
    if 0 not in saved or (on_world_change == "mean" and len(saved) < workers):
        raise ValueError(
            f"on_world_change={on_world_change!r} needs the states of "
            f"{'all' if on_world_change == 'mean' else 'worker 0 of the'} {workers} workers that saved, "
            f"got those of {sorted(saved)}"
        )
    return dict(saved[0]) | {
        "worker": transport.worker,
        "workers": transport.workers,
        "residuals": _mean_residuals(list(saved.values())) if on_world_change == "mean" else {},
        "states": _states_for_all(list(saved.values()) if on_world_change == "mean" else [], saved[0]["states"]),
    }


def _mean_residuals(states: list[Mapping[str, Any]]) -> dict[str, Tensor]:
    """What the workers have not sent yet weighs as much in the new world: the mean over workers of the residuals."""
    names = {name for state in states for name in state["residuals"]}
    return {
        name: torch.stack([s["residuals"][name] for s in states if name in s["residuals"]]).sum(0) / len(states)
        for name in sorted(names)
    }


def _states_for_all(
    saved: list[Mapping[str, Any]], shared: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, dict[str, Tensor]]:
    """Worker 0's tensors that are alike on all workers; of the others the mean, as of residuals, or nothing."""
    units = {name: {k: t for k, t in unit.items() if not k.startswith(OWN)} for name, unit in shared.items()}
    for state in saved:
        for name, unit in state["states"].items():
            for key in filter(lambda key: key.startswith(OWN), unit):
                share = unit[key] / len(saved)
                mean = units.setdefault(name, {})
                mean[key] = mean[key] + share if key in mean else share
    return {name: unit for name, unit in units.items() if unit}


def _check(state: Mapping[str, Any], specs: Mapping[str, Spec]) -> None:
    if not isinstance(state, Mapping) or set(state) != _KEYS or state["version"] != VERSION:
        raise ValueError(f"not a compressor state of version {VERSION}: expected the keys {sorted(_KEYS)}")
    kinds = {"step": int, "worker": int, "workers": int, "residuals": Mapping, "states": Mapping}
    wrong = [key for key, kind in kinds.items() if not isinstance(state[key], kind)]
    if wrong:
        raise ValueError(f"the compressor state is damaged: {', '.join(f'{k} is {state[k]!r:.40}' for k in wrong)}")
    for name, residual in state["residuals"].items():
        if name not in specs:
            raise ValueError(f"the compressor state holds a residual of {name!r}, which is no parameter here")
        if not isinstance(residual, Tensor) or not torch.isfinite(residual).all():
            raise ValueError(f"the residual of {name!r} is not a tensor of finite numbers, and would never be sent")
        if residual.shape != specs[name].shape:
            raise ValueError(
                f"the residual of {name!r} has shape {tuple(residual.shape)}, the parameter {tuple(specs[name].shape)}"
            )


def load_schedule(schedule: Schedule, state: Mapping[str, Any]) -> None:
    """Let the schedule go on from a saved state; one that needs no decisions has none.

    Raises:
        ValueError: the state is another schedule's.
    """
    saved = state["schedule"]
    if not schedule.adaptive or state["step"] == 0:
        return
    if saved is None or saved["name"] != schedule.name:
        other = saved["name"] if saved is not None else "static"
        raise ValueError(f"the compressor state was saved under schedule {other!r}, this run uses {schedule.name!r}")
    schedule.load_state_dict(saved["state"])


def restore(exchange: Exchange, state: Mapping[str, Any]) -> None:
    """Put a chosen state into place; what it does not mention starts from zero."""
    exchange.drop()
    exchange.step = state["step"]
    if exchange.coordinator is not None and state["levels"] is not None:
        exchange.levels = (state["levels"][0], state["levels"][1])
        exchange.sending = state["sending"]
        exchange.of_buckets = {int(i): ((low, high), cf) for i, ((low, high), cf) in state["of_buckets"].items()}
    if exchange.assignment is not None and state["assignment"] is not None:
        exchange.assignment.load_state_dict(state["assignment"])
    for bucket in exchange.buckets:
        for part in bucket.parts:
            if part.feedback is not None:
                part.feedback.holds = True
            for name, view in residual_views(part).items():
                view.copy_(state["residuals"][name]) if name in state["residuals"] else view.zero_()
            part.unit.state = {key: tensor.clone() for key, tensor in state["states"].get(part.unit.name, {}).items()}
