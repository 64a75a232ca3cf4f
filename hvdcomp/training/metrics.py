"""What a run writes down: a line a step, TensorBoard events, and the sums for the summary."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

Row = Mapping[str, Any]
"""One step as a line of metrics.jsonl."""

PARTS = ("compute_s", "compress_s", "wait_s", "decide_s")
"""What an iteration's seconds are made of: they add up to `iteration_s`."""

TIMES = (*PARTS, "encode_s", "decode_s", "exchange_s", "iteration_s")
"""All times of a step. `encode_s` and `decode_s` are what `compress_s` is made of; `exchange_s`, from the first
collective's start to the last one's end, overlaps the parts."""


class MetricsLog:
    """Writes metrics.jsonl, flushed line by line, and every `log_every` steps a point to TensorBoard.

    A line holds, all of worker 0: step (from 1), epoch (from 0), loss (of its own part of the batch), lr, batches (that
    it computed); cf that was sent (1 is dense), decision (which of the two levels was sent; -1 is dense, or no adaptive
    schedule), levels (the two CFs that were evaluated) and gains (the smoothed gain at each), skipped; bytes_sent
    (handed to collectives), bytes_dense (what plain Horovod would have handed over), bytes_received, messages (of its
    collectives, one after the other), elements (that each method compressed); and the `TIMES` in seconds, those of the
    modelled network if there is one. After a step that was followed by an evaluation: accuracy, top5_accuracy,
    test_loss and (of a text) perplexity, over the test set, of all workers; layer_bytes ([sent, dense] of each tensor,
    since the run began). null: not known.

    Under a schedule that decides: statistics (of the two levels: `hvdcomp.schedules.Statistics`, as a vector), or where
    it decides for each bucket apart cfs (bucket: its factor); decision, levels and gains tell nothing then.
    Under a schedule that assigns settings to units (tensors): switched, where some change (unit: its setting from the
    next step on); and at the end of a phase over which gradients were added up, phase: its steps, units (name: shape),
    and by unit sums (of the elements, of their squares) and overlaps (see `hvdcomp.schedules.Overlap`).

    A resumed run goes on behind `after_step`: later lines, of steps that are done again, are removed.

    Raises OSError when the disk is full.
    """

    def __init__(self, folder: Path, log_every: int, after_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        path = folder / "metrics.jsonl"
        _keep_lines(path, after_step)
        self._log_every = log_every
        self._lines: IO[str] = path.open("a", encoding="utf-8", buffering=1)
        self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=after_step + 1, flush_secs=30)

    def write(self, row: Row) -> None:
        self._lines.write(json.dumps({name: _json_value(value) for name, value in row.items()}) + "\n")
        if row["step"] % self._log_every == 0 or "accuracy" in row:
            for tag, value in _scalars(row):
                self._events.add_scalar(tag, value, row["step"])

    def close(self) -> None:
        self._lines.close()
        self._events.close()


@dataclass
class Totals:
    """Sums over the steps of a run, on this rank; a checkpoint holds them, so that a resumed run goes on counting."""

    steps: int = 0
    skipped: int = 0
    samples: int = 0
    bytes_sent: int = 0
    bytes_dense: int = 0
    bytes_received: int = 0
    seconds: float = 0.0
    """Wall time, evaluation and checkpoints included."""
    times: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIMES, 0.0))
    """Sums of each of `TIMES`."""
    cf_sum: float = 0.0
    cf_steps: dict[str, int] = field(default_factory=dict)
    """Steps sent at each CF, in the order of their first visit; "1" is dense."""
    layer_bytes: dict[str, list[float]] = field(default_factory=dict)
    """[sent, dense] of each tensor."""

    def add(self, row: Row, layer_bytes: Mapping[str, tuple[float, int]]) -> None:
        self.steps += 1
        self.skipped += row["skipped"]
        for name in ("bytes_sent", "bytes_dense", "bytes_received"):
            setattr(self, name, getattr(self, name) + (row[name] or 0))
        for name in TIMES:
            self.times[name] += row[name] or 0.0
        self.cf_sum += row["cf"]
        cf = f"{row['cf']:g}"
        self.cf_steps[cf] = self.cf_steps.get(cf, 0) + 1
        for name, (sent, dense) in layer_bytes.items():
            sums = self.layer_bytes.setdefault(name, [0, 0])
            sums[0] += sent
            sums[1] += dense

    @property
    def cf_mean(self) -> float:
        """Mean over steps; a dense step counts 1."""
        return self.cf_sum / self.steps if self.steps else 1.0

    @property
    def compression_ratio(self) -> float:
        """How many times fewer bytes were sent than plain Horovod would have, indices included."""
        return self.bytes_dense / self.bytes_sent if self.bytes_sent else 1.0

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)


def known_by(result: Row) -> str:
    """The metric that an evaluation is known by: "perplexity" where there is one (lower is better), else "accuracy"."""
    return "perplexity" if "perplexity" in result else "accuracy"


def score_text(result: Row) -> str:
    """ "accuracy 0.9972", "perplexity 85.31"."""
    metric = known_by(result)
    return f"{metric} {result[metric]:.{2 if metric == 'perplexity' else 4}f}"


def _keep_lines(path: Path, up_to_step: int) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= up_to_step:
                kept.append(line)
        except ValueError:
            break  # half a line, written as the disk filled up or the process was killed
    path.write_text("".join(kept), encoding="utf-8")


def _scalars(row: Row) -> list[tuple[str, float]]:
    """Tag and value of what TensorBoard shows."""
    tags = [(f"seconds/{name}", row[name]) for name in TIMES]
    tags += [(f"train/{name}", row[name]) for name in ("loss", "lr")]
    tags += [(f"test/{name}", row.get(name)) for name in ("accuracy", "perplexity", "test_loss")]
    tags += [(f"compression/{name}", row[name]) for name in ("cf", "bytes_sent", "bytes_dense")]
    if row["gains"] is not None:
        tags += [("compression/gain_min", row["gains"][0]), ("compression/gain_candidate", row["gains"][1])]
    return [(tag, value) for tag, value in tags if value is not None]


def _json_value(value: Any) -> Any:
    """JSON knows no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
