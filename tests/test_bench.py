"""Benchmarks: which figures they give, what counts as encoding, and what is refused before anything is timed."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from hvdcomp.bench import kernels
from hvdcomp.bench.kernels import INDEX_CODE, Method, parse_methods
from hvdcomp.bench.samples import DRAWS, drawn, make_pool, recorded
from hvdcomp.cli import app
from hvdcomp.compressors import available
from hvdcomp.config import ConfigError
from hvdcomp.rounds import BucketRun
from hvdcomp.training.gradients import GradientRecorder, load_gradients, recorded_steps

NUMEL = 20_000
KEYS = {
    *("method", "params", "encode_ms", "decode_ms", "memcpy_ratio", "topk_speedup", "k_ratio"),
    *("bits_per_element", "bits_per_index", "gain", "relative_error"),
}


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "kernels", *arguments])


def entropy_bound(numel: int, count: int) -> float:
    """Bits an index that a support of ``count`` of ``numel`` positions takes at least, if all are equally likely."""
    log_choices = math.lgamma(numel + 1) - math.lgamma(count + 1) - math.lgamma(numel - count + 1)
    return log_choices / math.log(2) / count


# -- the command


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    """What is printed, and the rows."""
    path = tmp_path_factory.mktemp("bench") / "rows.json"
    done = run("--numel", str(NUMEL), "--repeat", "2", "--json", str(path))
    assert done.exit_code == 0, done.output
    return done.stdout, json.loads(path.read_text())


def one(rows: list[dict[str, Any]], method: str, **params: Any) -> dict[str, Any]:
    (row,) = (row for row in rows if row["method"] == method and (not params or row["params"] == params))
    return row


def test_every_method_has_a_row(everything: tuple[str, list[dict[str, Any]]]) -> None:
    printed, rows = everything
    assert {row["method"] for row in rows} == {*available(), INDEX_CODE}
    assert len(rows) == len(available()) + 6
    for row in rows:
        assert set(row) >= KEYS
        assert row["method"] in printed
        assert (row["dist"], row["threads"], row["rounds"]) == ("laplace", 1, 2)
        assert min(row["encode_ms"], row["decode_ms"], row["memcpy_ratio"], row["memcpy_ms"]) > 0
        assert (row["topk_speedup"] is not None) == ("cf" in row["params"] or bool(row["params"].keys() & ADAPTIVE))
        assert row["memcpy_ratio"] * row["memcpy_ms"] == pytest.approx(
            row["encode_ms"] + (row["decode_ms"] if row["method"] == INDEX_CODE else 0)
        )
    assert "20,000 elements (laplace); threads: 1; memcpy: " in printed


ADAPTIVE = {"levels", "twice"}


def test_figures_of_the_methods(everything: tuple[str, list[dict[str, Any]]]) -> None:
    _, rows = everything
    topk = one(rows, "topk", cf=100)
    for row in (topk, *(row for row in rows if row["params"].keys() & ADAPTIVE), one(rows, "randomk")):
        assert row["k_ratio"] == 1
    for density in (0.1, 0.01, 0.001):
        bound = entropy_bound(NUMEL, int(NUMEL * density))
        assert bound <= one(rows, INDEX_CODE, density=density)["bits_per_index"] <= 1.3 * bound
    assert entropy_bound(NUMEL, 200) <= topk["bits_per_index"] <= 1.3 * entropy_bound(NUMEL, 200)
    assert one(rows, "artopk")["bits_per_index"] == 32
    assert one(rows, "randomk")["bits_per_index"] is None
    bits = [one(rows, name)["bits_per_element"] for name in ("none", "fp16", "bf16")]
    assert bits == pytest.approx([32, 16, 18], rel=1e-3)
    assert one(rows, "none")["gain"] == pytest.approx(1)
    assert one(rows, "signsgd")["gain"] is None
    assert one(rows, "signsgd")["k_ratio"] is None
    for name in ("topk", "powersgd"):  # the error is orthogonal to what is sent
        row = one(rows, name, **({"cf": 100} if name == "topk" else {}))
        assert row["gain"] + row["relative_error"] ** 2 == pytest.approx(1, rel=1e-4)
    assert one(rows, "powersgd")["shape"] == [141, 141]


def test_a_matrix_for_a_slow_svd_is_small() -> None:
    assert Method("atomo", {"budget": 3}).case(25_000_000).shape == (512, 4608)
    assert Method("powersgd", {}).case(1_000_003).shape == (1000, 1000)


@pytest.mark.parametrize("numel", [1, 5, 8, 999])
def test_a_worker_stands_in_for_all_that_reduce_a_part(numel: int) -> None:
    for method, params in (("oktopk", {"cf": 1.5}), ("bf16", {})):
        case = Method(method, params).case(numel)
        assert case.shape.numel() == (numel if numel < 999 else 992)
        for step in range(3):
            case.step(drawn("normal", case.shape.numel()).gradient(step))
        assert case.figures(drawn("normal", case.shape.numel()).gradient(3))["gain"] > 0.5


@pytest.mark.parametrize("dist", DRAWS)
def test_a_chosen_method_on_every_distribution(dist: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    done = run("--numel=999", f"--dist={dist}", "--repeat=1", "--methods=top-k:cf=10:values=int8", f"--json={path}")
    (row,) = json.loads(path.read_text())
    assert done.exit_code == 0
    assert (row["method"], row["params"], row["dist"]) == ("topk", {"cf": 10, "values": "int8"}, dist)
    assert entropy_bound(999, 99) <= row["bits_per_index"] <= 32
    assert 0 < row["gain"] < 1


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    row = kernels.measure_all([Method("none", {})], drawn("normal", 100), threads=before + 1, repeat=1)[0]
    assert (row["threads"], torch.get_num_threads()) == (before + 1, before)


def test_one_element_is_enough() -> None:
    pool = drawn("normal", 1)
    for method in kernels.default_methods(pool.gradient(0)):
        kernels.measure(method, pool, repeat=1)


# -- figures against direct computations


def test_gain_and_error_of_top_k_with_its_residual() -> None:
    pool = drawn("laplace", NUMEL)
    case = Method("topk", {"cf": 50}).case(NUMEL)
    residual = torch.zeros(NUMEL)
    for step in range(3):
        acc = residual + pool.gradient(step)
        sent = torch.zeros(NUMEL)
        top = acc.abs().topk(NUMEL // 50).indices
        sent[top] = acc[top]
        residual = acc - sent
        if step < 2:
            case.step(pool.gradient(step))
    found = case.figures(pool.gradient(2))
    assert found["gain"] == pytest.approx(float(sent.norm() / acc.norm()) ** 2, rel=1e-5)
    assert found["relative_error"] == pytest.approx(float(residual.norm() / acc.norm()), rel=1e-5)


def test_levels_send_the_second_one_however_it_was_found() -> None:
    pool = drawn("laplace", NUMEL)
    found = []
    for params in ({"cf": 100}, {"levels": [10, 100]}, {"twice": [10, 100]}):
        case = Method("topk", params).case(NUMEL)
        case.step(pool.gradient(0))
        found.append(case.figures(pool.gradient(1)))
    assert found[0] == found[1] == found[2]
    assert Method("topk", {"levels": [10, 100]}).case(NUMEL).k == NUMEL // 10


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_error_of_a_rounding_method(name: str, dtype: torch.dtype) -> None:
    gradient = drawn("normal", NUMEL).gradient(0)
    case = Method(name, {}).case(NUMEL)
    case.step(gradient)
    expected = float((gradient - gradient.to(dtype)).norm() / gradient.norm())
    assert case.figures(gradient)["relative_error"] == pytest.approx(expected, rel=1e-3)


# -- what counts as what


class Clock:
    """Seconds that pass only where a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self._patch = monkeypatch
        monkeypatch.setattr(kernels, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def slow_down(self, where: Any, name: str) -> None:
        """Every call of it takes a second."""
        real = getattr(where, name)

        def slow(*arguments: Any) -> Any:
            self.now += 1
            return real(*arguments)

        self._patch.setattr(where, name, slow)


@pytest.mark.parametrize(
    ("method", "params", "where", "name", "seconds"),
    [
        ("topk", {}, BucketRun, "begin", (1, 0)),
        ("topk", {}, BucketRun, "statistics", (0, 0)),
        ("topk", {"levels": [10, 100]}, BucketRun, "statistics", (1, 0)),
        ("topk", {}, BucketRun, "keep", (1, 0)),
        ("topk", {}, BucketRun, "write_means", (0, 1)),
        ("topk", {}, BucketRun, "answer", (0, 1)),
        ("powersgd", {}, BucketRun, "answer", (1, 1)),
        ("topk", {}, kernels, "collective", (0, 0)),
        (INDEX_CODE, {}, kernels, "largest", (0, 0)),
        (INDEX_CODE, {}, kernels.indices, "encode", (1, 0)),
        (INDEX_CODE, {}, kernels.indices, "decode", (0, 1)),
    ],
)
def test_what_is_encoding_and_what_is_decoding(
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    params: dict[str, Any],
    where: Any,
    name: str,
    seconds: tuple[int, int],
) -> None:
    clock = Clock(monkeypatch)
    clock.slow_down(where, name)
    case = Method(method, params).case(NUMEL)
    assert case.step(drawn("normal", case.shape.numel()).gradient(0)) == seconds


# -- what is refused


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--numel=0"], "Invalid value for '--numel'"),
        (["--threads=0"], "Invalid value for '--threads'"),
        (["--dist=cauchy"], "Invalid value for '--dist'"),
        (["--dist=real"], "--dist real needs --gradients RUN_DIR"),
        (["--dist=real", "--gradients={folder}"], "holds no recorded gradients; make some with"),
        (["--gradients={folder}"], "is read with --dist real, not with --dist laplace"),
        (["--json={folder}"], "cannot be written: Is a directory"),
        (["--json={folder}/none/rows.json"], "cannot be written: No such file or directory"),
        (["--methods=topkk"], "method 'topkk': unknown compression 'topkk'; did you mean 'topk'?"),
        (["--methods=topk,powersgd:rnk=4"], "method 'powersgd': unknown parameter"),
        (["--methods=topk:cf=0.5"], "cf must be >= 1, got 0.5"),
        (["--methods=topk:100"], "write NAME:KEY=VALUE"),
        (["--methods=topk:cf=[1"], "is not valid YAML"),
        (["--methods=powersgd:levels=[10,100]"], "levels are compression factors, powersgd has none"),
        (["--methods=topk:levels=10"], "levels must be two compression factors, got 10"),
        (["--methods=topk:levels=[100,10]"], "the second level must be >= 100, got 10"),
        (["--methods=dgc:twice=[10,100]"], "twice=[CF, CF] goes with topk"),
        (["--methods=index code:densty=1"], "unknown parameter of the index code 'densty'; did you mean 'density'?"),
        (["--methods=index code:density=2"], "density must be between 1e-09 and 1, got 2"),
    ],
)
def test_a_fault_is_told_before_anything_is_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], says: str
) -> None:
    monkeypatch.setattr(kernels, "measure_all", lambda *given, **more: pytest.fail("something was timed"))
    done = run(*(argument.format(folder=tmp_path) for argument in arguments))
    assert done.exit_code == 2
    assert says in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_lists_within_methods() -> None:
    assert parse_methods("topk:levels=[10, 1e3],index code:density=.5") == [
        Method("topk", {"levels": [10, 1000.0]}),
        Method(INDEX_CODE, {"density": 0.5}),
    ]


# -- gradients


@pytest.mark.parametrize("numel", [1, 63, 1000, 100_000])
def test_drawn_gradients_differ_from_step_to_step(numel: int) -> None:
    pool = drawn("normal", numel)
    gradients = [pool.gradient(step) for step in range(4)]
    assert all(gradient.shape == (numel,) and gradient.dtype == torch.float32 for gradient in gradients)
    assert all((one == other).float().mean() < 0.01 for one, other in itertools.pairwise(gradients))
    assert torch.equal(drawn("normal", numel).gradient(3), gradients[3])


@pytest.mark.parametrize(
    ("total", "count", "steps"),
    [(10, 0, []), (10, 1, [5]), (10, 2, [3, 8]), (9, 3, [2, 5, 8]), (7, 7, range(1, 8)), (3, 5, [1, 2, 3])],
)
def test_recorded_steps_are_spread_evenly(total: int, count: int, steps: Any) -> None:
    assert sorted(recorded_steps(total, count)) == list(steps)


@pytest.fixture
def recording(tmp_path: Path) -> tuple[Path, list[torch.Tensor]]:
    """A run's folder with two recorded steps of a model of 8 parameters, and their flat gradients."""
    model = nn.Linear(3, 2)
    timer = SimpleNamespace(entered=0)

    class Untimed:
        def __enter__(self) -> None:
            timer.entered += 1

        def __exit__(self, *error: object) -> None:
            pass

    recorder = GradientRecorder(model, tmp_path, {2, 4}, Untimed)
    flats = []
    for step in range(1, 6):
        model.zero_grad()
        loss = model(torch.randn(5, 3)).square().mean()
        with recorder.watching(step):
            loss.backward()
        if step in (2, 4):
            flats.append(torch.cat([model.bias.grad, model.weight.grad.flatten()]).clone())
        for parameter in model.parameters():
            parameter.grad.fill_(7)  # as an exchange in place would
        recorder.save(step)
    assert timer.entered == 4
    return tmp_path, flats


def test_a_recording_is_what_backward_made(recording: tuple[Path, list[torch.Tensor]]) -> None:
    folder, flats = recording
    found = load_gradients(folder)
    assert list(found) == [2, 4]
    assert [list(step) for step in found.values()] == [["bias", "weight"]] * 2
    for step, flat in zip(found.values(), flats, strict=True):
        assert torch.equal(torch.cat([step["bias"], step["weight"].flatten()]), flat)


@pytest.mark.parametrize(("numel", "used"), [(5, 5), (8, 8), (11, 11), (1000, 16)])
def test_a_pool_of_recorded_steps(recording: tuple[Path, list[torch.Tensor]], numel: int, used: int) -> None:
    folder, (first, second) = recording
    pool = make_pool("real", numel, folder)
    assert pool.numel == used
    assert torch.equal(pool.gradient(0), torch.cat([first, second])[:used])
    assert torch.equal(pool.gradient(1), torch.cat([second, first])[:used])
    assert torch.equal(pool.gradient(2), pool.gradient(0))


def test_the_command_on_recorded_gradients(recording: tuple[Path, list[torch.Tensor]]) -> None:
    done = run("--dist=real", f"--gradients={recording[0]}", "--repeat=1", "--methods=topk:cf=4", "--numel=20")
    assert done.exit_code == 0, done.output
    assert "16 elements (real), as only so many of 20 were recorded; threads: 1" in done.stdout


def test_recordings_that_are_no_use(recording: tuple[Path, list[torch.Tensor]]) -> None:
    folder = recording[0]
    torch.save({"weight": torch.tensor([1.0, torch.nan])}, folder / "gradients" / "step-000004.pt")
    with pytest.raises(ConfigError, match=r"the gradient of step 4 in .* holds NaN or Inf: remove that step's file"):
        recorded(folder, 10)
    (folder / "gradients" / "step-000004.pt").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=r"step-000004\.pt cannot be read"):
        recorded(folder, 10)
