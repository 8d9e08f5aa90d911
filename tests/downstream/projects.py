"""Projects of others on Lightning: what they need, and a small training as their own pages show it."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.wild.harness import Script

HERE = Path(__file__).parent
_CACHE = Path(os.environ.get("DOWNSTREAM_CACHE", Path.home() / ".cache" / "lightning_replica_downstream"))
_TABLES = ("narwhals==2.29.0", "pandas==3.1.1", "python-dateutil==4.0.0")
_LEARN = ("cloudpickle==3.1.3", "joblib==1.6.0", "scikit-learn==1.9.1", "scipy==1.17.1", "threadpoolctl==3.8.0")
_PYDANTIC = ("annotated_types==0.8.0", "pydantic==2.14.4", "pydantic_core==2.50.5", "typing_inspection==0.4.5")


@dataclass(frozen=True)
class Project:
    """A project and a training with it.

    Attributes:
        name: Of the project.
        requirements: Everything that it imports besides torch and Lightning, with versions.
        script: In the folder ``scripts``.
        arguments: Of the script.
        ddp: Pattern of what need not be as under DDP.
        inexact: What of it is said not to be exact after a fault; "" for nothing.
        inexact_first: The same where only rank 0 is lost.
        stopped: What `verify` says of the run that is stopped and resumed; "" if it is identical.
    """

    name: str
    requirements: tuple[str, ...]
    script: str
    arguments: tuple[str, ...] = ()
    ddp: str = ""
    inexact: str = ""
    inexact_first: str = ""
    stopped: str = ""

    def installed(self) -> Path:
        """Returns the folder with the packages; installs them if it is not there."""
        folder = _CACHE / f"{self.name}-{sys.version_info.major}.{sys.version_info.minor}"
        if not (folder / "complete").exists():
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
            subprocess.run([*command, *self.requirements], check=True)
            (folder / "complete").touch()
        return folder

    def training(self, *prefix: str, limit_s: float = 200) -> Script:
        """Returns the training.

        Args:
            prefix: What stands before the command.
            limit_s: It is ended after this time.
        """
        variable = f"WITH_{self.name.upper().replace('-', '_')}"
        os.environ[variable] = os.pathsep.join(map(str, (self.installed(), HERE / "stubs")))
        return Script(
            str(HERE / "scripts" / self.script),
            self.arguments,
            packages=(variable,),
            forked=False,
            ddp=self.ddp,
            checkpoints=False,
            prefix=prefix,
            limit_s=limit_s,
        )


_PLOTS = ("contourpy==1.3.3", "cycler==0.12.1", "fonttools==4.68.0", "kiwisolver==1.5.1", "matplotlib==3.11.2") + (
    *("pillow==13.0.0", "pyparsing==3.3.3", "python-dateutil==2.9.0.post0", "six==1.17.0"),
)
_HYDRA = ("antlr4-python3-runtime==4.9.3", "hydra-core==1.3.8", "omegaconf==2.4.0")
_RICH = ("markdown-it-py==4.3.0", "mdurl==0.1.2", "Pygments==2.21.0", "rich==15.0.0")
_ATOMS = (
    "ase==3.29.0",
    "h5py==3.16.0",
    "matscipy==1.3.1",
    "opt-einsum==3.4.0",
    "scipy==1.17.1",
    *_PLOTS,
    *_HYDRA,
    *_RICH,
)
_FORECASTING = ("pytorch-forecasting==1.8.0", "scikit-base==1.2.0", *_LEARN, *_TABLES)
_HPARAMS = "checkpoint['hyper_parameters']"  # objects of the project, which only its own code can read
_OBJECTS = "is a pytorch_forecasting."  # such an object, in the checkpoint
_CLIPPED = "."  # the last bits of a clipped gradient's norm follow the shards
PROJECTS = {
    "deepar": Project("pytorch-forecasting", _FORECASTING, "forecasting.py", ("deepar",), stopped=_OBJECTS),
    "nhits": Project("pytorch-forecasting", _FORECASTING, "forecasting.py", ("nhits",), stopped=_OBJECTS),
    "tft": Project("pytorch-forecasting", _FORECASTING, "forecasting.py", ("tft", "0.1"), _CLIPPED, stopped=_OBJECTS),
    "moco": Project(
        "lightly",
        ("lightly==1.6.0", "lightly_utils==0.0.2", "aenum==3.1.17", "python-dateutil==4.0.0", *_PYDANTIC)
        + ("requests==2.34.2", "urllib3==2.8.0"),
        "contrastive.py",
    ),
    "gluonts": Project(
        "gluonts",
        ("gluonts==0.17.0", "pandas==2.3.3", "python-dateutil==2.9.0.post0", "pytz==2026.6", "tzdata==2026.6")
        + ("scipy==1.17.1", "six==1.17.0", "toolz==1.2.0", *_PYDANTIC),
        "probabilistic.py",
        inexact="IterableSlice",
    ),
    "chemprop": Project(
        "chemprop",
        ("chemprop==2.3.1", "astartes==1.3.3", "configargparse==1.9.0", "dill==0.4.1", "multiprocess==0.70.19")
        + ("rdkit==2026.9.1", "tabulate", *_LEARN, *_TABLES),
        "molecules.py",
    ),
    "scvi": Project(
        "scvi-tools",
        ("scvi-tools==1.4.2", "anndata==0.12.19", "array-api-compat==1.16.0", "docrep==0.3.2", "donfig==0.8.1.post1")
        + ("google-crc32c==1.9.0", "h5py==3.16.0", "legacy-api-wrap==1.5", "llvmlite==0.50.0", "ml-collections==1.1.0")
        + (
            "msgpack==1.2.4",
            "mudata==0.3.10",
            "natsort==8.4.0",
            "numba==0.68.1",
            "numcodecs==0.16.6",
            "pyro-api==0.1.2",
        )
        + ("opt-einsum==3.4.0", "pyro-ppl==1.9.2", "scanpy==1.11.5", "scverse-misc==0.0.3", "session-info2==0.4.1")
        + (
            "sparse==0.19.3",
            "xarray==2026.9.0",
            "zarr==3.1.6",
            *_LEARN,
            *_PLOTS,
            *_RICH,
            "narwhals==2.29.0",
            "pandas==3.1.1",
        ),
        "cells.py",
        inexact_first="logger 0 (SimpleLogger)",  # it keeps all rows in memory
    ),
    "nequip": Project(
        "nequip",
        (
            "nequip==0.19.1",
            "certifi==2026.10.19.post1",
            "e3nn==0.6.0",
            "idna==3.20",
            "lmdb==3.0.0",
            "opt-einsum-fx==0.1.4",
        )
        + ("requests==2.34.2", "urllib3==2.8.0", *_ATOMS),
        "potentials.py",
        ddp="train_ddp_process_0",  # Hydra's log of rank 0, which DDP does not start
    ),
    "disent": Project(
        "disent",
        ("disent==0.8.0", "h5py==3.16.0", "llvmlite==0.50.0", "numba==0.68.1", *_LEARN, *_PLOTS, "pandas==3.1.1")
        + ("narwhals==2.29.0", *_RICH),
        "latents.py",
        stopped=_HPARAMS,
    ),
    "tabular": Project(
        "pytorch-tabular",
        ("pytorch-tabular==1.2.0", "einops==0.8.2", "scikit-base==1.2.0", *_LEARN, *_PLOTS, "narwhals==2.29.0")
        + ("pandas==3.1.1", *_HYDRA, *_RICH),
        "tables.py",
    ),
    "schnetpack": Project(
        "schnetpack",
        ("schnetpack==2.1.1", "dirsync==2.2.6", "fasteners==0.20", "torch-ema==0.3", *_ATOMS),
        "atoms.py",
        stopped=_HPARAMS,
    ),
    "pina": Project(
        "pina-mathlab",
        ("pina-mathlab==0.3.2.post2610", "torch_geometric==2.8.1", "xxhash==4.1.0"),
        "physics.py",
    ),
    "uncertainty": Project(
        "torch-uncertainty",
        ("torch-uncertainty==0.13.0", "einops==0.8.2", "seaborn==0.13.2", "timm==1.0.31", *_LEARN, *_TABLES),
        "uncertainty.py",
        stopped="different weights",  # of two fits in one script, the second takes the checkpoint of the first
    ),
}
