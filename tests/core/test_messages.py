"""Lines of one process, and the progress bar of another, on one terminal."""

import fcntl
import os
import pty
import struct
import termios
import threading
import time
from pathlib import Path

import pytest

from lightning_replica.core import messages
from tests.support.forked import ForkedProcess

pyte = pytest.importorskip("pyte")
WIDTH, LINE = 100, "Rank 1 died (SIGKILL); a new process takes its place (1 of 3)."


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def _rich(folder: Path, bars: int) -> None:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(force_terminal=True, width=WIDTH)
    with Progress(console=console, auto_refresh=False) as progress:
        tasks = [progress.add_task(f"bar {number}", total=10) for number in range(bars)]
        for step in range(10):
            for task in tasks:
                progress.advance(task)
            progress.refresh()
            if step == 3:
                (folder / "drawn").touch()
                wait_for(folder / "said")


def _tqdm(folder: Path, bars: int) -> None:
    from tqdm import tqdm

    drawn = [
        tqdm(total=10, desc=f"bar {number}", position=number, ncols=WIDTH, mininterval=0) for number in range(bars)
    ]
    for step in range(10):
        for bar in drawn:
            bar.update()
        if step == 3:
            (folder / "drawn").touch()
            wait_for(folder / "said")
    for bar in drawn:
        bar.close()


def _says(folder: Path, room: int) -> None:
    wait_for(folder / "drawn")
    messages.leave_room(room)
    messages.say(LINE)
    messages.say("and another line")
    (folder / "said").touch()


@pytest.mark.parametrize(("draws", "bars", "room"), [(_rich, 1, 1), (_rich, 2, 1), (_tqdm, 1, 0), (_tqdm, 2, 0)])
def test_lines_stay_and_bars_go_on(draws: object, bars: int, room: int, tmp_path: Path) -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, WIDTH, 0, 0))
    screen = pyte.Screen(WIDTH, 40)
    stream = pyte.ByteStream(screen)
    terminal = Path(os.ttyname(slave))
    environment = {**os.environ, "TERM": "xterm"}

    def read() -> None:
        while True:
            try:
                stream.feed(os.read(master, 65536))
            except OSError:
                return

    reader = threading.Thread(target=read)
    reader.start()
    processes = [
        ForkedProcess(environment, terminal, draws, tmp_path, bars),  # type: ignore[arg-type]
        ForkedProcess(environment, terminal, _says, tmp_path, room),
    ]
    assert [process.wait() for process in processes] == [0, 0]
    os.close(slave)
    reader.join()
    os.close(master)
    lines = [line.rstrip() for line in screen.display if line.strip()]
    said = lines.index(f"replica_zero: {LINE}")
    assert "replica_zero: and another line" in lines[said:], lines
    assert [line for line in lines[said:] if "100%" in line] == [line for line in lines if "100%" in line], lines
    assert len([line for line in lines if "100%" in line]) == bars, lines
    assert len([line for line in lines if "bar" in line]) <= 2 * bars, lines
