"""``lightning-replica run``: starts a training on several nodes, with torchrun's own flags."""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from lightning_replica.core import streams
from lightning_replica.core.messages import say
from lightning_replica.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning_replica.launch.rank_logs import RankLogs
    from lightning_replica.nodes.node_settings import NodeSettings
    from lightning_replica.stores.address import Address

T = TypeVar("T")

_NODE_TIMEOUT_S = 10.0
_PORT = 29500
_ETCD_PORT = 2379
_SUPPORTED = frozenset(
    (
        *("nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "standalone"),
        *("master_addr", "master_port", "local_addr", "module", "no_python", "training_script", "training_script_args"),
        *("spares", "node_timeout", "double_up_after", "log_dir", "redirects", "tee"),
    )
)
_OUTPUT = "--redirects and --tee say for each rank where its output goes."
_INSTEAD = {
    "node_rank": "nodes have their ranks in the order of their names.",
    "max_restarts": "lost processes are replaced one by one; `ReplicaZeroStrategy(max_restarts=...)` says how many.",
    "shutdown_timeout": "`DyingGaspCheckpoint(grace_s=...)` says how long ranks have.",
    "signals_to_handle": "SIGTERM, SIGINT and SIGHUP are handled, and SIGUSR1 with a `DyingGaspCheckpoint`.",
    **dict.fromkeys(("local_ranks_filter", "logs_specs"), _OUTPUT),
}
_BACKENDS = ("c10d", "etcd", "etcd-v2")
# What torchelastic calls the files, in its two ways to reach etcd.
_FILES = (("ca_cert", "cacert"), ("ssl_cert", "cert"), ("ssl_cert_key", "key"))
_CONF = frozenset(("join_timeout", *(name for names in _FILES for name in names)))


def add_parser(commands: Any) -> None:
    """Add the command. Its options are parsed by torchrun's parser, which takes a while to import."""
    parser = commands.add_parser(
        "run",
        help="starts a training on several nodes, and replaces nodes that are lost",
        add_help=False,
        prefix_chars="\0",  # no argument looks like an option, so all of them are left to the other parser
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> NoReturn:
    """Run the training on this node, and end this process with its exit code.

    Raises:
        ConfigurationError: If the run cannot begin.
    """
    from lightning_replica.nodes import job

    given = parse(options.arguments)
    command = job.training_command(given.training_script, given.training_script_args, given.module, given.no_python)
    settings = settings_of(given)
    code = job.run(settings, command, logs_of(given, settings.nproc_per_node))
    streams.flush()
    # Threads wait for the store in C++. If they got an answer while the interpreter ends, it would abort.
    os._exit(code)


def parser() -> argparse.ArgumentParser:
    """Return torchrun's parser with the options of this command."""
    from torch.distributed.run import get_args_parser

    parser: argparse.ArgumentParser = get_args_parser()
    parser.prog = "lightning-replica run"
    parser.allow_abbrev = False  # or argparse refuses a script's own `--local`, which could be short for three of these
    parser.description = "Starts a training on several nodes. Run it on each node."
    ours = parser.add_argument_group("lightning_replica")
    ours.add_argument("--spares", type=int, default=0, help="nodes that wait until another is lost (default: 0)")
    ours.add_argument(
        "--node-timeout",
        "--node_timeout",
        type=float,
        default=_NODE_TIMEOUT_S,
        help="seconds without a heartbeat after which a node is lost (default: %(default)g)",
    )
    ours.add_argument(
        "--double-up-after",
        "--double_up_after",
        type=float,
        metavar="SECONDS",
        help="if no other node has taken the place of a lost one by then, the nodes that are left run its ranks too,"
        " until a node comes (CPU only; default: never)",
    )
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line.

    Raises:
        ConfigurationError: If it has one of torchrun's options that this command does not support.
    """
    with_defaults = parser()
    given, defaults = with_defaults.parse_args(arguments), vars(with_defaults.parse_args(["script"]))
    for name, value in vars(given).items():
        # What an operator sets for torchrun in PET_... variables are defaults.
        if name not in _SUPPORTED and value != defaults[name]:
            option = f"--{name.replace('_', '-')}"
            raise ConfigurationError(
                f"{option}={value}: {_INSTEAD.get(name, f'this command has no {option}.')} Leave it out."
            )
    return given


def settings_of(given: argparse.Namespace) -> "NodeSettings":
    """Return the nodes' settings, from what torchrun's parser has parsed.

    Raises:
        ConfigurationError: If an option has a value that only torchrun supports.
    """
    from lightning_replica._compat.torch import rendezvous_config
    from lightning_replica.nodes.endpoint import address_towards
    from lightning_replica.nodes.node_settings import NodeSettings

    # "static" is what torchrun's parser says if the user has named no backend.
    if given.rdzv_backend not in (*_BACKENDS, "static"):
        raise ConfigurationError(f"--rdzv-backend={given.rdzv_backend}: choose one of {', '.join(_BACKENDS)}.")
    try:
        conf = rendezvous_config(given.rdzv_conf)
        store = _store(given, conf)
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(f"--rdzv-endpoint or --rdzv-conf: {error}") from error
    unknown = conf.keys() - _CONF
    if unknown:
        raise ConfigurationError(f"--rdzv-conf {min(unknown)}=...: known are {', '.join(sorted(_CONF))}.")
    join_timeout_s = _number("--rdzv-conf join_timeout", conf.get("join_timeout", "600"), float)
    return NodeSettings(
        nnodes=1 if given.standalone else _nodes(given.nnodes),
        nproc_per_node=_processes(given.nproc_per_node),
        store=store,
        run_id=given.rdzv_id,
        address=given.local_addr or address_towards(store, join_timeout_s),
        spares=given.spares,
        node_timeout_s=given.node_timeout,
        double_up_after_s=given.double_up_after,
        join_timeout_s=join_timeout_s,
    )


def logs_of(given: argparse.Namespace, nproc_per_node: int) -> "RankLogs | None":
    """Return the files for the ranks' output; None if no stream of any rank is to go to one.

    Raises:
        ConfigurationError: If an option has a value that torchrun does not know either.
    """
    from lightning_replica.launch.rank_logs import RankLogs

    redirects, tee = (_streams(f"--{name}", getattr(given, name), nproc_per_node) for name in ("redirects", "tee"))
    if not any((*redirects.values(), *tee.values())):
        return None
    root = given.log_dir or tempfile.mkdtemp(prefix="lightning_replica_logs-")
    name = f"{given.rdzv_id}_{time.strftime('%Y%m%d-%H%M%S')}_{os.getpid()}"
    directory = Path(root, name).absolute()
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        raise ConfigurationError(f"--log-dir={root}: {error}. Choose another directory.") from error
    say(f"the output of ranks is in {directory}.")
    return RankLogs(directory, redirects, tee)


def _streams(option: str, given: str, nproc_per_node: int) -> dict[int, int]:
    from torch.distributed.elastic.multiprocessing import Std

    try:
        found = Std.from_str(given)
    except ValueError as error:
        raise ConfigurationError(
            f"{option}={given}: give 0, 1 (stdout), 2 (stderr) or 3 (both), or one of them for each local rank, as in"
            " 0:3,1:2."
        ) from error
    every = found if isinstance(found, dict) else dict.fromkeys(range(nproc_per_node), found)
    return {rank: int(streams) for rank, streams in every.items()}


def _store(given: argparse.Namespace, conf: Mapping[str, str]) -> "Address":
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    from lightning_replica.launch.node_context import LOOPBACK
    from lightning_replica.stores.address import EtcdAddress, StoreAddress
    from lightning_replica.stores.tcp import listen

    if given.standalone:
        with listen(LOOPBACK) as free:
            return StoreAddress(LOOPBACK, free.getsockname()[1])
    if not given.rdzv_backend.startswith("etcd"):
        static = f"[{given.master_addr}]" if ":" in given.master_addr else given.master_addr
        endpoint = given.rdzv_endpoint or static
        if endpoint.count(":") > 1 and not endpoint.startswith("["):
            raise ConfigurationError(
                f"--rdzv-endpoint={endpoint}: write an address of IPv6 in brackets, [{endpoint}]:PORT."
            )
        return StoreAddress(*parse_rendezvous_endpoint(endpoint, given.master_port or _PORT))
    endpoints = tuple(parse_rendezvous_endpoint(each, _ETCD_PORT) for each in given.rdzv_endpoint.split(","))
    ca_cert, cert, key = (next((conf[name] for name in names if name in conf), None) for names in _FILES)
    return EtcdAddress(endpoints, ca_cert, cert, key)


def _nodes(given: str) -> int:
    least, _, most = given.partition(":")
    if most and least != most:
        raise ConfigurationError(
            f"--nnodes={given}: ranks keep their number here, so give one number of nodes, and --spares for more."
        )
    return _number("--nnodes", least, int)


def _processes(given: str) -> int:
    """Return the number of ranks of a node, which "auto", "gpu" and the like leave to torch."""
    from torch.distributed.run import determine_local_world_size

    try:
        return int(determine_local_world_size(given))
    except ValueError as error:
        raise ConfigurationError(f"--nproc-per-node={given}: {error}") from error


def _number(name: str, given: str, kind: Callable[[str], T]) -> T:
    try:
        return kind(given)
    except ValueError as error:
        raise ConfigurationError(f"{name}={given}: must be a number here.") from error
