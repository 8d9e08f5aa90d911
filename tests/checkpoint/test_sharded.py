"""Real ranks: what is saved by one world is loaded by another, bit for bit, and training goes on from it."""

from pathlib import Path
from typing import Any

from tests.checkpoint.job import CASES, assemble, load_all, save_all
from tests.support.ranks import run_ranks

WRITERS = {  # (N, R): what they train
    (4, 2): list(CASES),
    (3, 1): ["AdamW", "bf16", "two"],
    (1, 1): ["bf16", "Adafactor"],
}
READERS = [(2, 2), (4, 2), (3, 3), (1, 1)]


def per_name(results: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    for result in results:
        assert not {"raised", "died"} & set(result), result.get("raised", result)
    return {
        name: {moment: assemble([result[name][moment] for result in results]) for moment in ("saved", "after")}
        for name in results[0]
    }


def test_every_world_reads_what_every_world_wrote(tmp_path: Path) -> None:
    written: dict[str, Any] = {}
    for (size, replicas), cases in WRITERS.items():
        wanted = [[case, replicas, partition] for case in cases for partition in CASES[case].partitions]
        written |= per_name(run_ranks(size, save_all, size, wanted, str(tmp_path)))
    assert len(written) == 13 + 6 + 3
    compared = 0
    for size, replicas in READERS:
        wanted = [[name, replicas, p] for name in written for p in CASES[name.split("-")[0]].partitions]
        read = per_name(run_ranks(size, load_all, size, wanted, str(tmp_path)))
        for key, found in read.items():
            name, _, partition = key.split(" ")
            expected = written[name]
            assert found["saved"].keys() == expected["saved"].keys(), key
            differing = [k for k in expected["saved"] if found["saved"][k] != expected["saved"][k]]
            assert not differing, (key, differing)
            if name.endswith(f"-{size}-{replicas}-{partition}"):
                differing = [k for k in expected["after"] if found["after"][k] != expected["after"][k]]
                assert not differing, (key, differing)
                assert found["after"] != found["saved"]
                compared += 1
    assert compared == 13 + 3
