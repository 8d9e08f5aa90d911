"""The checks of `lightning-replica doctor`: one function per question, which yields the answers as `Check`."""

import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from packaging.requirements import Requirement

from lightning_replica._compat.packages import LIGHTNING, chosen
from lightning_replica._compat.versions import TESTED, is_newer_than_tested, supports
from lightning_replica._version import __version__
from lightning_replica.cli.ascend import ascend
from lightning_replica.cli.check import Check
from lightning_replica.core.output import size
from lightning_replica.devices import probe
from lightning_replica.devices.host import HOST

_SHM = Path("/dev/shm")
_LITTLE_SHM_BYTES = 256 * 2**20
_SMOKE_TIMEOUT_S = 180


def versions() -> Iterator[Check]:
    """Check Python, the system, and whether the packages have the versions that this package requires."""
    yield Check("system", "ok", f"{platform.system()} {platform.release()}, {platform.machine()}")
    yield _tested("python", platform.python_version())
    yield Check("lightning_replica", "ok", __version__)
    for wanted in map(_of_this_process, _requirements()):
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            found = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            yield Check(wanted.name, "failed", "not installed", f'pip install "{wanted}"')
            continue
        if supports(wanted.specifier, found):
            yield _tested(wanted.name, found)
        else:
            yield Check(wanted.name, "failed", found, f'Install a supported version: pip install "{wanted}"')


def _tested(package: str, found: str) -> Check:
    """Return the check of a version that is supported: a note if it is newer than all that were tested."""
    if package not in TESTED:
        return Check(package, "ok", found)
    lowest, newest = TESTED[package]
    if is_newer_than_tested(package, found):
        advice = f"If something fails, try {package} {newest} before you look elsewhere, and report it."
        return Check(package, "note", f"{found}, newer than {newest}, the newest that was tested", advice)
    return Check(package, "ok", f"{found} (tested: {lowest} to {newest})")


def _of_this_process(wanted: Requirement) -> Requirement:
    """Return a requirement; of Lightning, for the one of its packages that is used here."""
    return (
        Requirement(f"{chosen().distribution}{wanted.specifier}") if wanted.name == LIGHTNING.distribution else wanted
    )


def _requirements() -> list[Requirement]:
    """Return the requirements of this package; none if it runs from source and is not installed."""
    try:
        return [Requirement(text) for text in importlib.metadata.requires("lightning-replica") or []]
    except importlib.metadata.PackageNotFoundError:
        return []


def devices() -> Iterator[Check]:
    """List the cores and the accelerators."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Check(HOST.type, "ok", f"{cores} cores")
    for kind, found in probe.accelerators().items():
        yield Check(kind, "ok" if found else "note", found or "none")


def backends() -> Iterator[Check]:
    """Check the backends of collectives. The host's backend is needed, whatever the device is."""
    advice = "Install a torch that is built with it, such as those from PyPI."
    for name, available in probe.backends().items():
        if available:
            yield Check(name, "ok", "available")
        elif name == probe.NEEDED:
            yield Check(name, "failed", "not available", advice)
        else:
            yield Check(name, "note", "not available")


def memory() -> Iterator[Check]:
    """Check the main memory, and the shared memory that workers of data loaders need."""
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = (page * os.sysconf(name) for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    yield Check("memory", "ok", f"{size(free)} unused of {size(total)}")
    if not _SHM.exists():
        yield Check(str(_SHM), "note", "not there")
        return
    free = shutil.disk_usage(_SHM).free
    if free < _LITTLE_SHM_BYTES:
        advice = "DataLoader workers pass batches through it. In Docker: --shm-size=2g"
        yield Check(str(_SHM), "note", f"{size(free)} free", advice)
    else:
        yield Check(str(_SHM), "ok", f"{size(free)} free")


def network() -> Iterator[Check]:
    """Check whether processes on this machine can connect to each other."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5) as one:
            other, _ = server.accept()
            with other:
                one.sendall(b"x")
                other.settimeout(5)
                other.recv(1)
        yield Check("TCP on 127.0.0.1", "ok", "works")
    except OSError as error:
        yield Check("TCP on 127.0.0.1", "failed", str(error), "Allow connections over the loopback interface.")
        return
    try:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        client = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=10))
        client.set("key", "value")
        client.wait(["key"], timedelta(seconds=10))
        yield Check("store", "ok", "works")
    except RuntimeError as error:
        yield Check(
            "store", "failed", str(error).splitlines()[0], "torch's TCPStore must be able to listen on 127.0.0.1."
        )


def smoke() -> Iterator[Check]:
    """Train on two ranks, untouched and with a rank that is killed, and compare every bit of the weights."""
    name, ask = "2-rank training", "Please report this, with the output of `lightning-replica doctor --json`."
    with tempfile.TemporaryDirectory() as folder:
        runs = [_Run(Path(folder, "untouched")), _Run(Path(folder, "hurt"), "--kill", "1")]
        try:
            untouched, hurt = [run.result() for run in runs]
        except subprocess.SubprocessError:
            tails = "\n".join(run.tail() for run in runs)
            yield Check(name, "failed", f"a training failed, or took longer than {_SMOKE_TIMEOUT_S} s\n{tails}", ask)
            return
        finally:
            for run in runs:
                run.end()
    if untouched == hurt:
        yield Check(name, "ok", f"a killed rank was replaced; the weights are identical ({hurt[:12]})")
    else:
        found = f"a killed rank was replaced, but the weights are {hurt[:12]} instead of {untouched[:12]}"
        yield Check(name, "failed", found, ask)


class _Run:
    """A process that runs `smoke.py`. Both run at the same time, as most of their time is the import of torch."""

    def __init__(self, result: Path, *options: str) -> None:
        self._result, self._log = result, result.with_suffix(".log")
        another_launcher = ("LOCAL_RANK", "TORCHELASTIC_", "SLURM_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(another_launcher)}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lightning_replica.cli.smoke", str(result), *options],
                env={**environment, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def result(self) -> str:
        code = self._process.wait(_SMOKE_TIMEOUT_S)
        if code:
            raise subprocess.CalledProcessError(code, self._process.args)
        return self._result.read_text()

    def tail(self) -> str:
        return "\n".join(self._log.read_text().splitlines()[-15:])

    def end(self) -> None:
        """Kill the process; its ranks end with it."""
        self._process.kill()
        self._process.wait()


ALL = (versions, devices, backends, ascend, memory, network, smoke)
