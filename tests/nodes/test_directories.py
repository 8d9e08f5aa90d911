"""Nodes that do not see one directory of checkpoints: said before the first step."""

import subprocess
from pathlib import Path

from tests.support.nodes import COMMAND, ENVIRONMENT
from tests.support.ranks import free_port

SCRIPT = """
import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_replica import DyingGaspCheckpoint, ReplicaZeroStrategy

L.Trainer(
    strategy=ReplicaZeroStrategy(replicas=2), accelerator="cpu", devices=1, num_nodes=2, max_steps=2, logger=False,
    enable_checkpointing=False, callbacks=[DyingGaspCheckpoint("checkpoints")],
).fit(BoringModel())
print("has trained")
"""


def test_a_disk_of_its_own_on_each_node(tmp_path: Path) -> None:
    """The same path on both, as with ordinary machines; here it is relative to the folder where each was started."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [*COMMAND, "run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1", str(tmp_path / "train.py")]
    started = []
    for name in "ab":
        (tmp_path / name).mkdir()
        started.append(
            subprocess.Popen(
                command,
                cwd=tmp_path / name,
                env=ENVIRONMENT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [each.communicate()[0] for each in started]
    assert "has trained" not in "".join(said)
    assert [each.returncode for each in started] == [1, 1], said
    # The node whose ranks end first says why.
    assert "is not one directory: what rank 0 has written there on node" in "".join(said)
    assert "Let all nodes see one directory, or give the URL of an object store." in "".join(said)
