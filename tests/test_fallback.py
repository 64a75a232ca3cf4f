"""The honest switch, against step times that are made up."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from hvdcomp.coordinator import LocalChannel, Referee
from hvdcomp.fallback import BLOCK, HOLD, LONGEST_HOLD, Block, DenseFallback


def taken(steps: int, seconds: Callable[[bool, int], float]) -> list[bool]:
    """Which of so many steps were dense, when a step takes ``seconds(dense, step)``."""
    referee, kinds = Referee(LocalChannel()), []
    for step in range(steps):
        kinds.append(referee.dense)
        referee.observe(seconds(referee.dense, step))
    return kinds


def test_a_run_begins_compressed_and_then_tries_dense() -> None:
    kinds = taken(2 * BLOCK, lambda dense, step: 1.0)
    assert kinds == [False] * BLOCK + [True] * BLOCK


@pytest.mark.parametrize(("compressed_s", "dense_s", "chosen"), [(0.1, 1.0, False), (1.0, 0.1, True)])
def test_a_clear_difference_ends_the_trial_at_once(compressed_s: float, dense_s: float, chosen: bool) -> None:
    kinds = taken(2 * BLOCK + HOLD, lambda dense, step: dense_s if dense else compressed_s)
    assert set(kinds[2 * BLOCK :]) == {chosen}


@pytest.mark.parametrize(
    ("compressed_s", "chosen"), [(0.90, False), (0.96, False), (0.98, True), (1.0, True), (1.1, True)]
)
def test_compression_must_be_worth_it(compressed_s: float, chosen: bool) -> None:
    kinds = taken(6 * BLOCK + HOLD, lambda dense, step: 1.0 if dense else compressed_s)
    assert kinds[: 6 * BLOCK] == ([False] * BLOCK + [True] * BLOCK) * 3
    assert set(kinds[6 * BLOCK :]) == {chosen}


def test_the_first_step_of_a_block_is_not_counted() -> None:
    def seconds(dense: bool, step: int) -> float:
        return 100.0 if step % BLOCK == 0 and not dense else 1.0 if dense else 0.5

    assert not any(taken(2 * BLOCK + HOLD, seconds)[2 * BLOCK :])


def test_steps_that_were_not_timed_decide_nothing() -> None:
    fallback = DenseFallback()
    for _ in range(20):
        for _ in range(BLOCK):
            fallback.observe(math.nan)
        assert fallback.next().steps == BLOCK


@pytest.mark.parametrize("slow", [1.05, 2.0, 50.0])
def test_looking_at_the_slower_kind_costs_a_hundredth(slow: float) -> None:
    kinds = taken(300_000, lambda dense, step: 1.0 if dense else slow)
    after = kinds[6 * BLOCK :]
    wasted = sum(slow - 1.0 for dense in after if not dense)
    assert any(not dense for dense in after), "it never looked again"
    assert wasted <= 0.011 * len(after)


def test_it_notices_when_the_network_changes() -> None:
    """Dense is the faster kind until step 1000, then the network slows down."""
    kinds = taken(20_000, lambda dense, step: (1.0 if step < 1000 else 10.0) if dense else 2.0)
    assert kinds[2 * BLOCK : 2 * BLOCK + HOLD] == [True] * HOLD
    assert set(kinds[-HOLD:]) == {False}


def test_one_slow_step_while_looking_does_not_change_the_choice() -> None:
    kinds = taken(5_000, lambda dense, step: 5.0 if step == 2 * BLOCK + HOLD + 1 else 1.0 if dense else 2.0)
    assert sum(not dense for dense in kinds[2 * BLOCK :]) < 0.02 * len(kinds)


def test_a_hold_is_bounded() -> None:
    fallback = DenseFallback()
    while True:
        for _ in range(BLOCK):
            fallback.observe(1e9 if fallback._block.dense else 1.0)
        block = fallback.next()
        if block.steps > BLOCK:
            break
    assert block == Block(False, LONGEST_HOLD)


def test_a_block_travels_as_a_vector() -> None:
    for block in (Block(True, 7), Block(False, LONGEST_HOLD)):
        assert Block.from_vector(block.to_vector()) == block
