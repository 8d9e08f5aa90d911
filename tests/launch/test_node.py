"""The processes of one machine, as the supervisor ends them."""

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import cast

import pytest

from lightning_replica.control import planned_save
from lightning_replica.core.options import RecoveryOptions
from lightning_replica.launch import node as node_module
from lightning_replica.launch.node import Node
from lightning_replica.launch.node_context import NodeContext

STUBBORN = """
import signal, sys
blocked = {signal.SIGTERM, signal.SIGINT}
signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
print("blocks", flush=True)
while True:
    print(int(signal.sigwait(blocked)), flush=True)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
def test_whoever_is_told_again_waits_no_longer(
    signum: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "END_S", 1e6)
    line = [sys.executable, "-c", STUBBORN]
    node = Node(
        lambda rank, _: subprocess.Popen(line, stdout=subprocess.PIPE, text=True), 1, RecoveryOptions(), tmp_path, None
    )
    raised: list[bool] = []
    monkeypatch.setattr(node_module, "raise_limit", lambda: raised.append(True))
    node.open(NodeContext.alone(1, 1), NotImplemented)
    assert raised == [True]
    node.start(0, 0)
    process = cast("subprocess.Popen[str]", node.children[0].process)
    assert process.stdout is not None
    assert process.stdout.readline() == "blocks\n"
    ends = threading.Thread(target=node.end, args=(signal.SIGTERM,))
    ends.start()
    assert int(process.stdout.readline()) == signal.SIGTERM
    node.put(planned_save.SIGNAL)  # asks for something else
    process.send_signal(signal.SIGINT)
    assert int(process.stdout.readline()) == signal.SIGINT
    assert process.returncode is None
    node.put(signum)
    ends.join(60)
    assert process.returncode == -signal.SIGKILL
    node.close()
    process.stdout.close()
