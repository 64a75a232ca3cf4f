"""The cost model's formulas: the paper's, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from hvdcomp.bench.shapes import MODELS
from hvdcomp.compressors import create
from hvdcomp.costmodel import Network, paper
from hvdcomp.costmodel.collectives import allgather, alltoall, broadcast, collective_s, parameter_server, ring, tree

RESNET50 = MODELS["resnet50"]()
MATRICES = [shape for shape in RESNET50.values() if len(shape) > 1]


def powersgd_volumes(rank: int = 4) -> list:
    return [volume for shape in MATRICES for volume in create("powersgd", rank=rank).requests(shape, 64)]


@pytest.mark.parametrize(
    ("formula", "nbytes", "workers", "network", "seconds"),
    [
        (ring, 1e8, 4, Network(1e10), 0.12),
        (ring, 1e8, 64, Network(1e10, 1e-5), 0.15876),
        (ring, 1e8, 16, Network(1e10, 5e-5), 0.1515),
        (tree, 1e8, 16, Network(1e10, 5e-5), 0.6404),
        (parameter_server, 1e8, 16, Network(1e10, 5e-5), 2.4001),
        (allgather, 1e6, 8, Network(8e9, 1e-4), 7 * 1e-4 + 7e-3),
        (alltoall, 8e6, 8, Network(8e9, 1e-4), 7 * 1e-4 + 7e-3),
        (broadcast, 1e6, 5, Network(8e9, 1e-4), 3 * 1e-4 + 1e-3),
    ],
)
def test_collectives_by_hand(formula, nbytes, workers, network, seconds):
    assert formula(nbytes, workers, network) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("formula", [ring, tree, parameter_server, allgather, alltoall, broadcast])
def test_a_world_of_one_sends_nothing(formula):
    assert formula(1e9, 1, Network(1e9, 1e-3)) == 0


@pytest.mark.parametrize(
    ("kind", "formula"),
    [("allreduce", ring), ("allgather", allgather), ("alltoall", alltoall), ("broadcast", broadcast)],
)
def test_collectives_by_the_names_that_compressors_use(kind, formula):
    network = Network(3e9, 2e-5)
    assert collective_s(kind, 12345, 6, network) == formula(12345, 6, network)


def test_an_unknown_collective_is_named():
    with pytest.raises(ValueError, match=r"unknown collective 'gather'.*allgather"):
        collective_s("gather", 1, 2, Network(1e9))


@pytest.mark.parametrize("network", [{"bandwidth": 0}, {"bandwidth": -1}, {"bandwidth": 1e9, "latency": -1e-9}])
def test_a_network_is_checked(network):
    with pytest.raises(ValueError, match="must be"):
        Network(**network)


@pytest.mark.parametrize(("nbytes", "seconds"), [(1e8, 0.135), (1.1e8, 0.132)])
def test_the_papers_dense_step_is_not_monotone_in_size(nbytes, seconds):
    step_s = paper.dense_step_s(nbytes, 4, Network(1e10), 0.1, bucket_nbytes=25e6, gamma=1.05)
    assert step_s == pytest.approx(seconds, rel=1e-12)


def test_resnet50_is_the_papers():
    assert sum(4 * shape.numel() for shape in RESNET50.values()) == 102_228_128
    by_phase = [sum(v.nbytes for v in powersgd_volumes() if v.phase == phase) for phase in (0, 1)]
    assert by_phase == [440_960, 878_896]


@pytest.mark.parametrize(("bandwidth", "dense_ms", "powersgd_ms"), [(1e9, 1614.1, 189.8), (1e10, 165.0, 171.1)])
def test_the_papers_steps_of_resnet50(bandwidth, dense_ms, powersgd_ms):
    network = Network(bandwidth, 8e-6)
    dense_s = paper.dense_step_s(102_228_128, 64, network, paper.BACKWARD_S)
    powersgd_s = paper.compressed_step_s(
        powersgd_volumes(), 64, network, paper.BACKWARD_S, paper.CODEC_S["powersgd", 4]
    )
    assert 1e3 * dense_s == pytest.approx(dense_ms, abs=0.05)
    assert 1e3 * powersgd_s == pytest.approx(powersgd_ms, abs=0.05)


def test_the_papers_allgather_has_no_latency_and_its_allreduce_has():
    shape = torch.Size([1000])
    sign, dense = create("signsgd").requests(shape, 8), create("none").requests(shape, 8)
    slow = Network(8e9, latency=1.0)
    assert paper.communication_s(sign, 8, slow) == pytest.approx(7 * sign[0].nbytes / 1e9)
    assert paper.communication_s(dense, 8, slow) == pytest.approx(14 + 2 * 7 / 8 * 4000 / 1e9)


def test_one_worker_takes_its_backward_pass_alone():
    assert paper.dense_step_s(1e8, 1, Network(1e9), 0.1) == 0.1
    assert paper.compressed_step_s(powersgd_volumes(), 1, Network(1e9), 0.1, 0.045) == 0.1


def test_phases_do_not_travel_together():
    volumes = powersgd_volumes()
    network = Network(1e9, 1e-3)
    p, q = (sum(v.nbytes for v in volumes if v.phase == phase) for phase in (0, 1))
    expected = ring(p, 16, network) + ring(q, 16, network)
    assert paper.communication_s(volumes, 16, network) == pytest.approx(expected)
    assert math.isclose(expected - ring(p + q, 16, network), 30e-3)
