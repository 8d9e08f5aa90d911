"""Seeded faults at random times on a training on several nodes, which must end with the bits of the untouched run.

    python benchmarks/chaos_nodes.py                       # needs root: 10 runs of 20 faults
    python benchmarks/chaos_nodes.py --runs 1 --faults 5 --store first

Nodes are network and PID namespaces on this machine. What strikes: a rank, a supervisor, a whole node, a link that goes
down for ever or for three seconds, and a spare. A node that was lost comes back as a spare. A fault strikes once the
run has made two steps since the last one and a spare waits, at a random moment after that: with two nodes and R = 2,
two nodes that are lost at once are a shard that is lost.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from common import write

from tests.support.machines import Machine, machines
from tests.support.nodes import SERVE, Result, Run, run_untouched, start_store

NODES: Final = 2
SPARES: Final = 2
STEPS_A_FAULT: Final = 150
PAUSE_S: Final = 0.05


@dataclass
class Chaos:
    """One run, and the faults that strike it.

    Attributes:
        run: The run.
        nodes: The machines that train or wait.
        dice: Draws the faults.
    """

    run: Run
    nodes: list[Machine]
    dice: random.Random

    def strike(self) -> str:
        """Wait until the run can stand a fault, and make one; return its name."""
        self._until_it_can_stand_one()
        time.sleep(self.dice.uniform(0, 2))
        name = self.dice.choice(sorted(FAULTS))
        victim = self.dice.choice(self._waiting() if name == "spare" else self._training())
        FAULTS[name](self, victim)
        return name

    def _until_it_can_stand_one(self) -> None:
        before = self.run.step()
        self.run.until(
            lambda: self.run.step() >= before + 2 and len(self._training()) == NODES and bool(self._waiting())
        )

    def _training(self) -> list[Machine]:
        """The machines that have ranks, and run."""
        names = {self.run.where(rank)[0] for rank in range(NODES * self.run.local)}
        return [each for each in self.run.started if each.name in names]

    def _waiting(self) -> list[Machine]:
        """The machines that wait as spares."""
        training = self._training()
        return [
            each for each in self.run.started if each not in training and self._last_word(each) == "waits as a spare"
        ]

    def _last_word(self, machine: Machine) -> str:
        """What a machine has said last about its part."""
        text = self.run.log(machine).read_text()
        said = ("waits as a spare", "takes over ranks", "has ranks", "are killed")
        return max(said, key=text.rfind)

    def lose(self, machine: Machine, end: Callable[[Machine], None]) -> None:
        """Lose a machine, and start it again as a spare."""
        self.run.started.remove(machine)
        end(machine)
        assert machine.process is not None
        machine.process.wait(60)
        self.run.start(machine)


def lose_rank(chaos: Chaos, machine: Machine) -> None:
    ranks = [rank for rank in range(NODES * chaos.run.local) if chaos.run.where(rank)[0] == machine.name]
    chaos.run.kill_rank(chaos.dice.choice(ranks))


def lose_link(chaos: Chaos, machine: Machine) -> None:
    chaos.lose(machine, lambda each: each.link("down"))
    machine.link("up")


def blink(chaos: Chaos, machine: Machine) -> None:
    machine.link("down")
    time.sleep(3)
    machine.link("up")


FAULTS: Final[dict[str, Callable[[Chaos, Machine], None]]] = {
    "rank": lose_rank,
    "supervisor": lambda chaos, machine: chaos.lose(machine, lambda each: each.supervisor().kill()),
    "node": lambda chaos, machine: chaos.lose(machine, Machine.kill),
    "link down": lose_link,
    "link down for 3 s": blink,
    "spare": lambda chaos, machine: chaos.lose(machine, Machine.kill),
}


def one_run(seed: int, faults: int, store: str, out: Path, oracle: Result) -> tuple[Counter[str], str]:
    """Make one run, and return the faults that struck it and how it ended."""
    count, struck = NODES + SPARES, Counter[str]()
    with machines(count + SERVE[store]) as made:
        endpoint = start_store(store, made, out)
        pause, options = {"PAUSE_S": str(PAUSE_S)}, ("--node-timeout", "6")
        run = Run(out, NODES, 2, faults * STEPS_A_FAULT, endpoint, (), options, pause, spares=SPARES)
        run.start_all(made[:count])
        chaos = Chaos(run, made[:count], random.Random(seed))
        for _ in range(faults):
            struck[chaos.strike()] += 1
            print(seed, struck, flush=True)
        (out / "hurry").touch()
        codes = set(run.codes(1000))
        found = run.result()
        what = [name for name in ("ranks", "rows") if getattr(found, name) != getattr(oracle, name)]
        if codes == {0} and not what:
            return struck, "identical"
        kept = Path(tempfile.mkdtemp(prefix="chaos_nodes-"))
        shutil.copytree(out, kept / "run")
        for name in ("ranks", "rows"):
            (kept / f"{name}.txt").write_text(f"{getattr(found, name)}\n---\n{getattr(oracle, name)}\n")
        print(f"kept in {kept}", flush=True)
        return struck, f"exit codes {codes}, OTHER {' and '.join(what) or 'codes'}"


@dataclass
class Seen:
    """What has been seen so far.

    Attributes:
        seed: The seed of the first run; each further run has the next one.
        runs: Number of runs.
        faults: How often each kind of fault has struck.
        ends: How often the runs have ended in each way.
        minutes: How long all runs took.
    """

    seed: int
    runs: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    minutes: float = 0.0

    def add(self, faults: Counter[str], end: str, minutes: float) -> None:
        self.runs, self.minutes = self.runs + 1, self.minutes + minutes
        self.faults, self.ends = dict(Counter(self.faults) + faults), dict(Counter(self.ends) + Counter([end]))

    def text(self, store: str) -> str:
        return (
            f"{sum(self.faults.values())} faults in {self.runs} runs of {NODES} nodes with 2 ranks and {SPARES} spares,"
            f" R = 2. The store: {store}. Seeds from {self.seed}; {self.minutes:.0f} minutes.\n\n"
            + "".join(f"- {count} of {self.runs} runs: {end}\n" for end, count in self.ends.items())
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--faults", type=int, default=20, help="in each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", choices=list(SERVE), default="alone")
    parser.add_argument("--add", action="store_true", help="add to the results that are there, with the next seeds")
    args = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("needs root, for namespaces")
    name = f"chaos_nodes_{args.store}"
    seen = Seen(args.seed)
    if args.add:
        seen = Seen(**json.loads((Path(__file__).parent / "results" / f"{name}.json").read_text())["facts"])
    with tempfile.TemporaryDirectory() as folder:
        untouched = Path(folder) / "untouched"
        untouched.mkdir()
        run_untouched(untouched, NODES, 2, args.faults * STEPS_A_FAULT)
        oracle = Result.of(untouched, NODES * 2)
        for _ in range(args.runs):
            began, out = time.monotonic(), Path(folder) / f"run{seen.runs}"
            out.mkdir()
            faults, end = one_run(seen.seed + seen.runs, args.faults, args.store, out, oracle)
            shutil.rmtree(out)
            seen.add(faults, end, (time.monotonic() - began) / 60)
            print(dict(faults), end, flush=True)
            rows = [[lost, str(count)] for lost, count in sorted(seen.faults.items())]
            header, notes = ["what was lost", "times"], seen.text(args.store)
            write(name, "Faults on several nodes", header, rows, notes, {"facts": asdict(seen)})


if __name__ == "__main__":
    main()
