"""Our cost model: timelines by hand, bytes against the simulation, and how it grows."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hvdcomp.bench.shapes import MODELS
from hvdcomp.buckets import Layout
from hvdcomp.compressors import FP16
from hvdcomp.costmodel import Network, measure, paper
from hvdcomp.costmodel.cluster import HALVES, Cluster, Curve, fit, network_of
from hvdcomp.costmodel.collectives import allgather, broadcast, collective_s, ring
from hvdcomp.costmodel.engine import Engine
from hvdcomp.costmodel.measure import fit_cost
from hvdcomp.costmodel.model import Method, Workload, predict
from hvdcomp.costmodel.rates import Cost, Rates, UnknownRates, key_of, rates_of
from hvdcomp.costmodel.traffic import Operation, Work, traffic
from hvdcomp.simulation import World

BARE = {"cycle_s": 0.0, "tensor_s": 0.0, "memory_bandwidth": 1e30, "gamma": 1.0}
"""Horovod without costs of its own."""
NETWORK = Network(8e9, 1e-4)
FREE = Rates()
TWO = {"first": (1000, 1000), "second": (1000, 500)}
MIB = 2**20


def bare(workers: int = 4, network: Network = NETWORK, **changed) -> Cluster:
    return Cluster(workers, network, **BARE | changed)


def test_a_dense_step_sends_each_gradient_as_it_comes():
    workload = Workload(TWO, backward_s=0.2, rest_s=0.05)  # the second tensor's gradient is there after 0.1 s
    second, first = ring(2e6, 4, NETWORK), ring(4e6, 4, NETWORK)
    assert second < 0.1
    step = predict(workload, bare(), Method.of("dense"), {})
    assert step.step_s == pytest.approx(0.2 + first + 0.05)
    assert step.wait_s == pytest.approx(first)
    assert step.nbytes == 6_000_000
    assert predict(workload, bare(), Method.of("none"), {}) == step


def test_on_a_slow_link_the_last_gradient_waits_for_the_first():
    slow = Network(8e6)
    step = predict(Workload(TWO, 0.2), bare(network=slow), Method.of("dense"), {})
    assert step.step_s == pytest.approx(0.1 + ring(2e6, 4, slow) + ring(4e6, 4, slow))


def test_only_what_overlaps_with_communication_is_slowed_down():
    under_way = ring(2e6, 4, NETWORK)  # in which a third of the work is lost
    step = predict(Workload(TWO, 0.2), bare(gamma=1.5), Method.of("dense"), {})
    assert step.compute_s == pytest.approx(0.2 + under_way / 3)
    slow = predict(Workload(TWO, 0.2), bare(gamma=1.5, network=Network(8e6)), Method.of("dense"), {})
    assert slow.compute_s == pytest.approx(0.1 + 1.5 * 0.1)


def test_a_compressed_bucket_is_encoded_with_its_last_gradient_and_decoded_at_the_end():
    rates = {"powersgd:rank=2": Rates(Cost(element_s=1e-8), Cost(unit_s=1e-3))}
    step = predict(Workload(TWO, 0.2), bare(), Method.of("powersgd", {"rank": 2}), rates)
    p, q = ring(4 * 2 * 2000, 4, NETWORK), ring(4 * 2 * 1500, 4, NETWORK)
    assert step.encode_s == pytest.approx(1.5e6 * 1e-8)
    assert step.decode_s == pytest.approx(2e-3)
    assert step.step_s == pytest.approx(0.2 + 0.015 + p + q + 2e-3)


def test_buckets_overlap_with_the_backward_pass():
    shapes = {f"layer{i}": (1024, 1024) for i in range(8)}  # 4 MiB each, so two buckets of 6 and 2
    rates = {"signsgd": FREE}
    alone = allgather(2 * (2**17 + 8) + 64, 4, Network(8e6))
    step = predict(Workload(shapes, 80.0), bare(network=Network(8e6)), Method.of("signsgd"), rates)
    assert step.wait_s == pytest.approx(3 * alone, rel=0.01)  # the bucket of six is the last, and cannot hide


@pytest.mark.parametrize(
    ("name", "params", "tolerance"),
    [
        ("none", {}, 0),
        ("fp16", {}, 0),
        ("powersgd", {"rank": 2}, 0),
        ("signsgd", {}, 0),
        ("qsgd", {}, 0),
        ("randomk", {"cf": 10}, 0),
        ("artopk", {"cf": 10}, 0),
        ("topk", {"cf": 10}, 0.03),
        ("topk", {"cf": 100, "values": "int8"}, 0.03),
        ("oktopk", {"cf": 10}, 0.1),  # beside the code, how evenly elements divide is chance
    ],
)
def test_predicted_bytes_are_what_the_simulation_sends(name, params, tolerance):
    shapes = {"a.weight": (128, 64, 3, 3), "a.bias": (128,), "b.weight": (300, 500), "b.bias": (300,)}
    method = Method.of(name, params)
    world = World(4, name, exclude=Workload(shapes, 0.0).layout(method).excluded, **params)
    generator = torch.Generator().manual_seed(0)
    world.step([{k: torch.randn(s, generator=generator) for k, s in shapes.items()} for _ in range(4)])
    predicted = predict(Workload(shapes, 0.0), bare(), method, {key_of(name, params): FREE}).nbytes
    assert abs(predicted - world.nbytes) <= tolerance * world.nbytes


def test_decoding_grows_with_the_workers_where_an_allgather_brings_their_payloads():
    rates = {name: Rates(decode=Cost(byte_s=1e-9)) for name in ("topk", "powersgd:rank=4")}

    def decode_s(name: str, workers: int) -> float:
        return predict(Workload(TWO, 0.0), bare(workers), Method.of(name), rates).decode_s

    assert decode_s("topk", 64) == pytest.approx(32 * decode_s("topk", 2))
    assert decode_s("powersgd", 64) == pytest.approx(decode_s("powersgd", 2))


def test_an_allgather_has_a_latency_in_our_model_and_none_in_the_papers():
    slow = Network(8e12, latency=1.0)
    ours, papers = (
        predict(Workload(TWO, 0.0), bare(8, slow), Method.of("signsgd"), {"signsgd": FREE}, model).step_s
        for model in ("ours", "paper")
    )
    assert ours == pytest.approx(7, rel=1e-3)
    assert papers < 1e-3


def test_the_papers_model_is_the_papers():
    workload = Workload(MODELS["resnet50"](), paper.BACKWARD_S)
    cluster = Cluster(64, Network(1e10, 8e-6), gamma=paper.GAMMA)
    rates = {"powersgd:rank=4": Rates(Cost(element_s=paper.CODEC_S["powersgd", 4] / 25_502_912))}
    dense, powersgd = (
        predict(workload, cluster, Method.of(name), rates, "paper").step_s for name in ("dense", "powersgd")
    )
    assert 1e3 * dense == pytest.approx(165.0, abs=0.05)
    assert 1e3 * powersgd == pytest.approx(171.1, abs=0.05)


def test_one_worker_only_computes():
    assert predict(Workload(TWO, 0.2, 0.1), bare(1), Method.of("topk"), {}).step_s == pytest.approx(0.3)


def test_nodes_average_densely_first():
    rates = {"signsgd": FREE}
    cluster = bare(8, Network(8e6), per_node=4, inside=NETWORK)
    flat, nodes = (
        predict(Workload(TWO, 0.0), cluster, Method.of("signsgd", {}, hierarchical), rates) for hierarchical in (0, 1)
    )
    payload = sum(a * b // 8 for a, b in TWO.values())
    assert flat.step_s == pytest.approx(7 * payload / 1e6, rel=1e-3)
    inside = ring(6e6, 4, NETWORK) + broadcast(6e6, 4, NETWORK)
    assert nodes.step_s == pytest.approx(payload / 1e6 + inside, rel=1e-3)


def test_a_hierarchical_exchange_needs_nodes():
    with pytest.raises(ValueError, match="several nodes of several workers"):
        predict(Workload(TWO, 0.0), bare(), Method.of("signsgd", {}, True), {"signsgd": FREE})
    with pytest.raises(ValueError, match="6 workers cannot be 4 on every node"):
        bare(6, per_node=4)


# -- Horovod's engine


def test_operations_of_a_cycle_travel_together_and_are_copied():
    cluster = bare()
    engine = Engine(cycle_s=0.01, memory_bandwidth=1e9)
    pending = [engine.submit(at, cluster, Operation("allreduce", 1_000_000)) for at in (0.0, 0.004, 0.006)]
    ends = [engine.end_of(one) for one in pending]
    together = 0.005 + 2 * 2e6 / 1e9 + ring(2e6, 4, NETWORK)
    assert ends[:2] == [pytest.approx(together)] * 2
    assert ends[2] == pytest.approx(max(together, 0.011) + ring(1e6, 4, NETWORK))


def test_a_collective_makes_slow_progress_while_the_worker_computes():
    engine = Engine(0.0, 1e30, busy_factor=4.0)
    alone = ring(1e6, 4, NETWORK)
    engine.computes(0.0, 0.5 * alone)
    engine.computes(0.5 * alone, alone)
    engine.computes(1.5 * alone, 1.7 * alone)
    first, second = (engine.submit(at, bare(), Operation("allreduce", 10**6)) for at in (0.0, 0.25 * alone))
    # a quarter by then, half until 1.5, a twentieth until 1.7
    assert engine.end_of(first) == pytest.approx(1.9 * alone)
    assert engine.end_of(second) == pytest.approx(2.9 * alone)
    slow = {factor: bare(busy_factor=factor, network=Network(8e6)) for factor in (1.0, 4.0)}
    step, busy = (predict(Workload(TWO, 0.2), cluster, Method.of("dense"), {}).step_s for cluster in slow.values())
    assert busy > step


def test_a_fusion_buffer_has_a_limit_and_other_kinds_travel_by_themselves():
    cluster = bare()
    engine = Engine(0.0, 1e30)
    large = [engine.submit(0.0, cluster, Operation("allreduce", 100 * MIB)) for _ in range(2)]
    other = engine.submit(0.0, cluster, Operation("broadcast", 1000))
    assert engine.end_of(large[0]) == pytest.approx(ring(100 * MIB, 4, NETWORK))
    assert engine.end_of(large[1]) == pytest.approx(2 * ring(100 * MIB, 4, NETWORK))
    assert engine.end_of(other) - engine.end_of(large[1]) == pytest.approx(broadcast(1000, 4, NETWORK))


# -- what was measured


def test_a_line_is_found_again_and_made_a_network_of():
    for kind in ("allreduce", "allgather", "alltoall"):
        network = Network(3e9, 4e-5)
        sizes = [1e3, 1e5, 1e6, 1e7]
        intercept, slope = fit(sizes, [collective_s(kind, size, 5, network) for size in sizes])
        found = network_of(kind, 5, intercept, slope)
        assert found.bandwidth == pytest.approx(network.bandwidth)
        assert found.latency == pytest.approx(network.latency, rel=1e-6)


def test_small_messages_that_are_faster_than_the_link_do_not_raise_its_bandwidth():
    sizes = [4.0**power for power in range(5, 14)]
    network = Network(1e9, 2e-5)
    seconds = [ring(size, 2, network) / (20 if size < 1e6 else 1) for size in sizes]
    found = network_of("allreduce", 2, *fit(sizes, seconds))
    assert found.bandwidth == pytest.approx(1e9, rel=0.05)


def test_times_that_do_not_grow_stand_for_a_finite_bandwidth():
    intercept, slope = fit([1e3, 1e4, 1e5], [3e-3, 2e-3, 1e-3])
    assert slope == 0
    assert 1e13 < network_of("allreduce", 2, intercept, slope).bandwidth < float("inf")


def test_a_curve_is_linear_between_its_points_and_goes_on_beyond():
    curve = Curve(2, (100.0, 200.0, 400.0), (1.0, 2.0, 3.0))
    assert [curve.at(n) for n in (0, 100, 150, 300, 400, 800)] == [1, 1, 1.5, 2.5, 3, 5]


@pytest.mark.parametrize("points", [((1.0,), (1.0,)), ((2.0, 1.0), (1.0, 1.0)), ((1.0, 2.0), (0.0, 1.0))])
def test_a_curve_is_checked(points):
    with pytest.raises(ValueError, match="curve"):
        Curve(2, *points)


def test_halves_are_added_at_their_own_pace_and_travel_apart():
    curves = {"allreduce": Curve(2, (1e3, 1e7), (0.2, 0.4)), HALVES: Curve(2, (1e3, 1e7), (0.5, 0.9))}
    cluster = bare(2, curves=curves)
    numbers, halves = (Operation("allreduce", 10_000_000, halves) for halves in (False, True))
    assert [cluster.operation_s(operation) for operation in (numbers, halves)] == [0.4, 0.9]
    assert replace(cluster, curves={"allreduce": curves["allreduce"]}).operation_s(halves) == 0.4
    engine = Engine(cycle_s=0.0, memory_bandwidth=1e30)
    ends = [engine.end_of(engine.submit(0.0, cluster, operation)) for operation in (numbers, halves)]
    assert ends == pytest.approx([0.4, 1.3])
    layout = Layout(FP16())
    operations = {operation for bucket in traffic(layout, {"w": (30, 40)}, 2) for operation in bucket.phases[0]}
    assert operations == {Operation("allreduce", 2 * 1200, halves=True)}


def test_another_world_is_converted_by_the_formula():
    curve = Curve(2, (1e3, 1e7), (0.2, 0.4))
    cluster = bare(2, curves={"allreduce": curve})
    assert cluster.operation_s(Operation("allreduce", 10_000_000)) == 0.4
    assert cluster.operation_s(Operation("allgather", 10_000_000)) == allgather(1e7, 2, NETWORK)
    larger = replace(cluster, workers=16)
    factor = ring(1e7, 16, NETWORK) / ring(1e7, 2, NETWORK)
    assert larger.operation_s(Operation("allreduce", 10_000_000)) == pytest.approx(0.4 * factor)


def test_every_kind_of_method_is_measured(monkeypatch):
    monkeypatch.setattr(measure, "SIZES", (64, 256, 1024))
    methods = [("none", {}), ("fp16", {}), ("bf16", {}), ("topk", {}), ("topk", {"cf": 4}), ("powersgd", {"rank": 2})]
    found = measure.measure_rates([*methods, ("gradiveq", {}), ("signsgd", {})])
    assert set(found) == {"none", "fp16", "bf16", "topk", "powersgd:rank=2", "gradiveq", "signsgd"}
    work = Work(units=8, elements=8 * 1024, nbytes=1000)
    for key, rates in found.items():
        assert 0 < rates.encode.seconds(work) < 1, key
        assert 0 < rates.decode.seconds(work) < 1, key


def test_costs_are_found_again():
    cost = Cost(1e-4, 2e-9, 3e-9)
    works = [Work(1, n, b) for n, b in ((1000, 10), (1000, 4000), (10**6, 10), (10**6, 4 * 10**6))]
    found = fit_cost([(work, cost.seconds(work)) for work in works])
    assert found.unit_s == pytest.approx(cost.unit_s)
    assert found.element_s == pytest.approx(cost.element_s)
    assert found.byte_s == pytest.approx(cost.byte_s)


def test_rates_are_filed_without_a_factor_and_missing_ones_are_named():
    assert key_of("topk", {"cf": 10}) == key_of("topk", {"values": "fp32"}) == "topk"
    assert key_of("topk", {"values": "fp16", "cf": 3}) == "topk:values=fp16"
    assert key_of("powersgd", {}) == "powersgd:rank=4"
    with pytest.raises(UnknownRates, match=r"powersgd:rank=3.*hvdcomp probe --methods powersgd:rank=3\); known: topk"):
        rates_of({"topk": FREE}, "powersgd", {"rank": 3})


def test_the_documents_example_runs(capsys):
    text = (Path(__file__).parents[1] / "docs" / "costmodel.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(example, "docs/costmodel.md", "exec"), {})
    dense, topk = (float(line.rsplit(" ", 1)[1]) for line in capsys.readouterr().out.splitlines())
    assert dense > 5 * topk > 0
