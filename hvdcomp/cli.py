"""The command `hvdcomp`."""

from __future__ import annotations

import inspect
import json
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hvdcomp.config import ConfigError, RunConfig, did_you_mean, fields, load, load_comparison

if TYPE_CHECKING:
    from hvdcomp.training.launcher import Job

log = logging.getLogger("hvdcomp")

app = typer.Typer(
    help="Adaptive gradient compression for Horovod and PyTorch.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

bench = typer.Typer(help="Measure what methods cost and save on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")

schedule_ = typer.Typer(help="Look at schedules without training.", no_args_is_help=True)
app.add_typer(schedule_, name="schedule")

NetworkName = Annotated[
    str | None, typer.Option(help="Instead of CONFIG: resnet50, resnet101, vgg16, lstm-ptb, bert-base, ...")
]
ProbeFile = Annotated[Path | None, typer.Option("--probe", metavar="FILE", help="What `hvdcomp probe` measured.")]
Bandwidth = Annotated[str | None, typer.Option(help="Of a worker's (or a node's) link, such as 10gbit.")]
Latency = Annotated[float | None, typer.Option(min=0, help="Seconds of one message; default: 2e-5.")]
Workers = Annotated[int | None, typer.Option("-np", "--workers", min=1, help="Workers; default: the probe's.")]
Compute = Annotated[float | None, typer.Option(min=0, help="Seconds of a backward pass; default: the probe's.")]
Rest = Annotated[float | None, typer.Option(min=0, help="Seconds of a step beside it and the exchange; default: 0.")]
Gamma = Annotated[float | None, typer.Option(min=1, help="Slow-down of the backward pass by communication.")]
Device = Annotated[
    str | None, typer.Option(help="Whose costs of methods to take without a probe: v100 (default), cpu.")
]
PerNode = Annotated[int | None, typer.Option(min=1, help="Workers of a node, which share its link; default: 1.")]
Inside = Annotated[str | None, typer.Option(help="Bandwidth between the workers of a node, such as 100gbit.")]
Formulas = Annotated[Literal["ours", "paper"], typer.Option(help="Our model, or the paper's formulas as they stand.")]

KINDS = ("compressors", "schedules", "models", "datasets", "fields")


@app.command()
def train(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="YAML file; `hvdcomp list fields` shows what it may hold.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="For example optimizer.lr=0.05 compression=none"),
    ] = None,
    workers: Annotated[
        int | None, typer.Option("-np", "--workers", min=1, help="Start so many workers; without it: one, here.")
    ] = None,
    launcher: Annotated[Literal["mpirun", "horovodrun"], typer.Option(help="What starts the workers.")] = "mpirun",
    hosts: Annotated[str | None, typer.Option("--hosts", "-H", help="node1:4,node2:4; default: this machine.")] = None,
    hostfile: Annotated[str | None, typer.Option(help="The launcher's file of hosts and slots.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the configuration as resolved, and stop.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the latest checkpoint in run_dir.")] = False,
    on_world_change: Annotated[
        Literal["error", "mean", "drop"],
        typer.Option(help="With --resume, residuals when the checkpoint is of another number of workers."),
    ] = "error",
) -> None:
    """Train what a configuration describes.

    With -np this starts the workers; the same command under mpirun, horovodrun or srun is one of them. An earlier run
    in run_dir is moved aside (runs/NAME.1, ...), never overwritten.
    """
    from hvdcomp.training.worker import is_launched, launched_rank, launched_size, quiet

    if is_launched():
        quiet(launched_rank())
        if workers not in (None, launched_size()):
            _fail(f"-np {workers} was given, but a launcher has already started {launched_size()}: leave out -np")
    settings = _checked(lambda: load(config, overrides or []))
    if show:
        typer.echo(_checked(lambda: _resolve(settings, workers or 1)).to_yaml(), nl=False)
    elif is_launched():
        raise typer.Exit(_work(settings, resume, on_world_change))
    else:
        _checked(lambda: _resolve(settings, workers or 1))
        if workers is None:
            raise typer.Exit(_work(settings, resume, on_world_change))
        again = [*(["--resume"] if resume else []), "--on-world-change", on_world_change]
        command = [sys.executable, "-m", "hvdcomp", "train", str(config), *again, *(overrides or [])]
        raise typer.Exit(_launch(_job(command, workers, launcher, hosts, hostfile), settings))


@app.command()
def compare(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="YAML file with base, variants, baseline, seeds, workers, run_dir.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="For example base.epochs=5 seeds=[0,1] variants.topk.compression.cf=9"
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option("-np", "--workers", min=1, help="Workers of each run; default: the file's.")
    ] = None,
    launcher: Annotated[Literal["mpirun", "horovodrun"], typer.Option(help="What starts the workers.")] = "mpirun",
    hosts: Annotated[str | None, typer.Option("--hosts", "-H", help="node1:4,node2:4; default: this machine.")] = None,
    hostfile: Annotated[str | None, typer.Option(help="The launcher's file of hosts and slots.")] = None,
    only: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Train these variants and the baseline; default: all.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Train with the first so many of the file's seeds; default: with all.")
    ] = None,
) -> None:
    """Train several configurations with several seeds each, and put what came out side by side.

    Runs that are finished with the same configuration are not repeated, so that the same command goes on with an
    interrupted comparison. The table and comparison.json in run_dir hold all that is finished.
    """
    from hvdcomp.training.comparison import compare as run_comparison
    from hvdcomp.training.progress import make_console
    from hvdcomp.training.worker import is_launched

    if is_launched():
        _fail("compare starts the workers of each run itself: call it without mpirun, horovodrun or srun")
    comparison = _checked(lambda: load_comparison(config, overrides or []))
    job = _job([], workers or comparison.workers, launcher, hosts, hostfile)
    chosen = only.split(",") if only else []
    raise typer.Exit(_checked(lambda: run_comparison(comparison, job, make_console(), chosen, seeds)))


@app.command()
def probe(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="Also measure this training configuration's model.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="For example data.batch_size=64")
    ] = None,
    workers: Annotated[int, typer.Option("-np", "--workers", min=1, help="Workers.")] = 2,
    launcher: Annotated[Literal["mpirun", "horovodrun"], typer.Option(help="What starts the workers.")] = "mpirun",
    hosts: Annotated[str | None, typer.Option("--hosts", "-H", help="node1:4,node2:4; default: this machine.")] = None,
    hostfile: Annotated[str | None, typer.Option(help="The launcher's file of hosts and slots.")] = None,
    methods: Annotated[str | None, typer.Option(help="For example topk,powersgd:rank=2; default: all.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file that `plan` and `whatif` read.")] = Path(
        "probe.json"
    ),
) -> None:
    """Measure a cluster through Horovod: latency, bandwidth, what methods cost on its devices, and a model's steps."""
    from hvdcomp.bench.kernels import parse_methods
    from hvdcomp.costmodel import probing

    job = _job([], workers, launcher, hosts, hostfile)
    model = None if config is None else (config, overrides or [])

    def action() -> list[dict[str, str]]:
        chosen = None if methods is None else [(m.name, m.params) for m in parse_methods(f"none,{methods}")]
        return probing.summary(probing.measure(job, chosen, model, output))

    _print_table(_checked(action))
    typer.echo(f"written: {output}")


@app.command()
def plan(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="A training configuration.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="For example bucket_mb=50")] = None,
    model: NetworkName = None,
    probe: ProbeFile = None,
    bandwidth: Bandwidth = None,
    latency: Latency = None,
    workers: Workers = None,
    compute: Compute = None,
    rest: Rest = None,
    gamma: Gamma = None,
    device: Device = None,
    per_node: PerNode = None,
    inside: Inside = None,
    formulas: Formulas = "ours",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the recommended configuration there.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Predict what each method would make of a step, and say what to use, or not to compress, and why."""
    from hvdcomp.bench.methods import check_writable
    from hvdcomp.costmodel import plan as planning
    from hvdcomp.costmodel.question import Options, ask

    options = Options(
        config, overrides or [], model, probe, bandwidth, latency, workers, compute, rest, gamma, device, per_node,
        inside,
    )  # fmt: skip

    def action() -> planning.Plan:
        if output is not None:
            check_writable(output, "--output")
        made = planning.make_plan(ask(options), formulas)
        if output is not None:
            planning.write_config(made, output)
        return made

    made = _checked(action)
    if as_json:
        typer.echo(json.dumps(made.as_json(), indent=2))
        return
    typer.echo(planning.headline(made))
    _print_table(planning.table(made))
    typer.echo("\n".join(planning.footnotes(made)))
    typer.echo(made.reason)


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, finished or not, or of a comparison.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE")] = Path("report.html"),
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the figures there, too, as PNG and SVG.")
    ] = None,
) -> None:
    """Show what runs did, on one page that works offline: figures, the papers' table, configuration and environment."""
    from hvdcomp.report.page import write

    for line in _checked(lambda: write(runs, output, figures)):
        typer.echo(line)


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    once: Annotated[bool, typer.Option("--once", help="Show what is there, and stop.")] = False,
) -> None:
    """Follow a run in the terminal until it ends: progress, loss, accuracy, CF, gain, bytes, and where time goes."""
    from rich.console import Console

    from hvdcomp.report.watch import watch as watch_run

    try:
        _checked(lambda: watch_run(run, Console(), once=once))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@app.command()
def whatif(
    what: Annotated[
        str,
        typer.Argument(
            metavar="SWEEP", help="bandwidth, workers, batch, compute, encoding, nodes, ratio, tradeoff, or grid."
        ),
    ],
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="A training configuration.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="For example bucket_mb=50")] = None,
    methods: Annotated[
        str, typer.Option(help="For example topk:cf=100,powersgd:rank=4:hierarchical=true.")
    ] = "powersgd:rank=4",
    values: Annotated[
        str | None, typer.Option(help="Of what is varied, such as 1,10,100; default: the paper's.")
    ] = None,
    model: NetworkName = None,
    probe: ProbeFile = None,
    bandwidth: Bandwidth = None,
    latency: Latency = None,
    workers: Workers = None,
    compute: Compute = None,
    rest: Rest = None,
    gamma: Gamma = None,
    device: Device = None,
    per_node: PerNode = None,
    inside: Inside = None,
    formulas: Formulas = "ours",
    output: Annotated[
        list[Path] | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Also write FILE.csv, FILE.png or FILE.svg; may be repeated."
        ),
    ] = None,
) -> None:
    """Predict how steps change with the network, the cluster, the batch, the device, or the method."""
    from hvdcomp.costmodel import whatif as asking
    from hvdcomp.costmodel.question import Options

    options = Options(
        config, overrides or [], model, probe, bandwidth, latency, workers, compute, rest, gamma, device, per_node,
        inside,
    )  # fmt: skip

    def action() -> tuple[list[dict[str, Any]], list[str]]:
        rows, said = asking.answer(what, options, asking.parse_methods(methods), formulas, asking.parse_values(values))
        for path in output or []:
            asking.write(rows, path, f"What if: {what}")
        return rows, said

    rows, said = _checked(action)
    _print_table(asking.table(rows))
    typer.echo("\n".join(said))


@app.command(name="list")
def list_(
    kind: Annotated[str, typer.Argument(help=" | ".join(KINDS))] = "compressors",
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """List what a configuration can name, and its fields."""
    if kind not in KINDS:
        _fail(f"there is no list of {kind!r}{did_you_mean(kind, KINDS)}; allowed: {', '.join(KINDS)}")
    rows = _ROWS[kind]()
    if as_json:
        typer.echo(json.dumps(rows, indent=2, default=str))
    else:
        _print_table(rows)


@bench.command()
def kernels(
    numel: Annotated[int, typer.Option(min=1, max=2**31 - 1, help="Elements of the gradient.")] = 25_000_000,
    dist: Annotated[
        Literal["laplace", "normal", "student-t", "real"], typer.Option(help="What the gradient is drawn from.")
    ] = "laplace",
    gradients: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="With --dist real: a run with record_gradients=N.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="For example topk:cf=100:values=fp16,topk:levels=[10,100],index code:density=0.1; default: all."
        ),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    repeat: Annotated[int | None, typer.Option(min=1, help="Rounds; default: what a few seconds allow.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the rows there too.")] = None,
) -> None:
    """Time every method on one worker's CPU, without a network: from a gradient to payloads, and back to the mean."""
    from hvdcomp.bench import kernels as bench_kernels

    def action() -> tuple[str, list[dict[str, Any]]]:
        return bench_kernels.run(numel, dist, gradients, methods, threads=threads, repeat=repeat, json_file=json_file)

    headline, rows = _checked(action)
    typer.echo(headline)
    _print_table(bench_kernels.table(rows))


@bench.command()
def exchange(
    model: Annotated[
        str,
        typer.Option(help="resnet50, resnet101, vgg16, lstm-ptb, bert-base, or the file of a training configuration."),
    ] = "resnet50",
    workers: Annotated[int, typer.Option("-np", "--workers", min=2, max=250, help="Workers, on a host each.")] = 2,
    bandwidth: Annotated[
        str, typer.Option(help="Of the hosts' links, such as 100mbit,1gbit,10gbit,none; none is unlimited.")
    ] = "100mbit,1gbit,none",
    compression: Annotated[
        str,
        typer.Option(
            help="Methods beside plain Horovod, such as topk:cf=100,powersgd:rank=4,topk:cf=2:never_slower=true."
        ),
    ] = "none,topk:cf=100,powersgd:rank=4",
    per_host: Annotated[int, typer.Option(min=1, help="Workers on each host; -np is those on all.")] = 1,
    launcher: Annotated[
        Literal["mpirun", "horovodrun"], typer.Option(help="horovodrun: all workers on this host.")
    ] = "mpirun",
    compute: Annotated[
        str,
        typer.Option(metavar="SECONDS|real", help="A simulated backward pass, or the training configuration's own."),
    ] = "0",
    limit: Annotated[
        float, typer.Option(min=1, help="Seconds at a bandwidth after which no further round begins.")
    ] = 120.0,
    memory: Annotated[bool, typer.Option("--memory", help="Also: how much memory each method adds, alone.")] = False,
    predict: Annotated[bool, typer.Option("--predict", help="Also: probe, and what the cost model predicts.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the rows there too.")] = None,
) -> None:
    """Time whole exchanges between hosts, against plain Horovod, which runs in the same rounds.

    As root on Linux the hosts are network namespaces with links of a chosen bandwidth, which are gone afterwards.
    """
    from hvdcomp.bench import exchange as bench_exchange
    from hvdcomp.bench import prediction as bench_prediction

    def action() -> list[dict[str, Any]]:
        return bench_exchange.run(
            model, workers, bandwidth, compression, per_host=per_host, launcher=launcher,
            compute_s=bench_exchange.compute_s(compute), limit_s=limit, memory=memory, predict=predict,
            json_file=json_file,
        )  # fmt: skip

    rows = _checked(action)
    _print_table(bench_exchange.table(rows))
    if predict:
        typer.echo(bench_prediction.errors(rows))


@schedule_.command()
def replay(
    metrics: Annotated[Path, typer.Argument(metavar="METRICS.jsonl", help="Of a run's folder.")],
    parameters: Annotated[
        list[str] | None, typer.Argument(metavar="NAME=VALUE", help="The schedule's, for example epsilon=0.9")
    ] = None,
    schedule: Annotated[
        str, typer.Option(help="A name, {name: ..., ...}, or a configuration file that has one.")
    ] = "gravac",
    workers: Annotated[
        int | None, typer.Option("-np", "--workers", min=1, help="Of the run; default: what its summary.json says.")
    ] = None,
) -> None:
    """Say what a schedule would have decided on a recorded run, and where that differs from what was done."""
    from hvdcomp.training import replay as replaying

    def action() -> tuple[int, list[dict[str, str]], str]:
        rows = replaying.read_trace(metrics)
        chosen = replaying.make_schedule(schedule, parameters or [])
        steps, why = replaying.replay(rows, chosen, workers or replaying.workers_of(metrics) or 1)
        return len(steps), replaying.differences(steps), why

    count, table, why = _checked(action)
    if table:
        _print_table(table)
    typer.echo(f"{count} steps replayed, {'otherwise in the above' if table else 'all as they were'}")
    if why:
        typer.echo(f"stopped there: {why}")


def main() -> None:
    """Entry point of the command."""
    logging.basicConfig(level=logging.WARNING, format="hvdcomp: %(message)s", stream=sys.stderr)
    if "" not in sys.path:
        sys.path.insert(0, "")  # the users' own factories lie in their working folder
    app()


def _resolve(settings: RunConfig, workers: int) -> RunConfig:
    from hvdcomp.training.parts import resolve

    return resolve(settings, workers)


def _work(settings: RunConfig, resume: bool, on_world_change: str) -> int:
    """Be a worker."""
    from hvdcomp.training.worker import is_launched, run_guarded, start

    def action() -> int:
        from hvdcomp.training.trainer import Trainer

        worker = start(settings)
        Trainer(_resolve(settings, worker.count), worker, resume, on_world_change).run()
        return 0

    code = run_guarded(action)
    return code if is_launched() else _reported(code, settings)


def _launch(job: Job, settings: RunConfig) -> int:
    from hvdcomp.training.launcher import run
    from hvdcomp.training.progress import progress_style

    return _reported(int(_checked(lambda: run(job, progress_style()))), settings)


def _reported(code: int, settings: RunConfig) -> int:
    """Say how a job ended that did not succeed, and what is left of it."""
    if code:
        why = "was interrupted, " if code - 128 in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM) else ""
        log.error("the job %sended with exit code %d; %s", why, code, _last_checkpoint(settings))
    return code


def _job(command: Sequence[str], workers: int, launcher: str, hosts: str | None, hostfile: str | None) -> Job:
    from hvdcomp.training.launcher import Job

    return Job(command, workers, launcher, hosts, hostfile)


def _last_checkpoint(settings: RunConfig) -> str:
    from hvdcomp.training.checkpoint import CheckpointError, find_latest

    try:
        latest = find_latest(Path(str(settings.run_dir)).expanduser() / "checkpoints")
    except CheckpointError as error:
        return str(error)
    if latest is None:
        return "there is no checkpoint yet"
    return f"the checkpoint of step {latest.step} is intact, --resume goes on from it"


def _checked(action: Callable[[], Any]) -> Any:
    """Run it; an error of the user's becomes one message and exit code 2, a signal that of the job it ended."""
    from hvdcomp.bench.network import NetworkError
    from hvdcomp.training.launcher import Interrupted
    from hvdcomp.training.worker import LaunchError

    try:
        return action()
    except Interrupted as interrupt:
        typer.echo("hvdcomp: interrupted", err=True)
        raise typer.Exit(interrupt.args[0]) from interrupt
    except (ConfigError, LaunchError, NetworkError) as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"a file cannot be read or written: {error}")


def _fail(message: str) -> None:
    typer.echo(f"hvdcomp: error: {message}", err=True)
    raise typer.Exit(2)


def _compressors() -> list[dict[str, Any]]:
    from hvdcomp.compressors import available

    return [
        {
            "name": name,
            "collective": cls.collective,
            "parameters": _plain(cls.parameters()),
            "summary": _summary(cls),
            "source": cls.source,
        }
        for name, cls in available().items()
    ]


def _schedules() -> list[dict[str, Any]]:
    from hvdcomp.schedules import REGISTRY

    return [
        {
            "name": name,
            "parameters": {parameter.name: parameter.default for parameter in cls.parameters()},
            "summary": _summary(cls),
            "source": cls.source,
        }
        for name, cls in REGISTRY.items()
    ]


def _models() -> list[dict[str, Any]]:
    import torch

    from hvdcomp.training.models import MODELS, parameter_count

    def build(factory: Callable[..., torch.nn.Module]) -> torch.nn.Module:
        with torch.device("meta"):  # without memory
            return factory()

    return [
        {
            "name": entry.name,
            "dataset": entry.dataset,
            "parameters": parameter_count(build(entry.factory)),
            "arguments": _plain(entry.parameters),
            "summary": entry.summary,
        }
        for entry in MODELS
    ]


def _datasets() -> list[dict[str, Any]]:
    from hvdcomp.training.datasets import DATASETS

    return [
        {"name": entry.name, "parameters": _plain(entry.parameters), "summary": entry.summary} for entry in DATASETS
    ]


def _fields() -> list[dict[str, Any]]:
    return [
        {"field": name, "type": kind, "default": default, "meaning": meaning}
        for name, kind, default, meaning in fields()
    ]


_ROWS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "compressors": _compressors,
    "schedules": _schedules,
    "models": _models,
    "datasets": _datasets,
    "fields": _fields,
}


def _plain(parameters: dict[str, Any]) -> dict[str, Any]:
    """Defaults, None where a value must be given."""
    return {name: None if default is inspect.Parameter.empty else default for name, default in parameters.items()}


def _summary(cls: type) -> str:
    return (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ")


def _print_table(rows: Sequence[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table

    table = Table(*(Column(name, overflow="fold") for name in rows[0]), box=box.SIMPLE)
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={item}" for name, item in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
