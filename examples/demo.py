"""Trains examples/gpt.py three times and compares every bit of the weights.

In the first run, a rank kills itself. The second is told to end, saves, and is started again. The third is untouched.

python examples/demo.py                     # rank 2 dies halfway
python examples/demo.py --kill 0 --at 10    # rank 0 dies in step 10
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

GPT = Path(__file__).with_name("gpt.py")


GASP_WRITTEN = 75  # lightning_replica.exit_codes


def train(title: str, options: list[str], code: int = 0) -> None:
    """Run gpt.py, which must end with ``code``."""
    print(f"\n=== {title}: python examples/gpt.py {' '.join(options)}", flush=True)
    ended = subprocess.run([sys.executable, str(GPT), *options]).returncode
    if ended != code:
        sys.exit(f"gpt.py ended with exit code {ended} instead of {code}")
    if code:
        print(f"exit code {code}", flush=True)


def main() -> int:
    """Return 0 if all runs end with the same bits."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kill", type=int, default=2, metavar="RANK", help="rank that kills itself; 0 is allowed")
    parser.add_argument("--at", type=int, metavar="STEP", help="when it kills itself (default: halfway)")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    steps = ["--steps", str(args.steps)]
    at = ["--at", str(args.steps // 2 if args.at is None else args.at)]
    with tempfile.TemporaryDirectory() as folder:
        names = {"a rank died": "hurt", "pre-empted": "preempted", "untouched": "untouched"}
        files = {title: Path(folder, f"{name}.json") for title, name in names.items()}
        result = {title: ["--result", str(file)] for title, file in files.items()}
        train("a rank dies", [*steps, "--kill", str(args.kill), *at, *result["a rank died"]])
        preempted = [*steps, "--preempt", *at, "--checkpoints", f"{folder}/checkpoints", *result["pre-empted"]]
        train("pre-empted", preempted, GASP_WRITTEN)
        train("the same command again", preempted)
        train("untouched", [*steps, *result["untouched"]])
        results = {title: json.loads(file.read_text()) for title, file in files.items()}
    print(f"\n=== sample\n{results['a rank died']['sample']}")
    print("\n=== SHA-256 of the final weights")
    for title, found in results.items():
        print(f"{title:12} {found['fingerprint']}")
    same = len({found["fingerprint"] for found in results.values()}) == 1
    print("identical" if same else "DIFFERENT: please report this")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
