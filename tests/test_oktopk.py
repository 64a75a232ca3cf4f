"""Ok-Topk against the same algorithm in dense operations: what is accepted, what stays, who owns what, what travels."""

from __future__ import annotations

import math

import pytest
import torch
from in_process import ExchangeWorld
from torch import Tensor

from hvdcomp.compressors import OkTopK, TopK
from hvdcomp.compressors.oktopk import Deal
from hvdcomp.compressors.randomk import shared_seed
from hvdcomp.compressors.requests import Allgather, Alltoallv, Unit
from hvdcomp.compressors.sparsifier import kept_elements
from hvdcomp.errors import WireError
from hvdcomp.kernels import Collected
from hvdcomp.simulation import World
from hvdcomp.wire import VALUE_TYPES

WORKERS = range(1, 9)


def owners(numel: int, workers: int, step: int = 0, name: str = "w") -> Tensor:
    """The owner of each position, in Python's whole numbers."""
    factor, offset = (shared_seed(step, name, which) - 2**63 for which in ("factor", "offset"))
    turns = [(((p // workers * factor + offset + 2**63) % 2**64) - 2**63) >> 33 for p in range(numel)]
    return torch.tensor([(p + turn) % workers for p, turn in enumerate(turns)], dtype=torch.int64)


def direct(accs: list[Tensor], cf: float, step: int) -> tuple[Tensor, list[Tensor]]:
    """The mean that is applied and what each worker is left with."""
    numel, workers = accs[0].numel(), len(accs)
    k = kept_elements(numel, cf)
    chosen = [torch.zeros(numel, dtype=torch.bool).index_fill_(0, acc.abs().topk(k).indices, True) for acc in accs]
    total = torch.zeros_like(accs[0])
    for acc, mine in zip(accs, chosen, strict=True):
        total += torch.where(mine, acc, 0) / workers
    anyone = torch.stack(chosen).any(dim=0)
    owner = owners(numel, workers, step)
    accepted = torch.zeros(numel, dtype=torch.bool)
    for worker in range(workers):
        candidates = (anyone & (owner == worker)).nonzero().flatten()
        best = total[candidates].abs().topk(min(math.ceil(k / workers), candidates.numel())).indices
        accepted[candidates[best]] = True
    left = [torch.where(mine & accepted, 0, acc) for acc, mine in zip(accs, chosen, strict=True)]
    return torch.where(accepted, total, 0), left


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(("numel", "cf"), [(1000, 10), (999, 3), (50, 25), (5, 2), (1, 7), (40_000, 100)])
def test_a_step_is_what_dense_operations_make_of_it(numel: int, cf: float, workers: int) -> None:
    world = World(workers, "oktopk", cf=cf)
    left = [torch.zeros(numel)] * workers
    for step in range(4):
        grads = [torch.randn(numel) for _ in range(workers)]
        expected, left = direct([r + g for r, g in zip(left, grads, strict=True)], cf, step)
        for mean in world.step([{"w": gradient} for gradient in grads]):
            assert torch.equal(mean["w"], expected)
        assert all(torch.equal(world.residual(worker, "w"), left[worker]) for worker in range(workers))
        assert int((expected != 0).sum()) < kept_elements(numel, cf) + workers


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("values", VALUE_TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_applied_and_left_are_what_there_was_however_values_are_rounded(
    values: str, workers: int, dtype: torch.dtype
) -> None:
    """Within the rounding of the sums themselves: what int8 takes off a mean is in its owner's residual."""
    world = World(workers, "oktopk", cf=5, values=values)
    precision = 1e-13 if dtype == torch.float64 and values == "fp32" else 4e-6
    for step in range(4):
        grads = [{"w": 10 * torch.randn(40, 31, dtype=dtype), "e": torch.zeros(0)} for _ in range(workers)]
        before = [world.residual(w, "w") if step else torch.zeros(40, 31, dtype=dtype) for w in range(workers)]
        means = world.step(grads)
        assert all(torch.equal(mean["w"], means[0]["w"]) for mean in means)
        acc = torch.stack([b + g["w"] for b, g in zip(before, grads, strict=True)]).mean(0)
        left = torch.stack([world.residual(w, "w") for w in range(workers)]).mean(0)
        assert torch.allclose(means[0]["w"] + left, acc, rtol=0, atol=precision)
        exact = direct([b.view(-1) + g["w"].view(-1) for b, g in zip(before, grads, strict=True)], 5, step)[0]
        rounding = {"fp32": 0.0, "fp16": 2e-3, "bf16": 2e-2, "int8": 2e-2}[values] * float(exact.abs().max())
        common = (exact != 0) & (means[0]["w"].view(-1) != 0)
        assert torch.allclose(means[0]["w"].view(-1)[common], exact[common], rtol=0, atol=rounding + 1e-6)
        assert int(common.sum()) > 0.9 * int((exact != 0).sum())


def test_what_was_rejected_stays_with_those_who_sent_it_and_comes_next() -> None:
    """k = 2 of 8 and one position a worker: the smaller of two sums of one owner has to wait."""
    first, second = (owners(8, 2) == 0).nonzero().flatten()[:2].tolist()
    large, small = torch.zeros(8).index_fill_(0, torch.tensor(first), 4), torch.zeros(8)
    small[second] = 1
    world = World(2, "oktopk", cf=4)
    assert torch.equal(world.step([{"w": large + small}, {"w": large - 3 * small}])[1]["w"], large)
    assert torch.equal(world.residual(0, "w"), small)
    assert torch.equal(world.residual(1, "w"), -3 * small)
    assert torch.equal(world.step([{"w": 0 * large}] * 2)[0]["w"], -small)
    assert not any(world.residual(worker, "w").any() for worker in range(2))


def test_only_those_who_sent_an_accepted_element_lose_it() -> None:
    world = World(2, "oktopk", cf=4)
    grads = [torch.tensor([5.0, 1.0, 0.0, 0.0]), torch.tensor([2.0, 0.0, 0.0, 9.0])]
    assert world.step([{"w": gradient} for gradient in grads])[0]["w"][3] in (0, 4.5)
    sent, accepted = (0, 3), [bool(world.residual(w, "w")[p] == 0) for w, p in enumerate((0, 3))]
    assert any(accepted)
    for worker, position in enumerate(sent):
        expected = grads[worker].clone()
        expected[position] *= not accepted[worker]
        assert torch.equal(world.residual(worker, "w"), expected)


def test_without_feedback_what_is_accepted_is_sent_as_it_is_and_nothing_stays() -> None:
    grads = [{"w": torch.randn(600)} for _ in range(3)]
    without = World(3, "oktopk", cf=10, error_feedback=False)
    assert torch.equal(without.step(grads)[2]["w"], World(3, "oktopk", cf=10).step(grads)[0]["w"])
    assert torch.equal(without.step(grads)[0]["w"], direct([g["w"] for g in grads], 10, step=1)[0])
    assert without.residual(0, "w").count_nonzero() == 0


# -- who owns what


@pytest.mark.parametrize("workers", [*WORKERS, 30])
@pytest.mark.parametrize("numel", [1, 2, 7, 24, 1001])
def test_every_position_has_an_owner_who_finds_it_again(numel: int, workers: int) -> None:
    deal = Deal.of(Unit("w", torch.Size([numel]), workers=workers))
    parts = deal.split(Collected(torch.arange(numel, dtype=torch.int32), torch.arange(float(numel))))
    assert len(parts) == workers
    found, values = deal.joined(parts)
    assert found.tolist() == values.tolist()
    for owner, part in enumerate(parts):
        assert part.positions.tolist() == sorted(set(part.positions.tolist()))
        assert all(group < deal.groups for group in part.positions.tolist())
        assert part.values.numel() in (numel // workers, numel // workers + 1)
        assert part.values.long().tolist() == (owners(numel, workers) == owner).nonzero().flatten().tolist()


def test_owners_change_with_the_step_and_the_name() -> None:
    dealt = [owners(1000, 4, step, name) for step, name in ((0, "w"), (1, "w"), (0, "v"))]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert 150 < int((dealt[a] == dealt[b]).sum()) < 350


def test_a_position_beyond_the_tensor_is_refused() -> None:
    deal = Deal.of(Unit("w", torch.Size([5]), workers=4))
    missing = [owner for owner in range(4) if owner != owners(5, 4)[4]]
    for owner in missing:
        parts = [Collected(torch.arange(2 if owner == other else 1), torch.zeros(1)) for other in range(4)]
        with pytest.raises(WireError, match=rf"owner {owner} has no position in the last group of 5 elements"):
            deal.joined(parts)


SUPPORTS = {
    "random": lambda n, k: torch.randperm(n)[:k],
    "the first": lambda n, k: torch.arange(k),
    "a column": lambda n, k: torch.arange(k) * (n // k),
    "every 2nd": lambda n, k: torch.arange(k) * 2,
    "every 840th": lambda n, k: torch.arange(k) * 840 % n,
    "blocks": lambda n, k: torch.arange(k) // 7 * 800 + torch.arange(k) % 7,
}


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 6, 7, 8, 64])
@pytest.mark.parametrize("support", SUPPORTS.values(), ids=SUPPORTS)
def test_an_owner_gets_about_k_whatever_the_support(support, workers: int) -> None:  # type: ignore[no-untyped-def]
    """All workers select the same, so that an owner gets an element N times or never; a row is divided evenly."""
    n, k = 1_680_000, 2000
    positions = support(n, k).unique().to(torch.int32)
    row = bool((positions.diff() == 1).all())
    for step in range(5):
        deal = Deal.of(Unit("w", torch.Size([n]), workers=workers, step=step))
        most = workers * max(part.positions.numel() for part in deal.split(Collected(positions, positions.float())))
        k = positions.numel()
        assert most <= k + (2 * workers if row else 4.5 * math.sqrt(workers * k)), step


# -- what travels


@pytest.mark.parametrize("cf", [10, 100, 1000])
@pytest.mark.parametrize("workers", range(2, 9))
@pytest.mark.parametrize("alike", [False, True])
def test_a_worker_moves_at_most_6_k_numbers_in_a_world_of_any_size(alike: bool, workers: int, cf: float) -> None:
    numel = 200_000
    shared = torch.randn(numel)
    grads = [{"w": shared if alike else torch.randn(numel)} for _ in range(workers)]
    world = ExchangeWorld(workers, OkTopK(cf=cf), grads[0])
    headers = 3 * workers * (24 + 32 + 2 * 8)  # of payloads and frames, with padding
    for _ in range(3):
        world.step(grads)
        for record in world.records:
            assert record.bytes_sent + record.bytes_received <= 4 * 6 * numel / cf + headers


def test_what_arrives_does_not_grow_with_the_workers_as_that_of_topk_does() -> None:
    arrived: dict[str, list[float]] = {}
    for compressor in (OkTopK(cf=50), TopK(cf=50)):
        for workers in (2, 4, 8):
            grads = [{"w": torch.randn(100_000)} for _ in range(workers)]
            world = ExchangeWorld(workers, compressor, grads[0])
            world.step(grads)
            arrived.setdefault(compressor.name, []).append(max(record.bytes_received for record in world.records))
    two, four, eight = arrived["topk"]
    assert (four / two, eight / two) == (pytest.approx(3, rel=0.01), pytest.approx(7, rel=0.01))
    two, four, eight = arrived["oktopk"]
    assert (four / two, eight / two) == (pytest.approx(3 / 2, rel=0.1), pytest.approx(7 / 4, rel=0.15))


def test_an_alltoall_counts_what_others_sent() -> None:
    """One worker alone receives nothing; of two, each what the other has for it."""
    grads = [{"w": torch.randn(1000)} for _ in range(2)]
    alone = ExchangeWorld(1, OkTopK(cf=10), grads[0], alone=True)
    alone.step(grads[:1])
    assert alone.records[0].bytes_received == 0
    both = ExchangeWorld(2, OkTopK(cf=10), grads[0])
    both.step(grads)
    assert both.records[0].exchanges == 2
    for record in both.records:
        assert 0.3 < record.bytes_received / record.bytes_sent < 0.8  # half of an alltoall, one of two parts gathered


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("values", VALUE_TYPES)
@pytest.mark.parametrize("cf", [2, 7, 40])
def test_requests_bound_what_is_handed_over_however_it_is_divided(cf: float, values: str, workers: int) -> None:
    compressor = OkTopK(cf=cf, values=values)
    acc = torch.zeros(workers * 40)
    mine = (owners(acc.numel(), workers) == 0).nonzero().flatten()
    for values_of in (lambda: torch.randn(acc.numel()), lambda: acc.index_fill(0, mine, 1.0) + 0.1 * torch.rand(1)):
        generator = compressor.rounds(values_of(), Unit("w", acc.shape, workers=workers))
        first = next(generator)
        assert isinstance(first, Alltoallv)
        assert len(first.payloads) == workers
        second = generator.send([first.payloads[0]] * workers)
        assert isinstance(second, Allgather)
        handed = [sum(payload.numel() for payload in first.payloads), second.payload.numel()]
        stated = compressor.requests(acc.shape, workers)
        assert [(v.phase, v.kind) for v in stated] == [(0, "alltoall"), (1, "allgather")]
        assert all(nbytes <= volume.nbytes for nbytes, volume in zip(handed, stated, strict=True))


def test_many_tensors_travel_as_one_alltoall_and_one_allgather() -> None:
    grads = {f"l{i}": torch.randn(10, 12) for i in range(25)} | {"e": torch.zeros(0, 3)}
    world = ExchangeWorld(3, OkTopK(cf=10), grads)
    world.step([grads] * 3)
    assert world.records[0].exchanges == 3  # what is empty goes by allreduce


def test_the_type_of_values_is_checked() -> None:
    with pytest.raises(ValueError, match="unknown type of values 'fp8'"):
        OkTopK(values="fp8")
