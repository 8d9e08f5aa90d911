"""Incidents as a page of HTML that needs no other file: the picture, light and dark, and a table."""

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from lightning_replica.core.output import size
from lightning_replica.recovery.incident import Incident
from lightning_replica.report.picture import DARK, LIGHT, MARKS, Theme, draw, headline, seconds

_SVG: Any = {"svg.hashsalt": "lightning-replica", "svg.fonttype": "path"}  # the same log gives the same file
_HEADER = ("#", "when (UTC)", "step", "what happened", "then", "shards", "recovery", "first good step", "done again")
_STYLE = """
:root { color-scheme: light dark; --page: %(page)s; --text: %(text)s; --faint: %(faint)s; --line: %(line)s;
  --alarm: %(alarm)s; }
@media (prefers-color-scheme: dark) { :root { --page: %(dark_page)s; --text: %(dark_text)s; --faint: %(dark_faint)s;
  --line: %(dark_line)s; --alarm: %(dark_alarm)s; } }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
img { width: 100%%; height: auto; }
.table { overflow-x: auto; }
table { border-collapse: collapse; width: 100%%; font-size: 0.87rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.4rem 0.7rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th { color: var(--faint); font-weight: 500; white-space: nowrap; }
td.what { min-width: 20rem; overflow-wrap: anywhere; }
td.plain { white-space: nowrap; }
.failed { color: var(--alarm); }
.mark { font-weight: 600; }
summary { color: var(--faint); cursor: pointer; }
"""


def svg(incidents: Sequence[Incident], theme: Theme = LIGHT) -> bytes:
    """Return the picture of ``incidents`` as SVG."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(_SVG):
        draw(incidents, theme).savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def png(incidents: Sequence[Incident], theme: Theme = LIGHT) -> bytes:
    """Return the picture of ``incidents`` as PNG."""
    buffer = io.BytesIO()
    draw(incidents, theme).savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def page(incidents: Sequence[Incident], log: Path) -> str:
    """Return the page about ``incidents`` as HTML, with the path of the log that they are from."""
    title, below = headline(incidents)
    colours = {**vars(LIGHT), **{f"dark_{name}": value for name, value in vars(DARK).items()}}
    rows = "\n".join(_row(each) for each in incidents)
    header = "".join(f"<th>{name}</th>" for name in _HEADER)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(f"{title}: {log.name}")}</title>
<style>{_STYLE % colours}</style>
</head>
<body>
<picture>
<source media="(prefers-color-scheme: dark)" srcset="{_data(svg(incidents, DARK))}">
<img src="{_data(svg(incidents, LIGHT))}" alt="{html.escape(f"{title}. {below}")}">
</picture>
<div class="table"><table>
<thead><tr>{header}</tr></thead>
<tbody>
{rows}
</tbody>
</table></div>
<p style="color: var(--faint)">{html.escape(str(log))}</p>
</body>
</html>
"""


def _row(each: Incident) -> str:
    redone = f"{each.redone_batches} batches, {each.redone_s:.2f} s"
    again = f"{redone}; from the {'batch' if each.kind == 'batch' else 'tail of the step'} on"
    shards = "<br>".join(f"{move.source} → {move.target}, {size(move.bytes)}" for move in each.moves)
    first = "-" if each.first_good_step_s is None else seconds(each.first_good_step_s)
    cells = [
        ("plain", str(each.number)),
        ("plain", f"{each.began:%Y-%m-%d %H:%M:%S.}{each.began.microsecond // 1000:03d}"),
        ("plain", f"{each.step:,}<br><small>epoch {each.epoch}</small>"),
        ("what", _what(each)),
        ("plain", _then(each)),
        ("plain", shards or "-"),
        ("plain", f"{seconds(each.recovery_s)}{_phases(each)}"),
        ("plain", first),
        ("", html.escape(again)),
    ]
    return "<tr>" + "".join(f'<td class="{kind}">{text}</td>' for kind, text in cells) + "</tr>"


def _what(each: Incident) -> str:
    colour = MARKS[each.fault.detected][1]
    text = f'<span class="mark" style="color: {colour}">{each.fault.detected}</span> {html.escape(each.fault.text)}'
    others = [fault.text for fault in each.faults if fault != each.fault]
    if others:
        items = "".join(f"<li>{html.escape(fault)}</li>" for fault in others)
        text += f"<details><summary>{len(others)} more</summary><ul>{items}</ul></details>"
    return text


def _then(each: Incident) -> str:
    if each.failed:
        return f'<span class="failed">failed</span><br><small>{html.escape(each.error)}</small>'
    who = f"<br><small>rank {', '.join(map(str, each.replaced))}</small>" if each.replaced else ""
    inexact = "".join(f"<li>{html.escape(f'{name}: {why}')}</li>" for name, why in each.inexact.items())
    details = f'<details><summary class="failed">not exact</summary><ul>{inexact}</ul></details>' if inexact else ""
    return f"{html.escape(each.level)}{who}{details}"


def _phases(each: Incident) -> str:
    items = "".join(f"<li>{phase} {seconds(length)}</li>" for phase, length in each.phases_s.items())
    return f"<details><summary>phases</summary><ul>{items}</ul></details>"


def _data(picture: bytes) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(picture).decode()}"
