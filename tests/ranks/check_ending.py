"""Jobs that one rank ends; each check is a job of its own."""

from __future__ import annotations

import os

from hvdcomp.schedules import Decision, GraVAC, Statistics
from ranks.tools import give, gradients, me, parameters, wrap


class _Breaks(GraVAC):
    def decide(self, statistics: Statistics) -> Decision:
        raise ZeroDivisionError("the schedule's own fault")


def check_schedule_fails() -> None:
    params = parameters()
    optimizer = wrap(params, "topk", schedule=_Breaks())
    give(params, gradients(0, me()))
    optimizer.step()


def check_one_rank_leaves() -> None:
    """Rank 1 ends without an error while rank 0 still wants to exchange."""
    params = parameters()
    optimizer = wrap(params, "topk")
    for step in range(2 if me() else 20):
        optimizer.zero_grad()
        give(params, gradients(step, me()))
        optimizer.step()
    if me():
        os._exit(3)
    raise AssertionError("rank 0 went on alone")


def check_one_rank_fails_in_its_backward_pass() -> None:
    params = parameters()
    optimizer = wrap(params, "topk")
    for step in range(20):
        optimizer.zero_grad()
        give(params, gradients(step, me()))
        if step == 3 and me() == 1:
            raise MemoryError
        optimizer.step()
