"""Figures of runs and comparisons, each with a title that asks what it answers.

Colours are told apart by colour-blind readers, too (after Okabe and Ito, "Color Universal Design", 2008), and never
alone: lines differ in dashes and markers, bars in hatches.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from hvdcomp.training.units import size

Array = np.ndarray[Any, np.dtype[np.float64]]

Quantity = Literal["step", "bytes", "seconds", "share", "factor", "number"]
"""What an axis counts, which says how its ticks are written."""

INK, GRID, PAPER = "#1b1f24", "#d8dde3", "#fefefe"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5b5b5b")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.3)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = "osD^vPX*"
HATCHES = ("", "///", "--", "\\\\\\", "xx", "||")

CSS_COLOURS = {INK: "--ink", GRID: "--grid", PAPER: "--paper"} | {c: f"--series-{i}" for i, c in enumerate(SERIES)}
"""The custom property of the page that stands for a colour where a figure is part of it, so that it can be dark."""

SMOOTHING = 0.1
"""Bandwidth of the distribution over CFs, in decades."""

POINTS = 400
"""The most points that a line is drawn with."""

TITLE_WIDTH = 52
"""Letters that fit above a figure."""

_RC = {
    "font.size": 9.5,
    "font.family": ["DejaVu Sans"],
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.7,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.handlelength": 3.2,
    "hatch.linewidth": 0.8,
    "svg.fonttype": "none",
}


@dataclass(frozen=True)
class Line:
    """One curve.

    Attributes:
        slot: chooses colour, dashes and marker; one run has the same in all figures.
        low, high: a band around it, such as the spread over seeds.
        marks: (x, y) of events on it.
    """

    label: str
    slot: int
    x: Array
    y: Array
    low: Array | None = None
    high: Array | None = None
    marks: tuple[Array, Array] | None = None


@dataclass(frozen=True)
class Plot:
    """A figure, with what it is called and what it shows in words; `note` says how to read it."""

    name: str
    title: str
    description: str
    figure: Figure
    note: str = ""

    def save(self, folder: Path, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
        """Write NAME.png and NAME.svg, with the title on them. Returns their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        self.figure.suptitle(textwrap.fill(self.title, TITLE_WIDTH), x=0.02, ha="left", fontsize=10.5)
        paths = [folder / f"{self.name}.{suffix}" for suffix in formats]
        with _style(self.name):
            for path in paths:
                metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {}
                self.figure.savefig(path, dpi=160, facecolor=PAPER, metadata=metadata)
        self.figure.suptitle("")
        return paths

    def svg(self) -> str:
        """For a page: without a title, in the page's colours, with identifiers of its own."""
        buffer = io.StringIO()
        with _style(self.name):
            self.figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        text = buffer.getvalue()
        text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
        text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{self.name}-", text)
        text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
        text = re.sub(r"font: ([\d.]+px) 'DejaVu Sans'", r"font-size: \1", text)
        return re.sub(r"#[0-9a-f]{6}\b", _css_colour, text)


def curves(
    lines: Sequence[Line],
    *,
    name: str,
    title: str,
    x: tuple[str, Quantity],
    y: tuple[str, Quantity],
    log_x: bool = False,
    log_y: bool = False,
    stairs: bool = False,
    rules: Mapping[float, str] | None = None,
) -> Plot:
    """Curves over a common axis.

    Args:
        x, y: label and quantity of each axis.
        stairs: a value holds until the next one.
        rules: heights to compare the curves with, and what each is called.
    """
    seconds = max((float(line.x[-1]) for line in lines if len(line.x)), default=0.0) if x[1] == "seconds" else 0.0
    unit, scale = _duration(seconds) if x[1] == "seconds" else ("", 1.0)
    with _style(name):
        figure, axes = _axes(legend=len(lines) if len(lines) > 1 else 0)
        axes.set_xscale("log" if log_x else "linear")
        axes.set_yscale("log" if log_y else "linear")
        for line in lines:
            _draw(axes, line, scale, stairs)
        for height, called in (rules or {}).items():
            axes.axhline(height, color=INK, linewidth=1.0, linestyle=(0, (2, 2)))
            axes.annotate(
                f"{called}\n{height:g}", (1, height), (3, 0), ("axes fraction", "data"), "offset points", va="center"
            )
        _label(axes.xaxis, f"{x[0]}, {unit}" if unit else x[0], x[1], log_x)
        _label(axes.yaxis, y[0], y[1], log_y)
        if len(lines) > 1:
            figure.legend(handles=_handles(lines), loc="outside lower left", ncols=_columns(lines))
    return Plot(name, title, _described(lines, x[0], y[0], scale, unit), figure)


def distribution(steps_at: Mapping[str, Mapping[float, int]], *, slots: Mapping[str, int], title: str) -> Plot:
    """Over which CFs the steps were spread, on a logarithmic axis.

    The curve is a Gaussian kernel density estimate, scaled so that its height at a CF that has no neighbours is the
    share of steps that were sent at it; a marker is that share itself. As in GraVAC's figures, 1 is dense.

    Args:
        steps_at: for each run, the steps that were sent at each CF (>= 1).
    """
    name = "distribution"
    factors = [np.log10(factor) for counts in steps_at.values() for factor in counts] or [0.0]
    grid = np.linspace(min(factors) - 5 * SMOOTHING, max(factors) + 5 * SMOOTHING, POINTS)
    lines, said = [], []
    for label, counts in steps_at.items():
        whole = max(1, sum(counts.values()))
        at, share = np.array(list(counts), dtype=float), np.array([n / whole for n in counts.values()])
        kernel = np.exp(-0.5 * ((grid[:, None] - np.log10(at)[None, :]) / SMOOTHING) ** 2)
        lines.append(Line(label, slots[label], 10**grid, kernel @ share, marks=(at, share)))
        most = at[int(share.argmax())] if len(at) else 1.0
        said.append(f"{label}: {share.max(initial=0):.0%} of {whole} steps at {factor_text(most)}")
    with _style(name):
        figure, axes = _axes(legend=len(lines) if len(lines) > 1 else 0)
        axes.set_xscale("log")
        for line in lines:
            colour, dashes, marker = look(line.slot)
            axes.plot(line.x, line.y, color=colour, linestyle=dashes)
            axes.fill_between(line.x, 0, line.y, color=colour, alpha=0.12, linewidth=0)
            assert line.marks is not None
            axes.plot(*line.marks, color=colour, linestyle="none", marker=marker)
        axes.set_ylim(bottom=0)
        _label(axes.xaxis, "CF (1 is dense)", "factor", True)
        _label(axes.yaxis, "share of steps", "share", False)
        if len(lines) > 1:
            figure.legend(handles=_handles(lines), loc="outside lower left", ncols=_columns(lines))
    return Plot(name, title, f"Distribution of steps over CFs. {'; '.join(said)}.", figure)


def stacked(
    rows: Mapping[str, Mapping[str, float]],
    *,
    name: str,
    title: str,
    label: str,
    marks: Mapping[str, float],
    mark: str,
) -> Plot:
    """A horizontal bar for each row, made of its parts, in the same order everywhere.

    Args:
        rows: values of the parts of each row.
        label: of the axis.
        marks: a value of a row to compare its bar with, drawn as a line across it; `mark` says what it is.
    """
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    with _style(name):
        figure, axes = _axes(legend=len(parts) + bool(marks), height=1.3 + 0.34 * len(rows), columns=3)
        for number, part in enumerate(parts):
            left = [sum(row.get(before, 0.0) for before in parts[:number]) for row in rows.values()]
            axes.barh(
                [_shortened(row, 22) for row in rows],
                [row.get(part, 0.0) for row in rows.values()],
                0.6,
                left=left,
                label=part,
                color=SERIES[number % len(SERIES)],
                hatch=HATCHES[number % len(HATCHES)],
                edgecolor=PAPER,
                linewidth=0.5,
            )
        marked = [(marks[row], number) for number, row in enumerate(rows) if row in marks]
        if marked:
            at, places = zip(*marked, strict=True)
            lows, highs = [place - 0.42 for place in places], [place + 0.42 for place in places]
            axes.vlines(at, lows, highs, color=INK, linewidth=2.2, label=mark)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(label)
        figure.legend(loc="outside lower left", ncols=3, handlelength=1.6)
    said = "; ".join(f"{row}: " + ", ".join(f"{p} {v:.3g}" for p, v in values.items()) for row, values in rows.items())
    return Plot(name, title, f"{label}. {said}.", figure)


def bars(
    rows: Mapping[str, Mapping[str, float]], *, slots: Mapping[str, int], name: str, title: str, label: str
) -> Plot:
    """Groups of horizontal bars on a logarithmic axis of bytes: for each row a bar for each of its entries.

    Args:
        slots: colour of each entry; -1 is what the others are compared with, drawn as an outline.
    """
    entries = list(dict.fromkeys(entry for row in rows.values() for entry in row))
    thick = 0.8 / max(1, len(entries))
    with _style(name):
        figure, axes = _axes(
            legend=len(entries), height=1.0 + (0.14 + 0.13 * len(entries)) * max(1, len(rows)), columns=2
        )
        places = np.arange(len(rows), dtype=float)
        for number, entry in enumerate(entries):
            slot = slots[entry]
            fill = {"color": "none", "edgecolor": INK} if slot < 0 else {"color": look(slot)[0], "edgecolor": PAPER}
            axes.barh(
                places + (number - (len(entries) - 1) / 2) * thick,
                [row.get(entry, np.nan) for row in rows.values()],
                thick,
                label=entry,
                hatch="" if slot < 0 else HATCHES[slot % len(HATCHES)],
                linewidth=0.8,
                **fill,  # type: ignore[arg-type]
            )
        axes.set_yticks(places, [_shortened(row, 24) for row in rows])
        axes.set_xscale("log")
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        _label(axes.xaxis, label, "bytes", True)
        figure.legend(loc="outside lower left", ncols=2, handlelength=1.6)
    said = "; ".join(f"{row}: " + ", ".join(f"{e} {size(v)}" for e, v in r.items()) for row, r in rows.items())
    return Plot(name, title, f"{label}. {said}.", figure)


def binned(x: Array, y: Array, bins: int = POINTS, *, geometric: bool = False) -> tuple[Array, Array, Array, Array]:
    """At most `bins` points of a long curve: (x, mean y, least y, largest y) of as many equal stretches.

    Values that are not finite count nowhere. A geometric mean is for factors (> 0).
    """
    known = np.isfinite(y) & np.isfinite(x)
    x, y = x[known], y[known]
    if len(x) <= bins:
        return x, y, y, y
    starts = np.linspace(0, len(x), bins, endpoint=False).astype(int)
    sizes = np.diff([*starts, len(x)])
    values = np.log(y) if geometric else y
    means = np.add.reduceat(values, starts) / sizes
    middle = np.add.reduceat(x, starts) / sizes
    middle[0], middle[-1] = x[0], x[-1]
    return (
        middle,
        np.exp(means) if geometric else means,
        np.minimum.reduceat(y, starts),
        np.maximum.reduceat(y, starts),
    )


def key(slot: int) -> str:
    """A piece of a run's line as SVG, for a page."""
    dashes, marker = DASHES[slot % len(DASHES)], MARKERS[slot % len(MARKERS)]
    figure = Figure(figsize=(0.5, 0.16))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")
    axes.plot([0, 1, 2], [0, 0, 0], color=look(slot)[0], linestyle=dashes, marker=marker, markevery=[1])
    return Plot(f"key-{slot}", "", "", figure).svg()


def look(slot: int) -> tuple[str, Any, str]:
    """Colour, dashes and marker of a run."""
    return SERIES[slot % len(SERIES)], DASHES[slot % len(DASHES)], MARKERS[slot % len(MARKERS)]


def factor_text(factor: float) -> str:
    return "dense" if factor == 1 else f"CF {factor:.4g}"


def _style(name: str) -> AbstractContextManager[None]:
    return matplotlib.rc_context(_RC | {"svg.hashsalt": name})  # type: ignore[arg-type]


def _axes(*, legend: int, height: float = 2.6, columns: int = 2) -> tuple[Figure, Axes]:
    """A figure small enough for a phone; entries of a legend go below the axes."""
    figure = Figure(figsize=(4.4, height + 0.21 * -(-legend // columns)), layout="constrained")
    return figure, figure.add_subplot()


def _draw(axes: Axes, line: Line, scale: float, stairs: bool) -> None:
    colour, dashes, marker = look(line.slot)
    x, style = line.x / scale, "steps-post" if stairs else "default"
    every = max(1, len(x) // 10)
    shown = marker if line.marks is None else ""
    axes.plot(
        x, line.y, color=colour, linestyle=dashes, drawstyle=style, marker=shown, markevery=(line.slot % every, every)
    )
    if line.low is not None and line.high is not None:
        axes.fill_between(
            x, line.low, line.high, step="post" if stairs else None, color=colour, alpha=0.18, linewidth=0
        )
    if line.marks is not None:
        at, value = line.marks
        axes.plot(at / scale, value, color=colour, linestyle="none", marker=marker, markeredgecolor=INK)


def _handles(lines: Sequence[Line]) -> list[Line2D]:
    looks = [(line, *look(line.slot)) for line in lines]
    return [
        Line2D([], [], color=colour, linestyle=dashes, marker=marker, label=_shortened(line.label, 30))
        for line, colour, dashes, marker in looks
    ]


def _columns(lines: Sequence[Line]) -> int:
    return 2 if max(len(line.label) for line in lines) <= 24 else 1


def _label(axis: Axis, label: str, quantity: Quantity, log: bool) -> None:
    axis.set_label_text(label)
    if quantity == "bytes":
        axis.set_major_formatter(EngFormatter(unit="B"))
        if not log:
            axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    elif quantity == "share":
        axis.set_major_formatter(PercentFormatter(xmax=1.0))
    elif quantity == "step":
        axis.set_major_formatter(EngFormatter(sep=""))
    elif log:
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if log:
        low, high = sorted(axis.get_view_interval())
        narrow = high / low < 30
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if narrow else (1.0,)))
        axis.set_minor_formatter(NullFormatter())


def _duration(seconds: float) -> tuple[str, float]:
    """The unit to write so many seconds in, and its length."""
    return ("s", 1.0) if seconds < 300 else ("min", 60.0) if seconds < 3 * 3600 else ("h", 3600.0)


def _described(lines: Sequence[Line], x: str, y: str, scale: float, unit: str) -> str:
    ends = [
        f"{line.label}: from {line.y[0]:.4g} to {line.y[-1]:.4g} at {line.x[-1] / scale:.4g} {unit}".rstrip()
        for line in lines
        if len(line.y)
    ]
    return f"{y} over {x}. {'; '.join(ends)}."


def _shortened(text: str, length: int) -> str:
    """The end of a long name tells most."""
    return text if len(text) <= length else "…" + text[-length + 1 :]


def _css_colour(match: re.Match[str]) -> str:
    variable = CSS_COLOURS.get(match[0])
    return f"var({variable})" if variable else match[0]
