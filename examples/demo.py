"""Trains examples/gpt.py twice, untouched and with a rank that kills itself, and compares every bit of the weights.

python examples/demo.py                     # rank 2 dies half way
python examples/demo.py --kill 0 --at 10    # rank 0 dies in step 10
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

GPT = Path(__file__).with_name("gpt.py")


def train(title: str, options: list[str], result: Path) -> dict[str, str]:
    """Runs gpt.py and returns what it wrote."""
    print(f"\n=== {title}: python examples/gpt.py {' '.join(options)}", flush=True)
    subprocess.run([sys.executable, str(GPT), *options, "--result", str(result)], check=True)
    return json.loads(result.read_text())


def main() -> int:
    """Returns 0 if both runs end with the same bits."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kill", type=int, default=2, metavar="RANK", help="rank that kills itself; 0 is allowed")
    parser.add_argument("--at", type=int, metavar="STEP", help="when it does (default: half way)")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    steps = ["--steps", str(args.steps)]
    fault = ["--kill", str(args.kill), "--at", str(args.steps // 2 if args.at is None else args.at)]
    with tempfile.TemporaryDirectory() as folder:
        hurt = train("a rank dies", [*steps, *fault], Path(folder, "hurt.json"))
        untouched = train("untouched", steps, Path(folder, "untouched.json"))
    print(f"\n=== sample\n{hurt['sample']}")
    same = hurt["fingerprint"] == untouched["fingerprint"]
    print("\n=== SHA-256 of the final weights")
    print(f"a rank died  {hurt['fingerprint']}")
    print(f"untouched    {untouched['fingerprint']}")
    print("identical" if same else "DIFFERENT: please report this")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
