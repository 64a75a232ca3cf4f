"""Plans: what is recommended where, in words, as JSON and as a configuration; questions that cannot be answered."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from test_probe import made as made_probe
from typer.testing import CliRunner

from hvdcomp.cli import app
from hvdcomp.config import ConfigError, load
from hvdcomp.costmodel import plan
from hvdcomp.costmodel.model import Method, Prediction
from hvdcomp.costmodel.plan import Row, choose, make_plan
from hvdcomp.costmodel.probe import Model
from hvdcomp.costmodel.question import Options, ask

V100S = Options(model="resnet50", workers=8, compute=0.122)
CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
QUICK = ["plan", "--model", "resnet50", "-np", "8", "--compute", "0.122"]


def planned(**changed) -> plan.Plan:
    return make_plan(ask(replace(V100S, **changed)))


def row(name: str, step_s: float, nbytes: int, low: float, drop_in: bool = True) -> Row:
    return Row(Method.of(name), Prediction(step_s, 0, 0, 0, 0, nbytes), 1 / step_s, (low, 9.0), drop_in)


def test_on_a_fast_network_nothing_is_compressed():
    found = planned(bandwidth="100gbit")
    assert found.best is None
    assert found.as_json()["recommendation"] == "none"
    assert found.as_json()["expected_speedup"] == 1
    assert 1 < found.headroom < 1.1
    assert found.reason.startswith("Do not compress: workers wait for the network during ")
    assert "even a network that took no time would make a step only 1.03 times faster" in found.reason


def test_on_a_slow_network_a_method_is_recommended():
    found = planned(bandwidth="1gbit")
    answer = found.as_json()
    assert answer["recommendation"] == {"name": "powersgd", "rank": 4}
    low, high = answer["interval"]
    assert 1 < low < answer["expected_speedup"] < high < answer["headroom"]
    assert found.reason.startswith("Compress with powersgd (rank=4): a step takes about 170 ms instead of 1.43 s")


def test_a_single_worker_never_compresses():
    assert planned(bandwidth="1gbit", workers=1).reason == "Do not compress: a single worker sends nothing."


def test_no_method_gains_more_than_a_free_network():
    for formulas in ("ours", "paper"):
        found = make_plan(ask(replace(V100S, bandwidth="3gbit")), formulas)
        assert all(1 / found.headroom <= row.speedup <= found.headroom * 1.001 or row.speedup < 1 for row in found.rows)
        assert max(row.speedup for row in found.rows) <= found.headroom


def test_every_method_is_predicted_on_a_cpu():
    found = planned(bandwidth="1gbit", device="cpu", workers=16)
    assert {row.method.name for row in found.rows} >= {"dense", "fp16", "topk", "oktopk", "powersgd", "qsgd", "signsgd"}
    assert {dict(row.method.params)["cf"] for row in found.rows if row.method.name == "topk"} == set(plan.CFS)
    assert not found.unknown


def test_nodes_are_offered_where_there_are_some():
    flat, nodes = (
        {(row.method.name, row.method.hierarchical) for row in found.rows}
        for found in (
            planned(bandwidth="1gbit"),
            planned(bandwidth="1gbit", per_node=4, inside="100gbit"),
        )
    )
    assert ("signsgd", True) in nodes
    assert not any(hierarchical for _, hierarchical in flat)


def test_of_methods_about_as_fast_the_mildest_is_taken():
    rows = [row("topk", 1.0, 10, 2.0), row("fp16", 1.04, 50, 2.0), row("bf16", 1.2, 99, 2.0)]
    assert choose(rows).method.name == "fp16"


def test_methods_that_may_not_pay_or_need_another_learning_rate_are_not_taken():
    rows = [row("signsgd", 0.5, 10, 2.0, drop_in=False), row("topk", 0.9, 10, 1.02)]
    assert choose(rows) is None


def test_an_unsure_gain_is_said_to_be_one():
    found = planned(bandwidth="8gbit")
    assert found.best is None
    assert found.reason.startswith("Do not compress yet: fp16 may make a step 1.")
    assert "`hvdcomp probe` on it would tell" in found.reason


def test_the_papers_formulas_can_be_asked_for():
    found = make_plan(
        ask(Options(model="resnet50", bandwidth="10gbit", latency=8e-6, workers=64, compute=0.122)), "paper"
    )
    steps = {str(row.method): 1e3 * row.prediction.step_s for row in found.rows}
    assert steps["dense"] == pytest.approx(165.0, abs=0.05)
    assert steps["powersgd (rank=4)"] == pytest.approx(171.1, abs=0.05)


# -- questions


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (Options(), "give a training configuration, or --model"),
        (Options(config=CONFIG, model="resnet50"), "one of the two"),
        (Options(model="resnet5", bandwidth="1gbit", workers=2), "no model 'resnet5'.*did you mean"),
        (Options(model="resnet50", workers=8), "give --bandwidth and --workers, or --probe"),
        (Options(model="vgg16", bandwidth="1gbit", workers=2), "give --compute SECONDS, or --probe"),
        (Options(model="resnet50", bandwidth="fast", workers=2), "bandwidth must be such as"),
        (Options(model="resnet50", bandwidth="none", workers=2), "without a limit nothing is to be gained"),
        (
            Options(model="resnet50", bandwidth="1gbit", workers=8, device="tpu"),
            "no figures of device 'tpu'; known: v100",
        ),
        (Options(model="resnet50", bandwidth="1gbit", workers=6, per_node=4), "6 workers cannot be 4 on every node"),
    ],
)
def test_what_cannot_be_answered_is_said(options, said):
    with pytest.raises(ConfigError, match=said):
        ask(options)


def written(tmp_path: Path, **changed) -> Path:
    path = tmp_path / "probe.json"
    path.write_text(made_probe(**changed).model_dump_json())
    return path


def test_a_probe_answers_for_the_cluster_and_for_larger_ones(tmp_path):
    path = written(tmp_path, workers=4)
    asked = ask(Options(model="resnet50", probe=path, compute=0.1))
    assert asked.cluster.workers == 4
    assert not asked.notes
    larger = ask(Options(model="resnet50", probe=path, compute=0.1, workers=32))
    assert any("measured with 4 workers, converted to 32" in note for note in larger.notes)
    other = ask(Options(model="resnet50", probe=path, compute=0.1, bandwidth="5gbit"))
    assert other.cluster.network.bandwidth == 5e9
    assert not other.cluster.curves
    assert (asked.cluster.busy_factor, other.cluster.busy_factor) == (made_probe().busy_factor, 1.0)
    of_a_gpu = ask(Options(model="resnet50", probe=path, compute=0.1, device="v100"))
    assert of_a_gpu.cluster.busy_factor == 1.0


def test_a_probe_of_one_worker_answers_for_a_network_that_is_given(tmp_path):
    path = tmp_path / "probe.json"
    path.write_text(made_probe().model_copy(update={"workers": 1, "collectives": {}, "cycle_s": 0}).model_dump_json())
    options = Options(model="resnet50", probe=path, compute=0.1, workers=8)
    with pytest.raises(ConfigError, match="give --bandwidth and --workers"):
        ask(options)
    found = ask(replace(options, bandwidth="1gbit"))
    assert (found.cluster.workers, found.cluster.network.bandwidth, found.cluster.curves) == (8, 1e9, {})
    assert found.cluster.cycle_s > 0
    assert make_plan(found).best is not None


def test_a_probed_model_says_its_own_time_and_no_others(tmp_path):
    from hvdcomp.bench.exchange import shapes_of

    model = Model(
        name="cnn",
        batch_size=16,
        shapes=shapes_of(str(CONFIG)),
        backward_s=0.2,
        rest_s=0.1,
        gamma=1.2,
        bucket_nbytes=[1],
    )
    path = written(tmp_path, model=model)
    asked = ask(Options(config=CONFIG, overrides=["data.batch_size=16"], probe=path))
    assert (asked.workload.backward_s, asked.workload.rest_s, asked.cluster.gamma) == (0.2, 0.1, 1.2)
    with pytest.raises(ConfigError, match="measured the steps of cnn, not of resnet50"):
        ask(Options(model="resnet50", probe=path))
    with pytest.raises(ConfigError, match="measured steps of 16 samples, the configuration has 99"):
        ask(Options(config=CONFIG, overrides=["data.batch_size=99"], probe=path))


# -- the command


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_speaks_json():
    answer = json.loads(run(*QUICK, "--bandwidth", "1gbit", "--json"))
    assert {"recommendation", "expected_speedup", "interval", "headroom", "reason"} <= set(answer)
    assert answer["recommendation"]["name"] == "powersgd"


def test_the_command_prints_headroom_table_and_reason():
    output = run(*QUICK, "--bandwidth", "1gbit")
    assert output.index("Headroom: 11.76 times") < output.index("recommended") < output.index("Compress with powersgd")


def test_a_recommended_configuration_loads(tmp_path):
    output = tmp_path / "planned.yaml"
    options = ["--bandwidth", "10mbit", "-np", "8", "--compute", "0.001", "--device", "cpu"]
    answer = json.loads(run("plan", str(CONFIG), *options, "-o", str(output), "--json"))
    assert answer["recommendation"]["name"] == load(output).compression.name
    assert load(output).model == load(CONFIG).model
    run(*QUICK, "--bandwidth", "100gbit", "-o", str(output))
    assert yaml.safe_load(output.read_text()) == {"compression": {"name": "none"}}


def test_a_broken_probe_is_one_line_and_exit_code_2(tmp_path):
    path = tmp_path / "probe.json"
    path.write_text("{")
    result = CliRunner().invoke(app, ["plan", "--model", "resnet50", "--probe", str(path)])
    assert result.exit_code == 2
    assert "hvdcomp: error:" in result.output
    assert "is no probe, or broken" in result.output


def test_a_configuration_that_cannot_be_written_is_one_line(tmp_path):
    output = tmp_path / "nowhere" / "planned.yaml"
    result = CliRunner().invoke(app, [*QUICK, "--bandwidth", "1gbit", "-o", str(output)])
    assert result.exit_code == 2
    assert f"--output {output} cannot be written" in " ".join(result.output.split())
