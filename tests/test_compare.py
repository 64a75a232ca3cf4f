"""`hvdcomp compare`: what it refuses, what it repeats and what not, what its table says; and docs/compressors.md."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from training_runs import ROOT, hvdcomp, summary
from typer.testing import CliRunner

from hvdcomp import compressors
from hvdcomp.cli import app
from hvdcomp.compressors import Compressor
from hvdcomp.config import ConfigError, load, load_comparison
from hvdcomp.training import launcher
from hvdcomp.training.comparison import Run, last_words, plan
from hvdcomp.training.comparison_report import Ended, cells, head, markdown, results, setting
from hvdcomp.training.launcher import Job

COMPARISON = """
base:
  model: {name: mlp, hidden: 16}
  data: {name: 'training_runs:blobs', batch_size: 8, samples: 59}
  optimizer: {name: sgd, lr: 0.1, momentum: 0.9}
  steps: 5
variants:
  dense: {compression: none}
  topk: {compression: {name: topk, cf: 20}}
  signsgd: {compression: signsgd, optimizer: {lr: 0.01, momentum: 0.0}}
seeds: [0, 7]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(COMPARISON + f"run_dir: {tmp_path / 'runs'}\n")
    return path


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


# -- what it refuses


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["seed=[1]"], "unknown key 'seed', given [1] (did you mean 'seeds'?); allowed: base, variants, baseline"),
        (["epochs=3"], "unknown key 'epochs', given 3 (did you mean 'base.epochs'?)"),
        (
            ["base.optimizer.momentom=0.9"],
            "unknown key 'base.optimizer.momentom', given 0.9 (did you mean 'momentum'?)",
        ),
        (["base.seed=1"], "seed of base: leave it out, the comparison sets it"),
        (["variants.topk.run_dir=x"], "run_dir of topk: leave it out, the comparison sets it"),
        (["variants.topk.compresion=none"], "variants.topk: unknown key 'compresion', given 'none' (did you mean"),
        (["variants.topk.optimizer.lr=fast"], "variants.topk: optimizer.lr must be a valid number; given 'fast'"),
        (["variants.topk.compression.cf=0.5"], "variants.topk: compression: cf must be >= 1, got 0.5"),
        (["variants.topk.compression=topkk"], "variants.topk: compression: unknown compression 'topkk'; did you mean"),
        (["variants.signsgd.schedule=gravac"], "variants.signsgd: schedule: gravac chooses compression factors"),
        (["variants.topk=5"], "variants.topk must be a valid dictionary; given 5"),
        (["variants={}"], "variants must be Dictionary should have at least 1 item"),
        (["variants.a/b={}"], "got 'a/b'"),
        (["baseline=dence"], "baseline: must be one of the variants (dense, topk, signsgd), got 'dence' (did you mean"),
        (["seeds=[1,1]"], "seeds: each must be given once, got [1, 1]"),
        (["seeds=[-1]"], "seeds.0 must be greater than or equal to 0; given -1"),
        (["seeds=[]"], "seeds must be List should have at least 1 item"),
        (["-np", "100"], "59 training samples are too few for 100 workers"),
        (
            ["--only", "dense,topkk"],
            "--only topkk: no such variant (did you mean 'topk'?); there are: dense, topk, signsgd",
        ),
        (["--seeds", "3"], "--seeds 3: the file has [0, 7]; name more, for example seeds=[0,1,2,3]"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_one_error_before_any_run_starts(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.setattr(launcher, "run", lambda *arguments: pytest.fail("a process was started"))
    done = run(file, *arguments)
    assert done.exit_code == 2, done.output
    assert says in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_file_without_variants(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("baseline: dense\n")
    with pytest.raises(ConfigError, match=r"variants is missing \(name: what differs from `base`"):
        load_comparison(tmp_path / "c.yaml")


def test_it_starts_the_workers_itself(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    done = run(file)
    assert done.exit_code == 2
    assert "call it without mpirun" in done.stderr


# -- what a variant is


def test_a_variant_is_the_base_with_what_it_changes(file: Path) -> None:
    comparison = load_comparison(file, ["base.compression={name: topk, cf: 50}", "variants.same={}"])
    base, signsgd = comparison.variant("same"), comparison.variant("signsgd")
    assert base == comparison.base
    assert base.compression.params == {"cf": 50}
    assert signsgd.compression.params == {}  # the parameters were those of another method
    assert (signsgd.optimizer.lr, signsgd.optimizer.momentum, signsgd.optimizer.name) == (0.01, 0.0, "sgd")
    assert signsgd.model == base.model


def test_the_order_of_a_sections_keys_does_not_matter(file: Path) -> None:
    changed = ["base.compression={name: powersgd, rank: 2}", "variants.topk.compression={cf: 9, name: topk}"]
    assert load_comparison(file, changed).variant("topk").compression.params == {"cf": 9}
    renamed = load_comparison(file, [*changed, "variants.topk.compression.name=dgc"])  # cf was top-k's
    assert renamed.variant("topk").compression.params == {}


def test_every_run_has_its_seed_and_its_folder(file: Path, tmp_path: Path) -> None:
    runs = plan(load_comparison(file), workers=2)
    assert [(r.variant, r.config.seed) for r in runs] == [(v, s) for s in (0, 7) for v in ("dense", "topk", "signsgd")]
    assert runs[4].folder.path == tmp_path / "runs" / "topk" / "seed-7"
    assert runs[4].config.compression.params["error_feedback"] is True  # every default is spelled out
    assert load_comparison(ROOT / "configs" / "convergence-digits.yaml", ["run_dir=null"]).run_dir == (
        "runs/convergence-digits"
    )


# -- what it runs, with a stand-in for the launcher

ACCURACIES = {("dense", 0): 0.98, ("dense", 7): 0.96, ("topk", 0): 0.97, ("topk", 7): 0.96}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Variant and seed of each run that was started; a stand-in leaves what a run leaves."""
    runs: list[tuple[str, int]] = []

    def stand_in(job: Job, progress: str, output: IO[bytes]) -> int:
        settings = Path(job.command[4])
        config = load(settings)
        runs.append((settings.parent.name, config.seed))
        leave(Path(str(config.run_dir)), settings, accuracy=ACCURACIES.get(runs[-1], 0.9), workers=job.workers)
        return 0

    monkeypatch.setattr(launcher, "run", stand_in)
    return runs


def leave(folder: Path, settings: Path, accuracy: float, workers: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(settings.read_text())
    found = {"accuracy": accuracy, "bytes_sent": 10, "bytes_dense": 40, "cf_mean": 20.0, "test_samples": 50}
    (folder / "summary.json").write_text(json.dumps(found | {"workers": workers}))


ALL = [(variant, seed) for seed in (0, 7) for variant in ("dense", "topk", "signsgd")]


def test_finished_runs_are_not_repeated(file: Path, started: list[tuple[str, int]]) -> None:
    assert run(file).exit_code == 0
    assert started == ALL
    again = run(file)
    assert again.exit_code == 0
    assert started == ALL
    assert "6 of 6 runs are finished already" in again.stdout


@pytest.mark.parametrize(
    ("arguments", "repeated"),
    [
        (["variants.topk.compression.cf=30"], [("topk", 0), ("topk", 7)]),
        (["seeds=[0,7,8]"], [("dense", 8), ("topk", 8), ("signsgd", 8)]),
        (["base.steps=6"], ALL),
        (["-np", "3"], ALL),
    ],
    ids=lambda value: " ".join(value) if isinstance(value[0], str) else "",
)
def test_what_another_configuration_made_is_repeated(
    file: Path, started: list[tuple[str, int]], arguments: list[str], repeated: list[tuple[str, int]]
) -> None:
    run(file)
    started.clear()
    assert run(file, *arguments).exit_code == 0
    assert started == repeated


def test_a_run_whose_summary_cannot_be_read_is_repeated(
    file: Path, tmp_path: Path, started: list[tuple[str, int]]
) -> None:
    run(file)
    started.clear()
    (tmp_path / "runs" / "topk" / "seed-7" / "summary.json").write_text("{")
    (tmp_path / "runs" / "dense" / "seed-0" / "summary.json").write_text("{}")
    assert run(file).exit_code == 0
    assert started == [("dense", 0), ("topk", 7)]


def test_a_moved_comparison_is_still_finished(file: Path, tmp_path: Path, started: list[tuple[str, int]]) -> None:
    run(file)
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    assert run(file, f"run_dir={tmp_path / 'elsewhere'}").exit_code == 0
    assert started == ALL


def test_some_of_it(file: Path, tmp_path: Path, started: list[tuple[str, int]]) -> None:
    done = run(file, "--only", "topk", "--seeds", "1")
    assert started == [("dense", 0), ("topk", 0)]
    assert "Not finished" not in done.stdout  # what was not asked for is not missing
    assert "2 workers; seeds 0; 50 held-out samples" in done.stdout
    found = json.loads((tmp_path / "runs" / "comparison.json").read_text())
    assert [result["variant"] for result in found["results"]] == ["dense", "topk"]
    assert found["results"][1]["difference"] == pytest.approx(-0.01)
    assert found["results"][1]["score_sd"] is None


def test_a_run_that_fails_is_reported_and_the_next_one_starts(
    file: Path, tmp_path: Path, started: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    works = launcher.run

    def fails(job: Job, progress: str, output: IO[bytes]) -> int:
        if "topk" not in job.command[4]:
            return works(job, progress, output)
        output.write(b"step 1/5\n[1,1]<stderr>:hvdcomp: rank 1 failed: no luck\nmpirun has ended\n----\n")
        return 3

    monkeypatch.setattr(launcher, "run", fails)
    done = run(file)
    assert done.exit_code == 1
    assert started == [name for name in ALL if name[0] != "topk"]
    assert "topk  seed 0  FAILED with exit code 3: rank 1 failed: no luck" in done.stdout
    assert str(tmp_path / "runs" / "topk" / "seed-0.log") in done.stdout
    monkeypatch.setattr(launcher, "run", works)
    started.clear()
    assert run(file).exit_code == 0
    assert started == [("topk", 0), ("topk", 7)]


def test_a_signal_ends_it_and_leaves_what_is_finished(
    file: Path, tmp_path: Path, started: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    works = launcher.run
    monkeypatch.setattr(launcher, "run", lambda *given: 130 if len(started) == 2 else works(*given))
    done = run(file)
    assert done.exit_code == 130
    assert started == ALL[:2]
    assert len(json.loads((tmp_path / "runs" / "comparison.json").read_text())["results"]) == 2
    monkeypatch.setattr(launcher, "run", works)
    assert run(file).exit_code == 0
    assert started == ALL


def test_only_a_run_of_this_very_configuration_is_resumed(file: Path, tmp_path: Path) -> None:
    def first(*overrides: str) -> Run:
        return plan(load_comparison(file, list(overrides)), 2)[0]

    folder = first().folder
    (folder.checkpoints / "step-000003").mkdir(parents=True)
    for rank in (0, 1):
        (folder.checkpoints / "step-000003" / f"rank-{rank}.pt").touch()
    (folder.checkpoints / "latest").write_text(json.dumps({"step": 3, "workers": 2, "folder": "step-000003"}))
    assert not first().can_go_on()  # whose it is, nobody knows
    folder.config.write_text(first().config.to_yaml())
    assert first().can_go_on()
    assert not first("base.steps=6").can_go_on()
    assert not plan(load_comparison(file), 1)[0].can_go_on()


@pytest.mark.parametrize(
    ("log", "says"),
    [("", "it printed nothing"), ("a\nb\n-----\n\n", "b"), ("hvdcomp: x\nhvdcomp: y\nmpirun\n", "y")],
)
def test_last_words(tmp_path: Path, log: str, says: str) -> None:
    (tmp_path / "log").write_text(log)
    assert last_words(tmp_path / "log") == says


# -- what the table says


def found(file: Path, summaries: dict[tuple[str, int], dict[str, Any]]) -> list[Ended]:
    comparison = load_comparison(file)
    return [Ended(r.variant, r.config, summaries.get((r.variant, r.config.seed))) for r in plan(comparison, 2)]


def test_figures(file: Path) -> None:
    def of(accuracy: float, sent: int) -> dict[str, Any]:
        return {"accuracy": accuracy, "bytes_sent": sent, "bytes_dense": 100, "cf_mean": 20.0}

    summaries = {
        ("dense", 0): of(0.98, 100), ("dense", 7): of(0.96, 100),
        ("topk", 0): of(0.99, 8), ("topk", 7): of(0.95, 12),
        ("signsgd", 7): of(0.90, 4),
    }  # fmt: skip
    table = results(load_comparison(file), found(file, summaries))
    assert [cells(result) for result in table] == [
        ("dense", "none", "97.00 ± 1.41", "+0.00", "100", ""),
        ("topk", "topk(cf=20)", "97.00 ± 2.83", "+0.00", "10", "20"),
        ("signsgd", "signsgd, optimizer(lr=0.01, momentum=0.0)", "90.00", "-6.00", "4", ""),
    ]
    assert table[1].scores == {0: 0.99, 7: 0.95}
    assert markdown(table).splitlines()[2] == "| dense | none | 97.00 ± 1.41 | +0.00 | 100 |  |"


def test_without_its_baseline_a_variant_has_no_difference(file: Path) -> None:
    summaries = {("topk", 0): {"accuracy": 0.99, "bytes_sent": 0, "bytes_dense": 0, "cf_mean": 1.0}}
    (result,) = results(load_comparison(file), found(file, summaries))
    assert (result.difference, result.bytes_ratio) == (None, None)
    assert cells(result)[3:5] == ("", "")


def test_settings() -> None:
    assert (
        setting({"compression": {"cf": 20}, "epochs": 3, "exclude": ["1d"]})
        == "compression(cf=20), epochs=3, exclude=['1d']"
    )
    assert setting({}) == ""


# -- real ranks


@pytest.mark.ranks
def test_a_comparison_of_real_runs(file: Path, tmp_path: Path) -> None:
    faulty = "variants.faulty={model: {name: 'training_runs:faulty', at_step: 2, how: raise}}"
    arguments = ["compare", str(file), "--only", "topk,faulty", "--seeds", "1", faulty]
    done = hvdcomp(*arguments)
    assert done.code == 1, done.out + done.err
    assert re.search(r"faulty  seed 0  FAILED with exit code \d+: .*a fault of the user's model", done.out)
    folder = tmp_path / "runs"
    assert summary(folder / "topk" / "seed-0")["workers"] == 2
    assert summary(folder / "topk" / "seed-0")["bytes_sent"] < summary(folder / "dense" / "seed-0")["bytes_sent"]
    assert "step 5/5" in (folder / "topk" / "seed-0.log").read_text()
    written = {result["variant"]: result for result in json.loads((folder / "comparison.json").read_text())["results"]}
    assert set(written) == {"dense", "topk"}
    assert written["topk"]["cf"] == 20
    assert markdown(results(load_comparison(file), ended(file))) in (folder / "comparison.md").read_text()
    again = hvdcomp("compare", str(file), "--only", "topk", "--seeds", "1")
    assert again.code == 0, again.out + again.err
    assert "2 of 2 runs are finished already" in again.out


def ended(file: Path) -> list[Ended]:
    return [Ended(run.variant, run.config, run.summary()) for run in plan(load_comparison(file), 2)]


# -- the comparison of all methods, and the page on them

DIGITS = ROOT / "configs" / "convergence-digits.yaml"
PAGE = (ROOT / "docs" / "compressors.md").read_text()
METHODS = compressors.available()


def test_the_comparison_on_digits_has_every_method() -> None:
    compared = {run.config.compression.name for run in plan(load_comparison(DIGITS), 2)}
    assert compared == set(METHODS)


def table_rows(first_head: str) -> list[list[str]]:
    """The rows of the page's table whose first column has this title."""
    lines = PAGE[PAGE.index(f"\n| {first_head} |") + 1 :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


@pytest.mark.parametrize("name", METHODS)
def test_the_page_has_an_entry_for_each_method(name: str) -> None:
    assert re.search(rf"^### .*`{name}`", PAGE, flags=re.MULTILINE)


def test_the_pages_facts_are_those_of_the_registry() -> None:
    expected = [facts(cls) for cls in METHODS.values()]
    table = "\n".join(f"| {' | '.join(row)} |" for row in expected)
    assert table_rows("name") == expected, f"docs/compressors.md should say:\n{table}"


def facts(cls: type[Compressor]) -> list[str]:
    method = cls()
    shape = torch.Size((1024, 1024))
    bits = 8 * sum(volume.nbytes for volume in method.requests(shape, workers=4)) / shape.numel()
    given = {name: default for name, default in cls.parameters().items() if default is not inspect.Parameter.empty}
    feedback = "residual" if method.error_feedback else "own" if method.residual_state else "no"
    parameters = ", ".join(f"{name}={default}" for name, default in given.items())
    dense = ", ".join(method.default_exclude) or "nothing"
    return [f"`{cls.name}`", method.collective, feedback, f"{bits:.3g}", dense, parameters or "none", cls.source]


def test_the_pages_convergence_table_has_a_row_for_each_variant_with_its_setting() -> None:
    variants = load_comparison(DIGITS).variants
    rows = {row[0]: row for row in table_rows("method")}
    assert {name: rows[name][1] for name in rows} == {name: setting(changed) for name, changed in variants.items()}
    assert all(len(row) == len(head("accuracy")) for row in rows.values())


def test_the_pages_convergence_table_was_made_by_the_base_of_the_file() -> None:
    base = load_comparison(DIGITS).base.model_dump(exclude_unset=True)
    assert f"All: {setting(base)}." in " ".join(PAGE.split())


def test_the_pages_example_of_a_comparison_can_run(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "example.yaml").write_text(example)
    assert len(plan(load_comparison(tmp_path / "example.yaml"), 2)) == 9
