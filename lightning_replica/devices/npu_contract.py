"""What the package assumes of torch_npu: every name it uses, in a form that can be compared with torch_npu's sources.

torch_npu runs on Ascend machines only, so importing this module does not import it.
`tests/devices/test_torch_npu_contract.py` reads the sources of the torch_npu that matches the installed torch, and
fails where they differ from this module. `differences` makes the comparison with an imported torch_npu.
"""

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from lightning_replica.devices import npu_settings


@dataclass(frozen=True)
class Call:
    """A function of torch_npu, or a method of one of its classes.

    Attributes:
        module: The module that has it.
        name: Its name; "Class.method" for a method.
        positional: Parameters that the package passes by position, in that order.
        keywords: Parameters that the package passes by name.
        returns: What it returns, if the package uses that; otherwise empty.
    """

    module: str
    name: str
    positional: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    returns: str = ""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True)
class Method:
    """A method of HCCL's backend, which ``group._get_backend(device)`` returns.

    Attributes:
        name: Its name in Python.
        declaration: Its declaration in C++, with spaces as a formatter leaves them.
    """

    name: str
    declaration: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class ErrorCode:
    """An error of the device.

    Attributes:
        macro: Its name in the runtime's header.
        code: The number that follows "error code is" in the exception's message.
        text: The text that precedes the number. It is missing if no address is known (507053). With
            ``TORCH_NPU_COMPACT_ERROR_OUTPUT=1`` the message has a text only, no number.
    """

    macro: str
    code: int
    text: str

    def __str__(self) -> str:
        return self.macro


_NPU, _RECOVERY, _UTILS = "torch_npu.npu", "torch_npu.npu._recovery", "torch_npu.npu.utils"

CALLS = (
    # The devices that are there, and their state.
    Call(_NPU, "is_available", returns="bool; without a driver False"),
    Call(_NPU, "device_count", returns="int; ASCEND_RT_VISIBLE_DEVICES counts"),
    Call(_NPU, "set_device", ("device",)),
    Call(_NPU, "synchronize", ("device",)),
    Call(_NPU, "empty_cache"),
    Call(_NPU, "memory_stats", ("device",), returns="dict from str to int, keys as CUDA's"),
    Call(_NPU, "mem_get_info", ("device",), returns="(free, total), bytes"),
    Call(_NPU, "utilization", ("device",), returns="int, per cent"),
    Call(_NPU, "get_device_name", ("device_name",), returns="str; the parameter is the device's index"),
    Call(_UTILS, "get_cann_version", keywords=("module",), returns="str; empty if it cannot be found out"),
    Call(_UTILS, "is_support_inf_nan", returns="bool; without it fp16 saturates, and no loss scaler sees an overflow"),
    # Calls that torch makes itself: in `torch.manual_seed` and `torch.autocast`.
    Call(_NPU, "manual_seed_all", ("seed",)),
    Call(_NPU, "_is_in_bad_fork", returns="bool"),
    Call(_NPU, "get_amp_supported_dtype", returns="list of dtypes"),
    # Random numbers and streams.
    Call(_NPU, "get_rng_state", ("device",), returns="tensor of bytes, on the CPU"),
    Call(_NPU, "set_rng_state", ("new_state", "device")),
    Call(_NPU, "default_stream", ("device",), returns="Stream"),
    Call(_NPU, "set_stream", ("stream",)),
    Call(_NPU, "Event.record"),
    Call(_NPU, "Event.recorded_time", returns="int, microseconds of the device's clock; waits for the event"),
    # Stop, check, repair.
    Call(_NPU, "stop_device", ("device_id",), returns="0, or 1 if it failed; counts as stopped either way"),
    Call(_NPU, "check_uce_in_memory", ("device_id",), returns="0 none, 1 foreign, 2 temporary, 3 persistent memory"),
    Call(_NPU, "restart_device", ("device_id",)),
    Call(_RECOVERY, "check_npu_tensor_is_safe", ("tensor_obj",), returns="bool, of the tensor's whole storage"),
    Call(_RECOVERY, "update_npu_tensor_to_safe", ("tensor_obj",)),
    Call(_RECOVERY, "set_npu_tensor_unsafe_check_flag", ("flag",)),
    Call("torch_npu.distributed", "reinit_process_group", keywords=("group", "rebuild_link")),
)

METHODS = (
    Method("resume_hccl_comm", "void resumeHcclComm(int device_id);"),
    Method("abort_hccl_comm", "void abortAndClearHcclComm(c10::optional<std::string> abortReason);"),
    Method("get_hccl_comm_name", "std::string getHcclCommName(int rankid, bool init_comm = true);"),
    Method("set_watchdog_status", "void setWatchdogStatus(int status);"),
    Method("clear_workmeta_list", "void clearWorkMetaList();"),
    Method("_delete_tcpstore_key", "void deleteTCPStoreKey();"),
)

ERROR_CODES = (
    ErrorCode("ACL_ERROR_RT_DEVICE_TASK_ABORT", 107022, "FORCE STOP"),
    ErrorCode("ACL_ERROR_RT_DEVICE_MEM_ERROR", 507053, "UCE ERROR"),
    ErrorCode("ACL_ERROR_RT_HBM_MULTI_BIT_ECC_ERROR", 507054, "HBM MULTI BIT ECC ERROR."),
    ErrorCode("ACL_ERROR_RT_SUSPECT_DEVICE_MEM_ERROR", 507055, "SUSPECT MEM ERROR"),
    ErrorCode("ACL_ERROR_RT_LINK_ERROR", 507056, "HCCS LINK ERROR"),
    ErrorCode("ACL_ERROR_RT_LINK_ERROR", 507056, "UB LINK ERROR"),
    ErrorCode("ACL_ERROR_RT_SUSPECT_REMOTE_ERROR", 507057, "SUSPECT REMOTE ERROR"),
    ErrorCode("ACL_ERROR_RT_COMM_OP_RETRY_FAIL", 507904, "HCCL OP RETRY FAILED"),
)

# Other parts of messages that the package searches for. The time is the device's, in microseconds; it may be missing.
TEXTS = ("There is unsafe data in the input tensor.", "time is ")

VARIABLES = npu_settings.NAMES

BACKEND, DEVICE_TYPE = "hccl", "npu"
BACKEND_CLASS = Call("torch_npu._C._distributed_c10d", "ProcessGroupHCCL")  # the class that has `METHODS`


def differences() -> Iterator[str]:
    """Yield one line for each difference between the imported torch_npu and this module."""
    for call in CALLS:
        try:
            function = attrgetter(call.name)(importlib.import_module(call.module))
        except (ImportError, AttributeError):
            yield f"{call} is missing"
            continue
        own = ("self",) if "." in call.name else ()
        words = (*own, *call.positional)
        try:
            bound = inspect.signature(function).bind(*words, **dict.fromkeys(call.keywords))
        except TypeError as error:
            yield f"{call}: {error}"
            continue
        if any(bound.arguments.get(word) != word for word in words):
            yield f"{call} takes {inspect.signature(function)}, not {', '.join(call.positional)} first"
    try:
        backend = attrgetter(BACKEND_CLASS.name)(importlib.import_module(BACKEND_CLASS.module))
    except (ImportError, AttributeError):
        yield f"{BACKEND_CLASS} is missing"
        return
    yield from (f"{BACKEND_CLASS}.{method} is missing" for method in METHODS if not hasattr(backend, method.name))
