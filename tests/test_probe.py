"""Probes: files that are none, lines that are found again, workers that are real."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from training_runs import hvdcomp
from typer.testing import CliRunner

from hvdcomp.bench.exchange import shapes_of
from hvdcomp.cli import app
from hvdcomp.config import ConfigError, load
from hvdcomp.costmodel import Network, probe, probing
from hvdcomp.costmodel.collectives import collective_s
from hvdcomp.costmodel.expectation import expected_step_s
from hvdcomp.costmodel.probe import Codec, Collective, Measured, Model, Probe
from hvdcomp.costmodel.probing import summary
from hvdcomp.costmodel.rates import Cost, Rates
from hvdcomp.costmodel.traffic import Operation
from hvdcomp.training.parts import build_model, resolve

SIZES = [4**power for power in range(5, 13)]
NETWORK = Network(1e9, 5e-5)
RATES = {
    "none": Rates(),
    "fp16": Rates(Cost(1e-5, 1e-9, 0), Cost(1e-5, 1e-9, 0)),
    "topk": Rates(Cost(1e-4, 1e-9, 2e-9), Cost(1e-4, 3e-10, 2e-9)),
    "powersgd:rank=4": Rates(Cost(1e-4, 2e-9, 5e-9), Cost(5e-5, 5e-10, 1e-9)),
}


def line(kind: str, workers: int, network: Network) -> Collective:
    exactly = Measured(value=network.bandwidth, low=network.bandwidth, high=network.bandwidth)
    latency = Measured(value=network.latency, low=network.latency, high=network.latency)
    seconds = [collective_s(kind, size, workers, network) for size in SIZES]
    return Collective(nbytes=SIZES, seconds=seconds, bandwidth=exactly, latency=latency)


def made(workers: int = 4, network: Network = NETWORK, model: Model | None = None) -> Probe:
    return Probe(
        hvdcomp_probe=probe.FORMAT,
        workers=workers,
        per_node=1,
        host={"machine": "x86_64"},
        collectives={kind: line(kind, workers, network) for kind in ("allreduce", "allgather")},
        cycle_s=1e-3,
        tensor_s=3e-5,
        busy_factor=1.5,
        memory_bandwidth=1e10,
        slowest_pair=None,
        rates={key: Codec.of(rates) for key, rates in RATES.items()},
        model=model,
    )


def written(folder: Path, **changed) -> Path:
    path = folder / "probe.json"
    path.write_text(json.dumps(json.loads(made().model_dump_json()) | changed))
    return path


def test_a_probe_survives_its_file(tmp_path):
    assert probe.load(written(tmp_path)) == made()
    assert made().codec_rates() == RATES


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no probe, or broken"),
        ('{"hvdcomp_probe": 1,', "is no probe, or broken"),
        ("[1, 2]", "has no field hvdcomp_probe"),
        ('{"bandwidth": 1}', "has no field hvdcomp_probe"),
    ],
)
def test_a_broken_file_is_refused(tmp_path, text, said):
    path = tmp_path / "probe.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        probe.load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no file .*probe.json: `hvdcomp probe -np N -o"):
        probe.load(tmp_path / "probe.json")


def test_another_version_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="probe of format 99, this version of hvdcomp reads format 2: measure again"):
        probe.load(written(tmp_path, hvdcomp_probe=99))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"cycle_s": "soon"}, "broken probe: cycle_s"),
        ({"memory_bandwidth": 0}, "broken probe: memory_bandwidth"),
        ({"extra": 1}, "broken probe: extra"),
        ({"rates": {"topk": {"encode": [1, 2], "decode": [1, 2, 3]}}}, r"broken probe: rates.topk.encode"),
    ],
)
def test_a_field_that_cannot_be_is_named(tmp_path, changed, said):
    with pytest.raises(ConfigError, match=said):
        probe.load(written(tmp_path, **changed))


def test_another_world_is_converted_and_that_is_said():
    measured = made(workers=4)
    assert measured.conversion(4) is None
    assert "measured with 4 workers, converted to 16" in str(measured.conversion(16))
    here, there = measured.cluster(), measured.cluster(16)
    for kind, nbytes in itertools.product(("allreduce", "allgather"), (1024, 2**20)):
        assert here.operation_s(Operation(kind, nbytes)) == pytest.approx(collective_s(kind, nbytes, 4, NETWORK))
        assert there.operation_s(Operation(kind, nbytes)) == pytest.approx(collective_s(kind, nbytes, 16, NETWORK))


def test_a_world_of_one_has_no_network():
    alone = made().model_copy(update={"workers": 1, "collectives": {}})
    with pytest.raises(ConfigError, match="one worker, which has no network: give --bandwidth"):
        alone.cluster()


def test_a_line_is_found_in_noisy_times_with_an_interval_around_it():
    network, cycle_s = Network(2e9, 1e-4), 1e-3
    draw = np.random.default_rng(1)
    times = {
        size: [cycle_s + collective_s("allreduce", size, 4, network) * draw.lognormal(0, 0.05) for _ in range(9)]
        for size in SIZES
    }
    found = probe.fitted("allreduce", 4, times, cycle_s, least_s=1e-5)
    assert found.bandwidth.low <= network.bandwidth <= found.bandwidth.high
    assert found.latency.low <= network.latency <= found.latency.high
    assert found.bandwidth.spread < 0.1
    assert found.seconds[-1] == pytest.approx(np.median(times[SIZES[-1]]) - cycle_s)


def test_what_was_found_is_shown_with_units():
    shown = {row["measured"]: row for row in summary(made())}
    assert shown["allreduce: bandwidth"]["value"] == "1"
    assert shown["allreduce: latency of a message"]["value"] == "50"
    assert shown["Horovod's cycle"]["unit"] == "ms"


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
def test_every_pair_meets_once_and_no_worker_twice_in_a_round(size):
    pytest.importorskip("horovod.torch")
    from hvdcomp.costmodel.probe_worker import rounds_of_pairs

    rounds = rounds_of_pairs(size)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(itertools.combinations(range(size), 2))
    for pairs in rounds:
        assert len({worker for pair in pairs for worker in pair}) == 2 * len(pairs)


@pytest.mark.ranks
def test_a_real_world_is_probed(tmp_path):
    from hvdcomp.costmodel.probing import measure
    from hvdcomp.training.launcher import Job

    config = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
    output = tmp_path / "probe.json"
    found = measure(
        Job([], 3), [("none", {}), ("topk", {}), ("powersgd", {"rank": 2})], (config, ["data.batch_size=8"]), output
    )
    assert found == probe.load(output)
    assert (found.workers, found.per_node) == (3, 3)
    assert found.slowest_pair is not None
    assert set(found.rates) == {"none", "topk", "powersgd:rank=2"}
    assert found.rates["topk"].rates().encode.element_s > 0
    assert found.model is not None
    assert found.model.backward_s > 0
    assert sum(found.model.bucket_nbytes) == found.model.workload().nbytes
    assert 1e6 < found.network().bandwidth < 1e13
    assert 1e-5 < found.cycle_s + found.collectives["allreduce"].latency.value < 1


def test_a_model_that_there_is_not_is_told_before_any_process_starts(monkeypatch):
    monkeypatch.setattr(probing, "run", lambda job, progress, output: pytest.fail("a process was started"))
    result = CliRunner().invoke(app, ["probe", str(QUICKSTART), "model=cnnn"])
    assert result.exit_code == 2
    assert "unknown model 'cnnn' (did you mean 'cnn'?)" in " ".join(result.output.split())


def test_an_interrupt_is_no_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(probing, "run", lambda job, progress, output: 130)
    result = CliRunner().invoke(app, ["probe", "-o", str(tmp_path / "probe.json")])
    assert (result.exit_code, result.output.strip()) == (130, "hvdcomp: interrupted")


# -- runs

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"


def probe_of_quickstart(folder: Path) -> Path:
    path = folder / "probe.json"
    model = Model(
        name="cnn", batch_size=32, shapes=shapes_of(str(QUICKSTART)), backward_s=0.2, rest_s=0.1, gamma=1.0,
        bucket_nbytes=[1],
    )  # fmt: skip
    path.write_text(made(model=model).model_dump_json())
    return path


def expected_s(path: Path, workers: int, *overrides: str) -> float:
    config = resolve(load(QUICKSTART, [f"probe={path}", "schedule=static", "data.batch_size=32", *overrides]), workers)
    return expected_step_s(config, shapes_of(str(QUICKSTART)), workers)


def test_a_run_is_foretold_as_a_plan_would(tmp_path):
    path = probe_of_quickstart(tmp_path)
    alone, two = (expected_s(path, workers, "compression=topk", "compression.cf=10") for workers in (1, 2))
    assert alone == pytest.approx(0.3)
    assert two > 0.3
    assert expected_s(path, 2, "compression=none") != two


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.batch_size=8"], "measured steps of 32 samples, this run has 8"),
        (["model.channels=8"], "with other tensors than this model's"),
        (["compression=qsgd"], "what qsgd costs on this device is not known"),
    ],
)
def test_a_probe_of_another_run_is_refused(tmp_path, overrides, said):
    path = probe_of_quickstart(tmp_path)
    config = resolve(load(QUICKSTART, [f"probe={path}", "schedule=static", "data.batch_size=32", *overrides]), 2)
    shapes = {name: list(p.shape) for name, p in build_model(config).named_parameters()}
    with pytest.raises(ConfigError, match=said):
        expected_step_s(config, shapes, 2)


def test_a_run_says_how_well_it_was_foretold(tmp_path):
    path = probe_of_quickstart(tmp_path)
    folder = tmp_path / "run"
    settings = ["steps=3", "schedule=static", "data.batch_size=32", f"probe={path}", f"run_dir={folder}"]
    done = hvdcomp("train", str(QUICKSTART), *settings)
    assert done.code == 0, done.err
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["expected_step_s"] == pytest.approx(0.3)
    assert "300 ms a step, measured" in done.out
