"""Variables of torch_npu with which recovery cannot work."""

import pytest

from lightning_replica.devices.npu_settings import SETTINGS, complete, harms


@pytest.mark.parametrize("name", [name for setting in SETTINGS for name in setting.names])
def test_what_must_be_off_and_is_on(name: str) -> None:
    for off in ("0", "", "false", "No"):
        assert not list(harms({name: off}))
    (harm,) = harms({name: "1", "PATH": "/bin"})
    assert harm.given == f"{name}=1"
    assert harm.advice.startswith("With it, ")
    assert harm.advice.endswith(f". Set {name}=0.")


def test_every_one_that_hurts_is_named() -> None:
    given = {"HCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_HCCL_ASYNC_ERROR_HANDLING": "2", "HCCL_BLOCKING_WAIT": "true"}
    assert [harm.given for harm in harms(given)] == [
        "TORCH_HCCL_ASYNC_ERROR_HANDLING=2",
        "HCCL_ASYNC_ERROR_HANDLING=1",
        "HCCL_BLOCKING_WAIT=true",
    ]


def test_what_is_on_by_default_is_turned_off() -> None:
    """Under both names: older versions know one of them only."""
    environ = {"PATH": "/bin"}
    complete(environ)
    off = {"TORCH_HCCL_ASYNC_ERROR_HANDLING": "0", "HCCL_ASYNC_ERROR_HANDLING": "0"}
    assert environ == {"PATH": "/bin", **off}


@pytest.mark.parametrize("name", ["TORCH_HCCL_ASYNC_ERROR_HANDLING", "HCCL_ASYNC_ERROR_HANDLING"])
def test_what_the_user_has_set_is_left(name: str) -> None:
    environ = {name: "1"}
    complete(environ)
    assert environ == {name: "1"}
