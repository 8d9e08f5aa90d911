"""The picture of incidents: when they happened and to which ranks, and how long each recovery took.

The colours are those of Okabe and Ito, and of Tol: colour-blind people can tell them apart. Marks differ in shape too.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter, date2num
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from lightning_replica.core.output import size
from lightning_replica.core.points import PHASES
from lightning_replica.recovery.incident import Incident

# Shape and colour of the mark for each way in which a fault is noticed.
MARKS: dict[str, tuple[str, str]] = {
    "death": ("X", "#D55E00"),
    "hang": ("s", "#E69F00"),
    "corrupted shard": ("D", "#CC79A7"),
    "device error": ("P", "#56B4E9"),
    "worker death": ("v", "#F0E442"),
    "exception": ("o", "#0072B2"),
    "peer gone": ("^", "#009E73"),
    "end": ("*", "#999999"),
}
COLOURS = dict(zip(PHASES, ("#88CCEE", "#44AA99", "#DDCC77", "#CC6677", "#AA4499", "#6A5ACD"), strict=True))

# All lengths are in inches. In a row, number, mark, step and text come before the bar.
_WIDTH, _EDGE, _LANES_LEFT, _ROWS_LEFT = 12.0, 0.45, 1.15, 5.1
_NUMBER, _MARK, _STEP, _WORDS = 0.80, 0.98, 1.85, 1.98
_TOP, _LANE, _AXIS, _BOTTOM = 1.0, 0.30, 1.1, 0.7
_TEXT = 47  # characters of a row's text
_MANY = 40  # with more incidents than this, everything is drawn smaller


@dataclass(frozen=True)
class Theme:
    """Colours of a page."""

    page: str
    text: str
    faint: str
    line: str
    alarm: str


LIGHT = Theme("#ffffff", "#1f2328", "#656d76", "#d0d7de", "#c01c28")
DARK = Theme("#0d1117", "#e6edf3", "#8d96a0", "#30363d", "#ff7b72")


def headline(incidents: Sequence[Incident]) -> tuple[str, str]:
    """Return a summary of the incidents: a headline, and the line below it."""
    failed = sum(incident.failed for incident in incidents)
    count = f"{len(incidents)} incident{'s' * (len(incidents) != 1)}"
    outcome = f"{failed} not recovered" if failed else "all recovered" if len(incidents) > 1 else "recovered"
    well = [incident.recovery_s for incident in incidents if not incident.failed]
    begin, end = incidents[0].began, incidents[-1].began
    steps = sorted({incidents[0].step, incidents[-1].step})
    parts = [f"{begin:%Y-%m-%d %H:%M:%S}" + (f" to {end:%Y-%m-%d %H:%M:%S}" if end > begin else "") + " UTC"]
    parts.append("step" + "s" * (len(steps) > 1) + " " + " to ".join(f"{step:,}" for step in steps))
    parts += [f"median recovery {seconds(statistics.median(well))}"] if len(well) > 1 else []
    return f"{count}, {outcome}", "  ·  ".join(parts)


def draw(incidents: Sequence[Incident], theme: Theme = LIGHT) -> Figure:
    """Draw the picture.

    Args:
        incidents: At least one incident, in order of time.
        theme: The colours of the picture.
    """
    lanes = _lanes(incidents)
    upper, lower = _upper(lanes), (0.31 if len(incidents) <= _MANY else 0.2) * len(incidents) + 0.1
    height = _TOP + upper + _AXIS + lower + _BOTTOM
    figure = Figure(figsize=(_WIDTH, height), facecolor=theme.page)

    def panel(left: float, top: float, tall: float) -> Axes:
        box = (left / _WIDTH, 1 - (top + tall) / height, 1 - (left + _EDGE) / _WIDTH, tall / height)
        axes = figure.add_axes(box, facecolor="none")
        axes.tick_params(colors=theme.faint, labelsize=8.5, length=0)
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(theme.line)
        return axes

    title, below = headline(incidents)
    below += "  ·  bars last until the first good step"
    left, middle = _EDGE / _WIDTH, 1 - (_TOP + upper + _AXIS - 0.22) / height
    figure.text(left, 1 - 0.34 / height, title, color=theme.text, size=15, weight="bold", va="center")
    figure.text(left, 1 - 0.63 / height, below, color=theme.faint, size=9.5, va="center")
    figure.text(left, middle, "What each recovery took", color=theme.text, size=11, weight="bold", va="center")
    _draw_lanes(panel(_LANES_LEFT, _TOP, upper), incidents, lanes, theme)
    _draw_rows(panel(_ROWS_LEFT, _TOP + upper + _AXIS, lower), incidents, theme)
    _legends(figure, incidents, theme, 1 - 0.34 / height, middle)
    return figure


def seconds(value: float) -> str:
    """Return a duration, given in seconds, as text with its unit."""
    if value < 0.9995:
        return f"{value * 1000:.3g} ms"
    return f"{value:.3g} s" if value < 100 else f"{value:,.0f} s"


def _lanes(incidents: Sequence[Incident]) -> dict[int, int]:
    """Return the place from the top of each rank that takes part in an incident; -1 stands for an unknown rank."""
    ranks = {rank for each in incidents for rank in (*each.fault.ranks, *each.replaced)}
    ranks |= {rank for each in incidents for move in each.moves for rank in (move.source, move.target)}
    if any(not each.fault.ranks for each in incidents):
        ranks.add(-1)
    return {rank: place for place, rank in enumerate(sorted(ranks, key=lambda rank: (rank < 0, rank)))}


def _draw_lanes(axes: Axes, incidents: Sequence[Incident], lanes: dict[int, int], theme: Theme) -> None:
    begin, end = incidents[0].began, max(each.ended for each in incidents)
    margin = max((end - begin) * 0.04, timedelta(seconds=1 if len(incidents) > 1 else 30))
    low, high = _number(begin - margin), _number(end + margin)
    axes.set_xlim(low, high)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_yticks(list(lanes.values()), ["unknown" if rank < 0 else f"rank {rank}" for rank in lanes])
    axes.hlines(list(lanes.values()), low, high, color=theme.line, linewidth=1, zorder=1)
    for each in incidents:
        _draw_incident(axes, each, lanes, theme, many=len(incidents) > _MANY)
    locator = AutoDateLocator(minticks=3, maxticks=8)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    axes.xaxis.get_offset_text().set_color(theme.faint)
    axes.xaxis.get_offset_text().set_fontsize(8.5)
    _name_steps(axes, incidents, theme, (high - low) * 0.075)


def _draw_incident(axes: Axes, each: Incident, lanes: dict[int, int], theme: Theme, many: bool) -> None:
    """Draw which ranks failed, how long training stood still, and which rank sent its shard to which."""
    at, end, small = _number(each.began), _number(each.ended), 0.65 if many else 1.0
    axes.axvspan(at, end, color=theme.line, alpha=0.35, linewidth=0, zorder=0)
    if each.failed:
        axes.axvline(end, color=theme.alarm, linewidth=1.2, linestyle=(0, (3, 2)), zorder=2)
    sent = _number(each.began + timedelta(seconds=_until_repaired(each)))
    for move in each.moves:
        arrow = {
            "arrowstyle": "-|>", "color": theme.faint, "linewidth": 1.1 * small, "shrinkA": 2, "shrinkB": 6 * small,
            "mutation_scale": 9 * small, "alpha": small, "connectionstyle": f"arc3,rad={0 if many else -0.2}",
        }  # fmt: skip
        axes.annotate("", (sent, lanes[move.target]), (sent, lanes[move.source]), arrowprops=arrow, zorder=3)
        axes.plot(sent, lanes[move.source], ".", color=theme.faint, markersize=5 * small, zorder=3)
    for rank in each.fault.ranks or (-1,):
        shape, colour = MARKS[each.fault.detected]
        axes.barh(lanes[rank], end - at, left=at, height=0.34, color=colour, alpha=0.55, zorder=2)
        axes.plot(at, lanes[rank], shape, color=colour, markersize=10 * small, markeredgecolor=theme.page, zorder=4)


def _until_repaired(each: Incident) -> float:
    """Return the seconds from the fault to the end of the phase in which shards are sent."""
    after = sum(each.phases_s[phase] for phase in PHASES[PHASES.index("repair") + 1 :])
    return max(0.0, _total(each) - after)


def _name_steps(axes: Axes, incidents: Sequence[Incident], theme: Theme, room: float) -> None:
    """Write steps above the marks, as many as there is room for."""
    free = float("-inf")
    for each in incidents:
        at = _number(each.began)
        if at >= free:
            colour = theme.alarm if each.failed else theme.faint
            axes.text(at, -0.72, f"step {each.step:,}", color=colour, size=8, ha="center", va="bottom")
            free = at + room


def _draw_rows(axes: Axes, incidents: Sequence[Incident], theme: Theme) -> None:
    longest = max(max(_total(each), each.first_good_step_s or 0.0) for each in incidents) or 1e-3
    axes.set_xlim(0, longest * 1.32)  # room for the text behind a bar
    axes.set_ylim(len(incidents) - 0.5, -0.5)
    axes.set_yticks([])
    axes.set_xlabel("seconds since the fault was seen", color=theme.faint, size=9)
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= longest * 1.05])
    axes.grid(axis="x", color=theme.line, linewidth=0.6)
    axes.set_axisbelow(True)
    for place, each in enumerate(incidents):
        _row(axes, place, each, theme, longest)


def _row(axes: Axes, place: int, each: Incident, theme: Theme, longest: float) -> None:
    total, start = _total(each), 0.0
    if each.first_good_step_s:
        axes.barh(place, each.first_good_step_s, height=0.14, color=theme.faint, alpha=0.55, zorder=2)
    for phase in PHASES:
        length = each.phases_s[phase]
        axes.barh(place, length, left=start, height=0.62, color=COLOURS[phase], zorder=3)
        start += length
    if start < total:  # failed attempts, and the time before the first phase
        axes.barh(place, total - start, left=start, height=0.62, color=theme.line, zorder=3)
    end = max(total, each.first_good_step_s or 0.0) + longest * 0.012
    note, colour = (
        (f"failed after {seconds(total)}", theme.alarm) if each.failed else (_short(each, total), theme.faint)
    )
    axes.text(end, place, note, color=colour, size=8, va="center", zorder=4)
    _label(axes, place, each, theme)


def _label(axes: Axes, place: int, each: Incident, theme: Theme) -> None:
    """Draw what comes before a bar: number, mark, step and text."""
    side: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "clip_on": False}
    words: dict[str, Any] = {"size": 8.5, "va": "center", **side}

    def at(inches: float) -> float:
        return (inches - _ROWS_LEFT) / (_WIDTH - _ROWS_LEFT - _EDGE)

    shape, mark = MARKS[each.fault.detected]
    axes.text(at(_NUMBER), place, f"#{each.number}", color=theme.faint, ha="right", **words)
    axes.plot(at(_MARK), place, shape, color=mark, markersize=7, markeredgecolor=theme.page, **side)
    axes.text(at(_STEP), place, f"step {each.step:,}", color=theme.faint, ha="right", **words)
    axes.text(
        at(_WORDS),
        place,
        _cut(each.error or each.fault.text),
        color=theme.alarm if each.failed else theme.text,
        **words,
    )


def _total(each: Incident) -> float:
    return max(each.recovery_s, sum(each.phases_s.values()))


def _short(each: Incident, total: float) -> str:
    """Return the text behind a bar: how long the recovery took, and what was sent."""
    sent = sum(move.bytes for move in each.moves)
    if not each.moves:
        return seconds(total)
    pairs = [f"{move.source} → {move.target}" for move in each.moves]
    return f"{seconds(total)}  ({', '.join(pairs[:2])}{' ...' * (len(pairs) > 2)}, {size(sent)})"


def _cut(text: str) -> str:
    text = " ".join(text.split()).replace("$", r"\$")
    return text if len(text) <= _TEXT else text[: _TEXT - 1].rstrip() + "…"


def _legends(figure: Figure, incidents: Sequence[Incident], theme: Theme, upper: float, lower: float) -> None:
    """Draw the legends of marks and colours, beside the titles of their panels."""
    common: dict[str, Any] = {
        "loc": "center right", "ncol": 8, "labelcolor": theme.text, "fontsize": 8.5, "frameon": False,
        "handletextpad": 0.4, "columnspacing": 1.3, "borderaxespad": 0.0, "borderpad": 0.0,
    }  # fmt: skip
    right = 1 - _EDGE / _WIDTH
    seen = {each.fault.detected for each in incidents}
    marks: dict[str, Line2D] = {
        name: Line2D(
            [], [], marker=shape, color="none", markerfacecolor=colour, markeredgecolor=theme.page, markersize=9
        )
        for name, (shape, colour) in MARKS.items()
        if name in seen
    }
    if any(each.moves for each in incidents):
        arrow: dict[str, Any] = {"markerfacecolor": theme.faint, "markeredgecolor": theme.faint, "markeredgewidth": 0.3}
        marks["shard sent"] = Line2D([], [], marker=r"$\rightarrow$", color="none", markersize=12, **arrow)
    figure.legend(list(marks.values()), list(marks), bbox_to_anchor=(right, upper), **common)
    phases: dict[str, Any] = {phase: Patch(color=COLOURS[phase]) for phase in PHASES}
    phases["to the first good step"] = Patch(color=theme.faint, alpha=0.55)
    figure.legend(
        list(phases.values()), list(phases), bbox_to_anchor=(right, lower), handlelength=1.0, handleheight=0.8, **common
    )


def _upper(lanes: dict[int, int]) -> float:
    return _LANE * len(lanes) + 0.2


def _number(time: datetime) -> float:
    return float(date2num(time))
