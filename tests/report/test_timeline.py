"""`lightning-replica timeline`: pictures and pages of logs written by hand, and logs that are none."""

import json
import re
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.dates import date2num

from lightning_replica.cli.main import main
from lightning_replica.control.faults import Detected
from lightning_replica.report.picture import draw
from lightning_replica.report.timeline import read

KINDS: tuple[Detected, ...] = (
    "death",
    "hang",
    "corrupted shard",
    "exception",
    "peer gone",
    "end",
    "device error",
    "worker death",
)


def incident(number: int, **changes: Any) -> dict[str, Any]:
    time = datetime(2026, 11, 21, 12, tzinfo=timezone.utc) + timedelta(minutes=7 * number)
    kind = number % len(KINDS)
    fault = {
        "detected": changes.get("detected", KINDS[kind]),
        "ranks": changes.get("ranks", [] if kind == 4 else [number % 4]),
        "text": changes.get("why", f"Rank {number % 4} died (SIGKILL)"),
    }
    return {
        "schema": 1, "incident": number, "time": time.isoformat(timespec="milliseconds"), "outcome": "recovered",
        "error": "", "detected": fault["detected"], "ranks": fault["ranks"], "why": fault["text"],
        "faults": [fault, {"detected": "peer gone", "ranks": [], "text": "rank 1: a peer <is> gone"}],
        "level": "replacement", "generation": number, "step": 10 * number, "epoch": 1, "kind": "batch", "replaced": [2],
        "forward": [0, 1], "moves": [{"source": 0, "target": 2, "bytes": 2**20, "seconds": 0.01, "host": True}],
        "phases_ms": {"stop": 1, "clean": 2.5, "regroup": 900, "repair": 20, "rollback": 10, "resume": 5},
        "recovery_s": 0.94, "first_good_step_s": 1.3, "redone": {"batches": 2, "seconds": 0.4}, **changes,
    }  # fmt: skip


def failed(number: int, **changes: Any) -> dict[str, Any]:
    text = "Every holder of shard 1 is lost (ranks 1, 3). " * 9
    return incident(number, outcome="failed", error=text, first_good_step_s=None, moves=[], **changes)


def write(log: Path, *lines: Any) -> Path:
    log.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return log


def texts(svg: str) -> str:
    """Matplotlib writes every text that it draws as a comment too."""
    return "\n".join(re.findall(r"<!-- (.*?) -->", svg))


@pytest.mark.parametrize("count", [1, 6, 45])
def test_pictures(count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [incident(number) for number in range(1, count)] + [failed(count)]
    log = write(tmp_path / "incidents.jsonl", *lines)
    assert main(["timeline", str(log), "--out", str(tmp_path / "picture.svg")]) == 0
    assert f"picture.svg: {count} incident{'s' * (count > 1)}" in capsys.readouterr().out
    svg = (tmp_path / "picture.svg").read_text()
    ElementTree.fromstring(svg)
    drawn = texts(svg)
    assert f"#{count}\n" in drawn
    assert "failed after 940 ms" in drawn
    assert f"step {10 * count:,}" in drawn
    assert "Every holder of shard 1 is lost (ranks 1, 3)" in drawn
    assert ("0 → 2, 1 MiB" in drawn) == (count > 1)
    assert ("unknown" in drawn) == (count >= 6)
    assert main(["timeline", str(log), "--out", str(tmp_path / "again.svg")]) == 0
    assert (tmp_path / "again.svg").read_text() == svg


def seconds_drawn(lanes: Any, lane: int) -> list[tuple[float, float]]:
    """When each bar of a rank's lane begins and ends, in seconds since the first fault."""
    bars = [bar for bar in lanes.patches if bar.get_y() < lane < bar.get_y() + bar.get_height() < lane + 0.5]
    first = date2num(datetime.fromisoformat(incident(1)["time"]))
    ends = [(bar.get_x() - first, bar.get_x() + bar.get_width() - first) for bar in bars]
    return [(round(86400 * begin, 3), round(86400 * end, 3)) for begin, end in ends]


def test_an_incident_lasts_until_the_first_good_step(tmp_path: Path) -> None:
    """A death too: what a lost rank costs is the time until training is where it was."""
    changes: dict[str, Any] = {"detected": "death", "ranks": [1]}
    log = write(tmp_path / "log", incident(1, **changes), failed(2, ranks=[0], recovery_s=3.0))
    figure = draw(read(log)[0])
    lanes = figure.axes[0]
    assert seconds_drawn(lanes, 1) == [(0.0, 1.3)]
    assert seconds_drawn(lanes, 0) == [(420.0, 423.0)]
    assert seconds_drawn(lanes, 2) == []  # its shard was sent to it; it is nobody's fault
    assert date2num(datetime.fromisoformat(incident(2)["time"])) + 3 / 86400 < lanes.get_xlim()[1]


def test_a_png(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", incident(1, why="costs $5 and $6 \\frac{1}"), incident(2))
    assert main(["timeline", str(log), "--out", str(tmp_path / "picture.PNG")]) == 0
    assert (tmp_path / "picture.PNG").read_bytes().startswith(b"\x89PNG")


def test_a_page_that_needs_nothing_else(tmp_path: Path) -> None:
    inexact = {"module.<x>": "it is a file"}
    lines = [incident(1, inexact=inexact), incident(2, why="<script>alert(1)</script>"), failed(3)]
    log = write(tmp_path / "log.jsonl", *lines)
    assert main(["timeline", str(log)]) == 0
    page = (tmp_path / "log.html").read_text()
    assert not re.findall(r"""(?:src|href|srcset)=["'](?!data:)""", page)
    assert "http" not in page
    assert "url(" not in page
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "rank 1: a peer &lt;is&gt; gone" in page
    assert page.count("not exact") == 1
    assert "<li>module.&lt;x&gt;: it is a file</li>" in page
    assert page.count("<tr>") == 1 + 3
    assert page.count("data:image/svg+xml;base64,") == 2  # for light and dark pages
    assert "3 incidents, 1 not recovered" in page
    assert (("Every holder of shard 1 is lost (ranks 1, 3). " * 9).strip()) in page


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"schema": 1, "inci', "not JSON (Unterminated string starting at at character 15)"),
        ("[]", "not an incident: 'schema' is missing"),
        ({"schema": 2}, "schema 2 is not known, only 1: another version wrote it"),
        ({"schema": 1, "time": "2026-11-21T12:00:00+00:00", "detected": "death"}, "'faults' is missing"),
        (incident(1, time="today"), "Invalid isoformat string: 'today'"),
        (incident(1, detected="aliens"), "detected='aliens' is not one of death, hang, "),
        (incident(1, outcome="?"), "outcome='?' is not one of recovered, failed"),
        (incident(1, moves=3), "a value has the wrong type"),
        (incident(1, faults=[]), "it has no fault"),
        (incident(1, step="x"), "invalid literal for int"),
    ],
)
def test_bad_lines_are_named_and_left_out(
    line: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write(tmp_path / "log.jsonl", incident(1), "", line, incident(2))
    incidents, bad = read(log)
    assert [each.number for each in incidents] == [1, 2]
    assert len(bad) == 1
    assert bad[0].startswith(f"{log}, line 3: ")
    assert message in bad[0]
    assert main(["timeline", str(log), "--out", str(tmp_path / "picture.svg")]) == 1
    assert "line 3: " in capsys.readouterr().err


@pytest.mark.parametrize("lines", [[], ["", ""], ["rubbish"]])
def test_nothing_to_draw(lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write(tmp_path / "log.jsonl", *lines)
    assert main(["timeline", str(log)]) == 2
    printed = capsys.readouterr().err
    assert f"{log} holds no incident" in printed
    assert ("line 1: not JSON" in printed) == ("rubbish" in lines)
    assert not (tmp_path / "log.html").exists()


def test_files_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", str(tmp_path / "no.jsonl")]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err
    log = write(tmp_path / "log.jsonl", incident(1))
    assert main(["timeline", str(log), "--out", str(tmp_path / "no" / "x.svg")]) == 2
    assert "cannot be written: No such file" in capsys.readouterr().err
    assert main(["timeline", str(log), "--out", "picture.gif"]) == 2
    assert "must end with one of .svg, .png, .html" in capsys.readouterr().err


def test_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith(("lightning_replica.report.p", "matplotlib"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delattr("lightning_replica.report.page", raising=False)
    assert main(["timeline", str(write(tmp_path / "log.jsonl", incident(1)))]) == 2
    assert "pip install 'lightning-replica[timeline]'" in capsys.readouterr().err
