"""``lightning-replica plan``: shows what a job would cost, and which losses it would survive."""

import argparse
import json
import math
import re
from dataclasses import asdict
from decimal import Decimal
from typing import Any, get_args

from lightning_replica.cli import costs, losses
from lightning_replica.cli.division import Division, memory, of_stage, parts
from lightning_replica.core import checks
from lightning_replica.core.output import size, table, write
from lightning_replica.errors import ConfigurationError
from lightning_replica.megatron.sizes import ParallelSizes
from lightning_replica.sharding.engine import REDUCE_DTYPES

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NUMBER = re.compile(r"([+-]?\d[\d_]*(?:\.\d+)?(?:e[+-]?\d{1,3})?) ?([kmbt]?)", re.IGNORECASE)
_ROWS = 3  # how many numbers of simultaneous losses are listed

_EPILOG = """\
example:
  lightning-replica plan --ranks 64 --replicas 2 --params 7B --precision bf16-mixed --ranks-per-node 8

Memory leaves out activations, the model's buffers, autocast's 16-bit copies and what a backend needs for itself.
ZeRO-1 stands for the same strategy with one replica. Losses are simultaneous: within one step and its recovery.
"""


def add_parser(commands: Any) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "plan",
        help="memory and traffic per rank, and which losses a job survives",
        description="Shows what a job would cost per rank, compared with DDP and ZeRO-1, and what it would survive.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="processes that train")
    parser.add_argument("--replicas", type=int, default=2, metavar="R", help="copies of each shard (default: 2)")
    parser.add_argument("--params", type=_count, required=True, metavar="PSI", help="trained elements: 7e9, 7B, 350M")
    names = ", ".join([*get_args(costs.Precision), *costs.ALIASES])
    parser.add_argument("--precision", default="32-true", help=f"precision of the Trainer: {names} (default: 32-true)")
    parser.add_argument(
        "--optimizer-bytes",
        type=float,
        metavar="B",
        help="bytes of optimizer state per element; 8 for Adam in 32 bits (default: two values in the updated dtype)",
    )
    parser.add_argument(
        "--reduce-dtype",
        choices=REDUCE_DTYPES,
        help="dtype in which gradients leave a node (default: that of the parameters)",
    )
    nodes = parser.add_mutually_exclusive_group()
    nodes.add_argument("--ranks-per-node", type=int, metavar="L", help="also consider losses of whole nodes")
    nodes.add_argument("--nodes", type=int, metavar="M", help="the same, by the number of nodes")
    _add_division(parser)
    parser.add_argument("--json", action="store_true", help="write JSON, in bytes")
    parser.set_defaults(run=run)


def _add_division(parser: argparse.ArgumentParser) -> None:
    """Add the options by which a model is divided among ranks; their names are megatron-core's."""
    division = parser.add_argument_group("models that are divided among ranks (docs/megatron.md)")
    for name, what in (
        ("tensor-model", "ranks that share every layer"),
        ("pipeline-model", "stages that the layers are divided into"),
        ("context", "ranks that share every sequence"),
        ("expert-model", "ranks that divide the experts among themselves"),
    ):
        division.add_argument(f"--{name}-parallel-size", type=int, default=1, metavar="N", help=what)
    division.add_argument(
        "--expert-params", type=_count, default=0, metavar="PSI", help="how many of the trained elements are experts'"
    )


def _count(text: str) -> int:
    """Read a number of elements: ``7000000000``, ``7_000_000_000``, ``7e9`` or ``7B``.

    Raises:
        argparse.ArgumentTypeError: If it is not a whole number.
    """
    found = _NUMBER.fullmatch(text.strip())
    number = Decimal(found[1]) * _UNITS[found[2].upper()] if found else Decimal("nan")
    if not math.isfinite(float(number)) or number != int(number):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number of elements. Write it like 7000000000, 7e9, 7B or 350M."
        )
    return int(number)


def run(options: argparse.Namespace) -> int:
    """Write the plan and return the exit code.

    Raises:
        ConfigurationError: If the options are invalid.
    """
    precision = costs.ALIASES.get(options.precision, options.precision)
    job = costs.Job(
        options.ranks, options.replicas, options.params, precision, options.optimizer_bytes, options.reduce_dtype
    )
    sizes = ParallelSizes(
        options.tensor_model_parallel_size,
        options.pipeline_model_parallel_size,
        options.context_parallel_size,
        options.expert_model_parallel_size,
    )
    per_node = options.ranks_per_node if options.nodes is None else _share(options.ranks, options.nodes)
    found = plan(job, per_node, Division(sizes, options.expert_params))
    write(json.dumps(found, indent=2) if options.json else render(found))
    return 0


def _share(ranks: int, nodes: int) -> int:
    """Return the number of ranks on each node.

    Raises:
        ConfigurationError: If nodes cannot have the same number of ranks.
    """
    checks.whole(1, nodes=nodes)
    if ranks % nodes:
        raise ConfigurationError(f"{nodes=} cannot share ranks={ranks} evenly: give a divisor of it.")
    return ranks // nodes


def plan(
    job: costs.Job,
    ranks_per_node: int | None,
    division: Division = Division(ParallelSizes()),  # noqa: B008
) -> dict[str, Any]:
    """Return costs and survived losses of a job, as plain data with sizes in bytes."""
    own = parts(job, division)
    stages = division.sizes.pipeline_model_parallel_size
    contenders = {
        "DDP": (memory([costs.ddp_memory(each) for each in own]), sum(map(costs.ddp_traffic, own))),
        "ZeRO-1": (
            memory([costs.memory(costs.zero1(each)) for each in own]),
            sum(costs.traffic(costs.zero1(each)) for each in own),
        ),
        "replica_zero": (memory([costs.memory(each) for each in own]), sum(map(costs.traffic, own))),
    }
    found: dict[str, Any] = {
        "job": {**asdict(job), "shards": job.shards, "optimizer_bytes": job.state_bytes},
        "memory_bytes": {name: {**asdict(held), "total": held.total} for name, (held, _) in contenders.items()},
        "sent_bytes_per_step": {name: sent for name, (_, sent) in contenders.items()},
        "rank_losses": _losses(losses.by_rank(job.ranks, job.replicas, stages)),
    }
    if not division.is_none:
        found["division"] = {**asdict(division.sizes), "parameters_of_a_rank": sum(each.parameters for each in own)}
    if ranks_per_node is not None:
        found |= _of_nodes(job, ranks_per_node, division)
    return found


def _of_nodes(job: costs.Job, ranks_per_node: int, division: Division) -> dict[str, Any]:
    """Return what depends on which ranks share a node."""
    stages = division.sizes.pipeline_model_parallel_size
    held = losses.by_node(job.ranks, job.replicas, ranks_per_node, stages)
    nodes = [str(rank // ranks_per_node) for rank in range(job.ranks)]
    grids = division.sizes.grids(job.ranks, job.replicas, len(set(nodes)))
    found: dict[str, Any] = {"node_losses": _losses(held), "shards_together": len(grids.co_located(nodes))}
    count = len(set(nodes)) // stages  # of a stage
    if not division.expert_parameters and count * stages == len(set(nodes)):
        stage = of_stage(job, division)
        found["leaving_bytes_per_step"] = {
            "DDP": costs.ddp_node_traffic(stage, count),
            "ZeRO-1": costs.node_traffic(costs.zero1(stage), count),
            "replica_zero": costs.node_traffic(stage, count),
        }
    return found


def _losses(holders: losses.Holders) -> dict[str, Any]:
    return {
        "total": holders.total,
        "always_survived": holders.tolerance,
        "complete_count": holders.even,
        "fatal": [
            {"losses": k, "sets": math.comb(holders.total, k), "fatal": holders.fatal(k),
             "probability": float(holders.probability(k))}
            for k in holders.countable(_ROWS)
        ],
    }  # fmt: skip


def render(found: dict[str, Any]) -> str:
    """Return a plan, as text for people."""
    job, held, sent = found["job"], found["memory_bytes"], found["sent_bytes_per_step"]
    names = list(held)
    rows = [
        [label, *(size(held[name][key]) if held[name][key] else "-" for name in names)]
        for key, label in (
            ("parameters", "parameters"),
            ("gradients", "gradients"),
            ("main", "parameters of the shard"),
            ("main_gradients", "their gradient"),
            ("optimizer", "optimizer state"),
            ("receive", "gradients under way"),
            ("total", "total"),
        )
    ]
    lines = [
        f"{job['ranks']} ranks, {job['replicas']} replicas of {job['shards']} shards,"
        f" {job['parameters']:,} parameters, {job['precision']}, {job['optimizer_bytes']:g} bytes of optimizer state"
        " per element",
        *_render_division(found),
        "\nMemory per rank",
        table(["", *names], rows),
        "\nTraffic per step",
        table(["", *names], [["sent by a rank", *(size(sent[name]) for name in names)], *_leaving(found, names)]),
        *_render_losses("rank", found["rank_losses"]),
    ]
    if "node_losses" in found:
        lines += _render_losses("node", found["node_losses"])
        if found["shards_together"]:
            lines.append(
                f"  {found['shards_together']} of {job['shards']} shards have several of their {job['replicas']}"
                " holders on one node, which are lost with it. Choose\n  `replicas` so that the ranks of a replica"
                " fill whole nodes."
            )
    return "\n".join(lines)


def _render_division(found: dict[str, Any]) -> list[str]:
    division = found.get("division")
    if division is None:
        return []
    sizes = [f"{name}={size}" for name, size in division.items() if name.endswith("_size") and size not in (None, 1)]
    return [
        f"Every rank has {division['parameters_of_a_rank']:,} of them: {', '.join(sizes)}. What tensor ranks and stages"
        " send each other is not counted."
    ]


def _leaving(found: dict[str, Any], names: list[str]) -> list[list[str]]:
    leaving = found.get("leaving_bytes_per_step")
    if leaving is None:
        return []
    return [["out of a node", *("-" if leaving[name] is None else size(leaving[name]) for name in names)]]


def _render_losses(noun: str, found: dict[str, Any]) -> list[str]:
    safe, total = found["always_survived"], found["total"]
    nouns = f"{noun}s"
    if safe == 0:
        lines = [f"\nNothing is protected: the loss of a single {noun} can lose a shard."]
    else:
        lines = [f"\nAny {f'{safe} {nouns}' if safe > 1 else f'one {noun}'} of {total} may be lost at a time."]
    rows = [
        [f"{row['losses']} {nouns if row['losses'] > 1 else noun}", f"{row['fatal']:,}", f"{row['sets']:,}",
         _percent(row["probability"])]
        for row in found["fatal"]
    ]  # fmt: skip
    lines.append(table(["lost at once", "sets that lose a shard", "of", "chance"], rows))
    if not found["complete_count"] and total > 1:
        lines.append(
            "  A replica does not fill a whole number of nodes, so nodes share more shards than they need to. Make the"
            " number\n  of nodes a multiple of the replicas. More losses are not counted."
        )
    return lines


def _percent(chance: float) -> str:
    return f"{chance:.3%}" if chance == 0 or chance >= 1e-5 else f"{chance:.1e}"
