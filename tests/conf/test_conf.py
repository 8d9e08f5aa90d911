"""lightning_replica.conf: what Hydra composes from it, and what it refuses."""

import ast
import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import lightning as L
import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

import lightning_replica.conf
from lightning_replica import ConfigurationError, MegatronReplicaStrategy, ReplicaZeroStrategy
from lightning_replica.conf.schema import MegatronStrategyConf, StrategyConf, arguments, portable

CONF = Path(lightning_replica.conf.__file__).parent
YAML = CONF / "strategy" / "replica_zero.yaml"
SEARCH_PATH = "hydra.searchpath=[pkg://lightning_replica.conf]"


@pytest.fixture
def readme() -> str:
    return (CONF.parent.parent / "README.md").read_text()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's folder, as lightning-hydra-template lays it out."""
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "default.yaml").write_text(
        "_target_: lightning.pytorch.trainer.Trainer\nmax_epochs: 10\naccelerator: cpu\ndevices: 1\nlogger: false\n"
    )
    (tmp_path / "train.yaml").write_text("defaults:\n  - _self_\n  - trainer: default\nseed: 1\n")
    return tmp_path


def composed(project: Path, *overrides: str) -> DictConfig:
    with initialize_config_dir(str(project), version_base="1.3"):
        return compose("train", [SEARCH_PATH, *overrides])


@pytest.mark.parametrize(
    ("cls", "conf"), [(ReplicaZeroStrategy, StrategyConf), (MegatronReplicaStrategy, MegatronStrategyConf)]
)
def test_yaml_schema_and_constructor_agree(cls: Any, conf: Any) -> None:
    """Whoever adds an argument to a constructor adds one line to the strategy's file; the schema follows."""
    target = {"_target_": f"lightning_replica.{cls.__name__}"}
    expected = target | {name: default for name, (_, default) in arguments(cls).items()}
    file = YAML.with_name(f"{cls.strategy_name}.yaml")
    yaml = OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(yaml, dict)
    del yaml["defaults"]
    assert list(yaml.items()) == list(expected.items())
    assert {f.name: f.default for f in dataclasses.fields(conf)} == expected
    described = re.findall(r"^(\w+): \S+ # \w+", file.read_text(), re.M)
    assert described == list(expected)[1:], "every argument has a comment"


def test_what_both_strategies_have_is_the_same() -> None:
    own, megatron = arguments(ReplicaZeroStrategy), arguments(MegatronReplicaStrategy)
    differing = {name for name in own.keys() & megatron.keys() if own[name] != megatron[name]}
    assert differing == {"reduce_dtype"}  # megatron-core adds up in 32 bits
    lacking = {"partition", "state_dict_type", "tensor_parallel_size", "uneven_inputs", "divide_by_initial_world_size"}
    assert own.keys() - megatron.keys() == lacking


def test_the_table_of_options_is_right(readme: str) -> None:
    rows = [line.split("|")[1] for line in readme.splitlines() if re.match(r"\| `\w+=", line)]
    found = [(name, ast.literal_eval(value)) for row in rows for name, value in re.findall(r"`(\w+)=([^`\s]+)`", row)]
    options = arguments(ReplicaZeroStrategy)
    assert len(found) > 15
    assert [each for each in found if options[each[0]][1] != each[1]] == []


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (int, int),
        (float | None, float | None),
        (Literal["element", "parameter"], str),
        (Literal[1, "auto"], int | str),
        (bool | Literal["auto"], bool | str),
        (L.Callback | None, Any),
        (list[int] | None, Any),
    ],
)
def test_types_that_omegaconf_knows(hint: Any, expected: Any) -> None:
    assert portable(hint) == expected
    OmegaConf.structured(dataclasses.make_dataclass("Conf", [("value", portable(hint))]))


def test_a_user_takes_the_trainer(project: Path) -> None:
    config = composed(project, "trainer=replica_zero", "strategy.replicas=4", "trainer.devices=8")
    trainer = instantiate(config.trainer, callbacks=[])
    assert isinstance(trainer.strategy, ReplicaZeroStrategy)
    assert (trainer.strategy.grids.size, trainer.strategy.grids.replicas) == (8, 4)
    assert trainer.max_epochs == 10  # from the user's own trainer/default.yaml


def test_a_user_takes_the_strategy_alone(project: Path) -> None:
    config = composed(project, "+strategy=replica_zero", "+trainer.strategy=${strategy}", "trainer.devices=2")
    assert isinstance(instantiate(config.trainer).strategy, ReplicaZeroStrategy)


@pytest.mark.parametrize("line", ["", "strategy: ddp\n", "strategy: auto\n"])
def test_a_project_that_is_not_changed_at_all(line: str, project: Path, readme: str) -> None:
    """By one override, as the README has it; the name "replica_zero" is known only after an import."""
    (found,) = re.findall(r"'(\+\+trainer\.strategy=\{_target_:.*?\})'", readme)
    with (project / "trainer" / "default.yaml").open("a") as file:
        file.write(line)
    with initialize_config_dir(str(project), version_base="1.3"):
        config = compose("train", [found, "trainer.devices=4"])
    strategy = instantiate(config.trainer).strategy
    assert isinstance(strategy, ReplicaZeroStrategy)
    assert (strategy.grids.size, strategy.grids.replicas) == (4, 2)


def test_a_project_without_a_trainer(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("defaults:\n  - trainer: replica_zero\n")
    trainer = instantiate(composed(tmp_path).trainer, logger=False)
    assert isinstance(trainer.strategy, ReplicaZeroStrategy)
    assert trainer.num_devices == 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("strategy.replicas=abc", "Value 'abc' of type 'str' could not be converted to Integer"),
        ("strategy.replicas=2.5", "Value '2.5' of type 'float' could not be converted to Integer"),
        ("strategy.replicas=true", "Value 'True' of type 'bool' could not be converted to Integer"),
        ("strategy.timeout_s=soon", "Value 'soon' of type 'str' could not be converted to Float"),
        ("strategy.replcas=4", "Key 'replcas' not in 'StrategyConf'"),
    ],
)
def test_a_command_line_with_a_mistake(project: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigCompositionException) as caught:
        composed(project, "trainer=replica_zero", override)
    assert message in f"{caught.value} {caught.value.__cause__}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("replcas: 4", "Key 'replcas' not in 'StrategyConf'"),
        ("replicas: two", "Value 'two' of type 'str' could not be converted to Integer"),
    ],
)
def test_a_yaml_with_a_mistake(project: Path, line: str, message: str) -> None:
    (project / "train.yaml").write_text(f"defaults:\n  - trainer: replica_zero\n  - _self_\nstrategy:\n  {line}\n")
    with pytest.raises(ConfigCompositionException) as caught:
        composed(project)
    assert message in f"{caught.value} {caught.value.__cause__}"


def test_values_are_left_to_the_constructor(project: Path) -> None:
    config = composed(project, "trainer=replica_zero", "strategy.replicas=0")
    with pytest.raises(Exception, match="replicas=0 must be a whole number, 1 or more") as caught:
        instantiate(config.strategy)
    assert isinstance(caught.value.__cause__, ConfigurationError)


COPIED = """
import sys
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
with initialize_config_dir(sys.argv[1], version_base="1.3"):
    print(type(instantiate(compose("train", ["+strategy=replica_zero"]).strategy)).__name__, flush=True)
    instantiate(compose("train", ["+strategy=replica_zero", "+strategy.replcas=4"]).strategy)
"""


def test_a_copied_yaml_works_without_the_package_on_the_search_path(project: Path) -> None:
    shutil.copytree(YAML.parent, project / "strategy")
    command = [sys.executable, "-W", "ignore", "-c", COPIED, str(project)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "ReplicaZeroStrategy\n", done.stderr
    assert "unexpected keyword argument 'replcas'" in done.stderr


def test_the_link_at_the_root() -> None:
    assert (CONF.parent.parent / "conf").resolve() == CONF.resolve()
