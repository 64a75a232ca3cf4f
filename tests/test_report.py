"""`hvdcomp report` and its figures: what they show of runs that are finished, interrupted, broken, or very long."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdcomp.config import ConfigError
from hvdcomp.report.figures import figures, time_split
from hvdcomp.report.plots import CSS_COLOURS, Line, binned, curves, distribution
from hvdcomp.report.trace import Metrics, load_trace

LAYERS = {"body.weight": [100.0, 1000.0], "body.bias": [4.0, 4.0]}


def row(step: int, **changed: Any) -> dict[str, Any]:
    """A line of metrics.jsonl as `hvdcomp train` writes it under GraVAC."""
    times = dict.fromkeys(("compute_s", "encode_s", "decode_s", "wait_s", "decide_s"), 0.002)
    times |= {"compress_s": 0.004, "exchange_s": 0.003, "iteration_s": 0.01}
    sent = {"cf": 10.0, "decision": 0, "levels": [10.0, 100.0], "gains": [0.8, 0.2], "skipped": False}
    nbytes = {"bytes_sent": 110, "bytes_dense": 1004, "bytes_received": 110}
    return {"step": step, "epoch": 0, "loss": 2.0 / step, "lr": 0.1, **sent, **nbytes, **times, **changed}


def write_run(folder: Path, rows: list[dict[str, Any]], *, summary: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
    (folder / "config.yaml").write_text("compression: {name: topk, cf: 10.0}\nschedule: {name: gravac, epsilon: 0.3}\n")
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.fixture
def gravac(tmp_path: Path) -> Path:
    """Forty steps of which the tenth to the nineteenth are sent at CF 100, evaluated every tenth."""
    rows = []
    for step in range(1, 41):
        searching = {"cf": 100.0, "decision": 1} if 10 <= step < 20 else {}
        levels = {"levels": [10.0, 100.0] if step < 20 else [10.0, 1000.0]}
        result = {"accuracy": step / 50, "test_loss": 1 / step, "layer_bytes": LAYERS} if step % 10 == 0 else {}
        rows.append(row(step, **searching, **levels, **result))
    return write_run(tmp_path / "gravac", rows, summary={"accuracy": 0.8, "dense_exchange_s": 0.005, "workers": 2})


# -- reading a run


def test_columns_of_all_steps(gravac: Path) -> None:
    run = load_trace(gravac)
    assert run.metrics.column("step").tolist() == list(range(1, 41))
    assert run.metrics.column("levels_1").tolist() == [100.0] * 19 + [1000.0] * 21
    assert np.isfinite(run.metrics.column("accuracy")).sum() == 4
    assert run.steps_at() == {10.0: 30, 100.0: 10}
    assert (run.method, run.score, run.notes) == ("topk (cf=10.0), gravac (epsilon=0.3)", "accuracy", ())
    assert run.metrics.layer_bytes == LAYERS


def test_metrics_follow_a_file_that_grows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first, second = (json.dumps(row(step)) + "\n" for step in (1, 2))
    path.write_text(first + second[:30])
    metrics = Metrics(path)
    assert metrics.update() == 1
    assert metrics.update() == 0
    with path.open("a") as more:
        more.write(second[30:] + "half of a fl\n" + json.dumps(row(3)) + "\n")
    assert metrics.update() == 2
    assert (metrics.column("step").tolist(), metrics.broken) == ([1.0, 2.0, 3.0], 1)
    path.write_text(first)  # resumed from the first step
    assert metrics.update() == 1
    assert (metrics.column("step").tolist(), metrics.broken) == ([1.0], 0)


def test_a_partial_run_says_what_is_missing(gravac: Path) -> None:
    (gravac / "summary.json").unlink()
    (gravac / "config.yaml").write_text("a: [\n")
    with (gravac / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 41, "lo')
    run = load_trace(gravac)
    assert len(run.metrics) == 40
    assert run.notes == ("config.yaml cannot be read", "not finished: step 40 is the last that was written")
    assert run.method == "not known"
    assert figures({"a": run})


def test_what_is_no_run_is_said_clearly(gravac: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        load_trace(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"holds no metrics.jsonl; runs are in it, such as .*gravac"):
        load_trace(tmp_path)
    (gravac / "metrics.jsonl").write_text("not json\n")
    with pytest.raises(ConfigError, match="holds no step yet"):
        load_trace(gravac)


# -- figures


def test_each_figure_asks_a_question(gravac: Path) -> None:
    plots = figures({"one": load_trace(gravac)})
    costs = ("steps", "bytes", "time")
    names = [*(f"accuracy-{c}" for c in costs), *(f"loss-{c}" for c in costs)]
    assert [plot.name for plot in plots] == [*names, "cf", "gain", "distribution", "time-split", "layers"]
    assert all(plot.title.endswith("?") for plot in plots)
    said = {plot.name: plot.description for plot in plots}
    assert said["accuracy-steps"] == "accuracy, held out over step. one: from 0.2 to 0.8 at 40."
    assert said["distribution"] == "Distribution of steps over CFs. one: 75% of 40 steps at CF 10."
    assert said["layers"].endswith("body.weight: dense 1 kB, one 100 B; body.bias: dense 4 B, one 4 B.")


def test_runs_share_the_axes(gravac: Path, tmp_path: Path) -> None:
    dense = write_run(tmp_path / "dense", [row(step, cf=1.0, gains=None, levels=None) for step in range(1, 4)])
    plots = {plot.name: plot for plot in figures({"gravac": load_trace(gravac), "dense": load_trace(dense)})}
    for name, runs in (("loss-bytes", ["gravac", "dense"]), ("gain", [])):
        legends = plots[name].figure.legends
        assert [text.get_text() for legend in legends for text in legend.get_texts()] == runs


def test_a_text_is_known_by_its_perplexity(tmp_path: Path) -> None:
    rows = [row(step, accuracy=0.1, test_loss=5.0, perplexity=math.exp(5.0)) for step in (1, 2)]
    plots = figures({"text": load_trace(write_run(tmp_path / "text", rows))})
    assert [plot.title for plot in plots if "perplexity" in plot.name][1] == "How many bytes does perplexity take?"
    assert not any("accuracy" in plot.name for plot in plots)


def test_marks_are_where_the_levels_change(gravac: Path) -> None:
    plot = next(plot for plot in figures({"one": load_trace(gravac)}) if plot.name == "cf")
    marks = plot.figure.axes[0].lines[-1]
    assert (marks.get_xdata().tolist(), marks.get_ydata().tolist()) == ([20.0], [10.0])  # type: ignore[union-attr]


def test_time_split_adds_up(gravac: Path) -> None:
    split = time_split(load_trace(gravac))
    assert list(split) == ["compute", "encode", "decode", "wait", "decide"]
    assert sum(split.values()) == pytest.approx(0.01)


def test_height_of_the_distribution_is_the_share_of_steps() -> None:
    plot = distribution({"run": {1.0: 50, 100.0: 150}}, slots={"run": 0}, title="?")
    curve = plot.figure.axes[0].lines[0]
    x, y = (np.asarray(values, dtype=float) for values in (curve.get_xdata(), curve.get_ydata()))
    assert np.interp([1.0, 100.0, 10.0], x, y) == pytest.approx([0.25, 0.75, 0.0], abs=0.01)


def test_a_long_curve_keeps_its_mean_and_its_ends() -> None:
    x = np.arange(1.0, 1_000_001.0)
    at, mean, low, high = binned(x, np.where(x == 777_777, 1e6, x % 2), 100)
    assert len(at) == 100
    assert (at[0], at[-1], low.min(), high.max()) == (1.0, 1e6, 0.0, 1e6)
    assert mean.mean() == pytest.approx(0.5 + 1.0)
    few = binned(np.array([1.0, 2.0, 3.0]), np.array([5.0, math.nan, 7.0]))
    assert few[0].tolist() == [1.0, 3.0]


def test_svg_is_for_a_page(gravac: Path) -> None:
    run = load_trace(gravac)
    texts = [plot.svg() for plot in figures({"run <&>": run, "other": run})]
    identifiers = [name for text in texts for name in re.findall(r'\bid="([^"]+)"', text)]
    assert len(identifiers) == len(set(identifiers))
    for text in texts:
        ElementTree.fromstring(text)
        used = set(re.findall(r"#[0-9a-f]{6}\b", text))
        assert not used & set(CSS_COLOURS), "colours that would not follow dark mode"
        assert set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text)) <= set(identifiers)
        assert "http" not in re.sub(r' xmlns(:\w+)?="[^"]+"', "", text)


def test_export(tmp_path: Path) -> None:
    line = Line("a", 0, np.array([0.0, 1.0]), np.array([1.0, 2.0]))
    plot = curves([line], name="it", title="Does it rise?", x=("step", "step"), y=("value", "number"))
    png, svg = plot.save(tmp_path / "figures")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "Does it rise?" in svg.read_text()
    assert "Does it rise?" not in plot.svg()
