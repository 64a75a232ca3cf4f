"""What users may give as `compression=`, as far as no Horovod is needed."""

from __future__ import annotations

import pytest

from hvdcomp.compressors import OkTopK, TopK
from hvdcomp.compressors.requests import Volume
from hvdcomp.plugin import AUTO, as_compressor, automatic, volume


@pytest.mark.parametrize("workers", [1, 2])
def test_auto_is_top_k_with_few_workers(workers: int) -> None:
    assert automatic(workers) == as_compressor(AUTO, workers) == TopK(cf=100)


@pytest.mark.parametrize("workers", [4, 8, 64, 1024])
def test_auto_is_the_exchange_that_does_not_grow_with_many_workers(workers: int) -> None:
    assert automatic(workers) == OkTopK(cf=100)


def test_volumes_of_collectives_round_a_ring() -> None:
    kinds = ("allreduce", "allgather", "alltoall", "broadcast")
    assert [volume([Volume(0, kind, 1000)], 4) for kind in kinds] == [3000, 6000, 1500, 2000]
    assert volume([Volume(0, "allgather", 10), Volume(1, "allreduce", 10)], 2) == 20 + 20


def test_volume_of_top_k_grows_with_workers_and_that_of_ok_topk_does_not() -> None:
    def moved(method: TopK | OkTopK, workers: int) -> float:
        return volume(method.requests((1024, 1024), workers), workers)

    assert moved(TopK(cf=100), 1024) == pytest.approx(1023 * moved(TopK(cf=100), 2))
    assert moved(OkTopK(cf=100), 1024) < 3 * moved(OkTopK(cf=100), 2)
