"""``lightning-replica run``: starts a training on several nodes, with torchrun's own flags."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from lightning_replica.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning_replica.nodes.settings import NodeSettings
    from lightning_replica.stores.address import Address

T = TypeVar("T")

_NODE_TIMEOUT_S = 10.0
_PORT = 29500
_ETCD_PORT = 2379
_BACKENDS = ("c10d", "etcd", "etcd-v2")
# What torchelastic calls the files, in its two ways to reach etcd.
_FILES = (("ca_cert", "cacert"), ("ssl_cert", "cert"), ("ssl_cert_key", "key"))


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

    given = parser().parse_args(options.arguments)
    command = job.training_command(given.training_script, given.training_script_args, given.module)
    code = job.run(settings_of(given), command)
    sys.stdout.flush()
    sys.stderr.flush()
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
        help="seconds without a sign of life after which a node is lost (default: %(default)g)",
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


def settings_of(given: argparse.Namespace) -> "NodeSettings":
    """Return the nodes' settings, from what torchrun's parser has parsed.

    Raises:
        ConfigurationError: If an option has a value that only torchrun supports.
    """
    from lightning_replica._compat.torch import rendezvous_config
    from lightning_replica.nodes.endpoint import address_towards
    from lightning_replica.nodes.settings import NodeSettings

    # "static" is what torchrun's parser says if the user has named no backend.
    if given.rdzv_backend not in (*_BACKENDS, "static"):
        raise ConfigurationError(f"--rdzv-backend={given.rdzv_backend}: choose one of {', '.join(_BACKENDS)}.")
    try:
        conf = rendezvous_config(given.rdzv_conf)
        store = _store(given.rdzv_backend, given.rdzv_endpoint, conf)
    except ValueError as error:
        raise ConfigurationError(f"--rdzv-endpoint or --rdzv-conf: {error}") from error
    join_timeout_s = _number("--rdzv-conf join_timeout", conf.get("join_timeout", "600"), float)
    return NodeSettings(
        nnodes=_nodes(given.nnodes),
        nproc_per_node=_number("--nproc-per-node", given.nproc_per_node, int),
        store=store,
        run_id=given.rdzv_id,
        address=given.local_addr or address_towards(store, join_timeout_s),
        spares=given.spares,
        node_timeout_s=given.node_timeout,
        double_up_after_s=given.double_up_after,
        join_timeout_s=join_timeout_s,
    )


def _store(backend: str, endpoint: str, conf: Mapping[str, str]) -> "Address":
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    from lightning_replica.stores.address import EtcdAddress, StoreAddress

    if not backend.startswith("etcd"):
        return StoreAddress(*parse_rendezvous_endpoint(endpoint or "127.0.0.1", _PORT))
    endpoints = tuple(parse_rendezvous_endpoint(each, _ETCD_PORT) for each in endpoint.split(","))
    ca_cert, cert, key = (next((conf[name] for name in names if name in conf), None) for names in _FILES)
    return EtcdAddress(endpoints, ca_cert, cert, key)


def _nodes(given: str) -> int:
    least, _, most = given.partition(":")
    if most and least != most:
        raise ConfigurationError(
            f"--nnodes={given}: ranks keep their number here, so give one number of nodes, and --spares for more."
        )
    return _number("--nnodes", least, int)


def _number(name: str, given: str, kind: Callable[[str], T]) -> T:
    try:
        return kind(given)
    except ValueError as error:
        raise ConfigurationError(f"{name}={given}: must be a number here.") from error
