"""`hvdcomp report` and its figures: what they show of runs that are finished, interrupted, broken, or very long."""

from __future__ import annotations

import html
import json
import math
import re
import shutil
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from hvdcomp.cli import app
from hvdcomp.config import ConfigError
from hvdcomp.report.figures import figures, time_split
from hvdcomp.report.page import load, names, write
from hvdcomp.report.plots import CSS_COLOURS, Line, binned, curves, distribution
from hvdcomp.report.table import table
from hvdcomp.report.trace import Metrics, Variant, clock_of, load_trace

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
    (folder / "job.json").write_text('{"workers": 2, "controller": "mpi", "steps": 50, "environment": {"python": "3"}}')
    (folder / "config.yaml").write_text("compression: {name: topk, cf: 10.0}\nschedule: {name: gravac, epsilon: 0.3}\n")
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def one(folder: Path) -> Variant:
    """A run by itself."""
    return Variant((load_trace(folder),))


@pytest.fixture
def gravac(tmp_path: Path) -> Path:
    """Forty steps of which the tenth to the nineteenth are sent at CF 100, evaluated every tenth."""
    rows = []
    for step in range(1, 41):
        searching = {"cf": 100.0, "decision": 1} if 10 <= step < 20 else {}
        levels = {"levels": [10.0, 100.0] if step < 20 else [10.0, 1000.0]}
        result = {"accuracy": step / 50, "test_loss": 1 / step, "layer_bytes": LAYERS} if step % 10 == 0 else {}
        rows.append(row(step, **searching, **levels, **result))
    return write_run(tmp_path / "gravac", rows, summary={"accuracy": 0.8, "dense_exchange_s": 0.005, "paid": "Yes."})


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
    assert figures({"a": Variant((run,))})


def test_what_is_no_run_is_said_clearly(gravac: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        load_trace(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"holds no metrics.jsonl, nor does a folder in it"):
        load_trace(tmp_path / "empty")
    (gravac / "metrics.jsonl").write_text("not json\n")
    with pytest.raises(ConfigError, match="holds no step yet"):
        load_trace(gravac)


def test_a_summary_of_another_version_and_fields_of_another_form_are_shown(gravac: Path) -> None:
    (gravac / "summary.json").write_text('{"workers": 2}')
    with (gravac / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps(row(41, levels=3, gains=[1, 2, 3], switched=["a"], layer_bytes=4)) + "\n")
    assert len(load_trace(gravac).metrics) == 41
    assert "time-split" in [plot.name for plot in figures({"one": one(gravac)})]


# -- figures


def test_each_figure_asks_a_question(gravac: Path) -> None:
    plots = figures({"one": one(gravac)})
    costs = ("steps", "bytes", "time")
    names = [*(f"accuracy-{c}" for c in costs), *(f"loss-{c}" for c in costs)]
    assert [plot.name for plot in plots] == [*names, "cf", "gain", "distribution", "time-split", "layers"]
    assert all(plot.title.endswith("?") for plot in plots)
    said = {plot.name: plot.description for plot in plots}
    assert said["accuracy-steps"] == "accuracy, held out over step. one: from 0.2 to 0.8 at 40."
    assert said["distribution"] == "Distribution of steps over CFs. one: 75% of 40 steps at CF 10."
    assert said["layers"].endswith("body.weight: plain Horovod 1 kB, one 100 B; body.bias: plain Horovod 4 B, one 4 B.")


def test_runs_share_the_axes(gravac: Path, tmp_path: Path) -> None:
    dense = write_run(tmp_path / "dense", [row(step, cf=1.0, gains=None, levels=None) for step in range(1, 4)])
    plots = {plot.name: plot for plot in figures({"gravac": one(gravac), "dense": one(dense)})}
    for name, runs in (("loss-bytes", ["gravac", "dense"]), ("gain", [])):
        legends = plots[name].figure.legends
        assert [text.get_text() for legend in legends for text in legend.get_texts()] == runs


def test_a_text_is_known_by_its_perplexity(tmp_path: Path) -> None:
    rows = [row(step, accuracy=0.1, test_loss=5.0, perplexity=math.exp(5.0)) for step in (1, 2)]
    plots = figures({"text": one(write_run(tmp_path / "text", rows))})
    titles = [plot.title for plot in plots if "perplexity" in plot.name]
    assert titles[1] == "How many bytes does a given perplexity take?"
    assert not any("accuracy" in plot.name for plot in plots)


def test_marks_are_where_the_levels_change(gravac: Path) -> None:
    plot = next(plot for plot in figures({"one": one(gravac)}) if plot.name == "cf")
    marks = plot.figure.axes[0].lines[-1]
    assert (marks.get_xdata().tolist(), marks.get_ydata().tolist()) == ([20.0], [10.0])  # type: ignore[union-attr]


def test_what_a_schedule_assigned_is_marked_and_listed(gravac: Path, tmp_path: Path) -> None:
    changes = {5: {"a": {"rank": 1}, "b": {"rank": 1}}, 9: {"a": {"rank": 2}, "c": {"name": "none"}}}
    rows = [row(step, cf=20.0 + step // 6, levels=None, switched=changes.get(step, {})) for step in range(1, 13)]
    folder = write_run(tmp_path / "accordion", rows)
    plot = next(plot for plot in figures({"one": one(folder)}) if plot.name == "cf")
    assert plot.figure.axes[0].lines[-1].get_xdata().tolist() == [5.0, 9.0]  # type: ignore[union-attr]
    write([folder, gravac], tmp_path / "report.html")
    text = re.sub(r"<[^>]+>|\s+", " ", (tmp_path / "report.html").read_text())
    listed = re.sub(" +", " ", text[text.index("What did the schedule assign, and when?") :])
    assert "accordion: 2 changes" in listed
    assert " 5 rank=1 2: a, b 9 rank=2 1: a none 1: c " in listed
    assert "gravac:" not in listed


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
    run = one(gravac)
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
    words = "How much modelled time does a given accuracy take at 100 Mbit/s?"
    (svg,) = replace(plot, title=words).save(tmp_path / "figures", ["svg"])
    lines = [
        line for line in re.findall(r">([^<>]+)</t(?:ext|span)>", svg.read_text()) if line in words and " " in line
    ]
    assert " ".join(lines) == words, "in lines that fit"
    assert all(len(line) <= 52 for line in lines)
    assert "Does it rise?" not in plot.svg()


# -- the table


def test_the_table_is_against_the_first_dense_run(gravac: Path, tmp_path: Path) -> None:
    dense = [
        row(step, cf=1.0, decision=-1, gains=None, levels=None, bytes_sent=1004, iteration_s=0.02)
        | ({"accuracy": 0.75, "test_loss": 1.0} if step == 30 else {})
        for step in range(1, 31)
    ]
    runs = {"gravac": one(gravac), "dense": one(write_run(tmp_path / "dense", dense))}
    shown = table(runs)
    cells = {name: dict(zip(shown.heads, texts, strict=True)) for name, texts in shown.rows.items()}
    assert cells["gravac"]["CF used"] == "32.5 (10 to 100)"
    assert cells["gravac"]["gain"] == "0.65"  # 30 steps of 0.8, ten of 0.2
    assert cells["gravac"]["reduction"] == "9.13 ×"
    assert (cells["gravac"]["accuracy"], cells["gravac"]["difference"]) == ("80.00 %", "+5.00 points")
    assert (cells["gravac"]["speed-up"], cells["dense"]["speed-up"]) == ("2.00 ×", "1.00 ×")
    assert (cells["dense"]["CF used"], cells["dense"]["difference"]) == ("dense", "")
    assert cells["gravac"]["to 75.00 %"] == "4.4 kB, 0.4 s"  # of 60, 75 and 80 % only the last is as good
    assert cells["dense"]["to 75.00 %"] == "30.1 kB, 0.6 s"


def test_one_run_has_nobody_to_be_faster_than(gravac: Path) -> None:
    shown = table({"gravac": one(gravac)})
    assert not any(head.startswith("to ") for head in shown.heads)
    assert any("needs a run with compression=none" in note for note in shown.notes)


# -- the page


def test_names_tell_runs_apart() -> None:
    assert names([Path("/runs/a")]) == ["a"]
    assert names([Path("/runs/a"), Path("/runs/b")]) == ["a", "b"]
    assert names([Path("/r/x/a/seed-0"), Path("/r/x/b/c/seed-0")]) == ["a", "b/c"]
    assert names([Path("/r/a"), Path("/r/a/b")]) == ["a", "a/b"]


def test_the_command_writes_one_page(gravac: Path, tmp_path: Path) -> None:
    twin = tmp_path / "twin <b>"
    shutil.copytree(gravac, twin)
    (twin / "summary.json").unlink()
    page, folder = tmp_path / "out" / "report.html", tmp_path / "figures"
    done = CliRunner().invoke(app, ["report", str(gravac), str(twin), "-o", str(page), "--figures", str(folder)])
    assert done.exit_code == 0, done.output
    assert "twin <b>: not finished: step 40 is the last that was written" in done.output
    text = page.read_text()
    assert "twin &lt;b&gt;" in text
    assert "twin <b>" not in text
    assert not re.findall(r'(?:src|href)="(?!#)[^"]*"|@import|url\((?!#)', text), "it must need nothing beside itself"
    assert {path.suffix for path in folder.iterdir()} == {".png", ".svg"}
    assert text.count("<figure>") == len(list(folder.iterdir())) / 2


@pytest.fixture
def comparison(gravac: Path, tmp_path: Path) -> Path:
    """Two variants with three seeds each on a modelled network; of gravac the last seed is not finished."""
    folder = tmp_path / "comparison"
    for variant in ("gravac", "dense"):
        for seed in range(3):
            rows = [json.loads(line) for line in (gravac / "metrics.jsonl").read_text().splitlines()]
            for line in rows:
                line["loss"] *= 1 + seed
                line["bytes_sent"] *= 1 + seed
                if "accuracy" in line:
                    line["accuracy"] -= 0.01 * (1 + (variant == "gravac")) * seed
                if variant == "dense":
                    line |= {"cf": 1.0, "decision": -1, "gains": None, "levels": None, "iteration_s": 0.02}
                elif seed == 1 and line["step"] >= 30:
                    line["cf"] = 1000.0
            finished = {"dense_exchange_s": 0.005, "paid": "Yes."} if (variant, seed) != ("gravac", 2) else None
            run = write_run(folder / variant / f"seed-{seed}", rows, summary=finished)
            (run / "config.yaml").write_text(
                f"compression: {'none' if variant == 'dense' else 'topk'}\nseed: {seed}\n"
                "network: {bandwidth_mbit: 100.0, compute_ms: 10.0}\n"
            )
    return folder


def test_a_comparison_is_shown_with_all_its_seeds(comparison: Path) -> None:
    variants = load([comparison]).variants
    assert list(variants) == ["dense", "gravac"]
    assert [run.seed for run in variants["dense"].runs] == [0, 1, 2]
    assert [run.seed for run in variants["gravac"].runs] == [0, 1]
    assert variants["gravac"].notes == (
        "seed-2: not finished: step 40 is the last that was written",
        "shown are the seeds that are finished",
    )
    folders = [comparison / "dense" / f"seed-{seed}" for seed in (2, 1)]
    assert [run.seed for run in load([*folders, comparison / "gravac"]).variants["dense"].runs] == [1, 2]


def test_curves_are_means_over_the_seeds_in_a_band(comparison: Path) -> None:
    plots = {plot.name: plot for plot in figures(load([comparison]).variants)}
    for plot, column in (("accuracy-steps", "accuracy"), ("loss-bytes", "loss")):
        for name, line in zip(("dense", "gravac"), plots[plot].figure.axes[0].lines, strict=True):
            runs = load([comparison]).variants[name].runs
            values = np.array([v[np.isfinite(v)] for v in (run.metrics.column(column) for run in runs)])
            np.testing.assert_allclose(line.get_ydata(), values.mean(0))  # type: ignore[arg-type]
        assert "means over the seeds" in plots[plot].note
    band = plots["accuracy-steps"].figure.axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((0.2 - 0.02, 0.8))
    factors = plots["cf"].figure.axes[0]
    assert factors.lines[2].get_ydata()[-1] == pytest.approx(100)  # type: ignore[index]  # of 10 and 1000
    assert "of 120 steps" in plots["distribution"].description
    assert all(plot.title.endswith("?") for plot in plots.values())


def test_the_table_has_means_and_deviations_over_the_seeds(comparison: Path) -> None:
    shown = table(load([comparison]).variants)
    dense, gravac = (dict(zip(shown.heads, shown.rows[name], strict=True)) for name in ("dense", "gravac"))
    assert (dense["seeds"], gravac["seeds"]) == ("3", "2")
    assert (dense["accuracy"], gravac["accuracy"]) == ("79.00 ± 1.00 %", "79.00 ± 1.41 %")
    assert gravac["difference"] == "-0.50 ± 0.71 points"  # 0 with seed 0, -1 with seed 1
    assert gravac["bytes sent"] == "6.6 kB ± 3.1 kB"
    assert (gravac["speed-up"], gravac["step"], dense["step"]) == ("2.00 ×", "10 ms", "20 ms")
    assert gravac["CF used"] == "168.6 ± 192.5 (10 to 1000)"
    assert shown.notes[0].startswith("±: mean and standard deviation (n - 1) over the seeds")


def test_a_comparisons_own_order_and_baseline(comparison: Path) -> None:
    told = {"baseline": "gravac", "results": [{"variant": "gravac"}, {"variant": "dense"}]}
    (comparison / "comparison.json").write_text(json.dumps(told))
    shown = load([comparison])
    assert (list(shown.variants), shown.baseline) == (["gravac", "dense"], "gravac")
    rows = table(shown.variants, shown.baseline)
    cells = dict(zip(rows.heads, rows.rows["dense"], strict=True))
    assert cells["difference"] == "+0.50 ± 0.71 points"  # over the two seeds that both have
    assert any("against gravac, the comparison's baseline" in note for note in rows.notes)


def test_seeds_that_differ_by_more_are_told(comparison: Path) -> None:
    config = comparison / "dense" / "seed-1" / "config.yaml"
    config.write_text(config.read_text().replace("none", "fp16"))
    (comparison / "dense" / "seed-2" / "metrics.jsonl").write_text("")
    (comparison / "next" / "seed-0").mkdir(parents=True)
    (comparison / "next" / "seed-0" / "metrics.jsonl").write_text("")
    shown = load([comparison])
    assert shown.variants["dense"].notes[1:] == ("its seeds ran with different configurations: compression",)
    assert "holds no step yet" in shown.variants["dense"].notes[0]
    assert "next/seed-0/metrics.jsonl holds no step yet" in shown.notes[0]


def test_modelled_times_say_so(comparison: Path, gravac: Path, tmp_path: Path) -> None:
    variants = load([comparison]).variants
    plots = {plot.name: plot for plot in figures(variants)}
    assert plots["loss-time"].figure.axes[0].get_xlabel() == "time of training, modelled at 100 Mbit/s, s"
    assert plots["time-split"].figure.axes[0].get_xlabel() == "ms per step, modelled at 100 Mbit/s"
    assert "times" not in table(variants).heads
    write([comparison], tmp_path / "report.html")
    caption = re.search("<caption>(.*)</caption>", (tmp_path / "report.html").read_text())
    assert caption
    assert caption[1] == "Times are modelled at 100 Mbit/s. Mean ± standard deviation over the seeds."
    mixed = variants | {"measured": one(gravac)}
    label = next(p for p in figures(mixed) if p.name == "loss-time").figure.axes[0].get_xlabel()
    assert label == "time of training, modelled or measured, s"
    others = [*variants.values(), Variant((replace(one(gravac).first, config={"network": {"bandwidth_mbit": 1000}}),))]
    assert clock_of(others) == "modelled on several networks"
    shown = table(mixed)
    times = {name: row[shown.heads.index("times")] for name, row in shown.rows.items()}
    assert times == dict.fromkeys(variants, "modelled at 100 Mbit/s") | {"measured": "measured"}
    assert "times" not in table({"measured": one(gravac)}).heads


@pytest.mark.parametrize("lines", ["", "garbage\n"])
def test_a_run_without_a_step_is_one_error(tmp_path: Path, lines: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(lines)
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 2
    assert "holds no step yet" in done.stderr


def test_a_page_that_cannot_be_written_is_an_error(gravac: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="the report cannot be written"):
        write([gravac], tmp_path / "file" / "report.html")


def test_a_long_run_does_not_freeze_it(tmp_path: Path) -> None:
    lines = [json.dumps(row(step, cf=10.0 + step % 7)) for step in range(1, 1001)]
    folder = write_run(tmp_path / "long", [])
    (folder / "metrics.jsonl").write_text("".join("\n".join(lines) + "\n" for _ in range(50)))
    began = time.process_time()
    write([folder], tmp_path / "report.html")
    assert time.process_time() - began < 20
    assert (tmp_path / "report.html").stat().st_size < 500_000


# -- in a browser

BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), "")

PROBE = """
<body><iframe width="{width}" height="900" srcdoc="{page}"></iframe><pre id="seen"></pre><script>
document.querySelector("iframe").onload = event => {{
  const page = event.target.contentDocument;
  const style = name => page.defaultView.getComputedStyle(page.querySelector(name));
  const inside = [...page.querySelectorAll("figure svg")].every(svg => {{
    const figure = svg.parentElement.getBoundingClientRect(), box = svg.getBoundingClientRect();
    return box.width > 200 && box.left >= figure.left && box.right <= figure.right;
  }});
  const text = [...page.querySelectorAll("figure svg text")].map(text => text.getBoundingClientRect().height);
  document.getElementById("seen").textContent = JSON.stringify({{
    width: page.documentElement.scrollWidth, figures: page.querySelectorAll("figure svg[role=img]").length, inside,
    smallest: Math.min(...text), background: style("body").backgroundColor, ink: style("figure svg text").fill,
    cut: [...page.querySelectorAll(".numbers td")].filter(cell => cell.scrollWidth > cell.clientWidth).length,
    columns: style(".figures").gridTemplateColumns.split(" ").length, cards: style(".numbers tr").display,
  }});
}};
</script></body>
"""


def seen_in_browser(page: Path, width: int, dark: bool) -> dict[str, Any]:
    """What a browser makes of a page in a window of so many pixels."""
    probe = page.with_name("probe.html")
    probe.write_text(PROBE.format(width=width, page=html.escape(page.read_text())))
    switches = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    switches += ["--disable-component-update", "--disable-sync", f"--user-data-dir={page.with_name('profile')}"]
    switches += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"--window-size={width + 100},1000"]
    command = [BROWSER, *switches, "--virtual-time-budget=10000", "--dump-dom", probe.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="seen">(.+?)</pre>', done.stdout, flags=re.DOTALL)
    assert found, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(html.unescape(found[1]))


@pytest.mark.skipif(not BROWSER, reason="no Chromium or Chrome is installed")
@pytest.mark.parametrize(("width", "dark"), [(390, False), (1280, True)])
def test_readable_in_a_browser(gravac: Path, tmp_path: Path, width: int, dark: bool) -> None:
    twin = tmp_path / "a run with quite a long name, as they often are"
    shutil.copytree(gravac, twin)
    write([gravac, twin], tmp_path / "report.html")
    readable(tmp_path / "report.html", width, dark)


@pytest.mark.skipif(not BROWSER, reason="no Chromium or Chrome is installed")
@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_a_comparison_is_readable_in_a_browser(comparison: Path, tmp_path: Path, width: int, dark: bool) -> None:
    write([comparison], tmp_path / "report.html")
    readable(tmp_path / "report.html", width, dark)


def readable(page: Path, width: int, dark: bool) -> None:
    seen = seen_in_browser(page, width, dark)
    assert seen["figures"] == 11
    assert seen["inside"]
    assert seen["width"] <= width, "the page scrolls sideways"
    assert seen["smallest"] > 8, "pixels of the smallest text"
    phone = width < 640
    assert (seen["columns"], seen["cards"]) == ((1, "block") if phone else (3, "table-row"))
    assert not (phone and seen["cut"]), "cells of the table that are wider than their card"
    light, darker = "rgb(254, 254, 254)", "rgb(20, 24, 29)"
    assert seen["background"] == (darker if dark else light)
    assert seen["ink"] == ("rgb(230, 234, 239)" if dark else "rgb(27, 31, 36)")
