"""How torch.distributed makes process groups, and torch's tables of them.

``init_process_group``, ``new_group``, device meshes and all other code that makes a group end in
``_new_process_group_helper``. `answer_new_groups` replaces that function, so that the package sees every group that is
made, whatever its backend.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import Backend, BackendConfig, ProcessGroup, Store, distributed_c10d

from lightning_replica._compat.versions import need, need_parameters, private_names_of
from lightning_replica.errors import ConfigurationError

with private_names_of("torch"):
    from torch.distributed.distributed_c10d import _register_process_group, _unregister_process_group

    _original = distributed_c10d._new_process_group_helper
    need_parameters(_original, "backend_options", "timeout", "pg_tag", "device_id", "group_desc")
    need(distributed_c10d, "_find_pg_by_ranks_and_tag", "_get_default_group", "_get_default_store")
    need(distributed_c10d, "_get_default_timeout", "_world")
    need(distributed_c10d._world, "pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "group_count")
    need(distributed_c10d._world, "tags_to_pg", "pg_to_tag")
    need(ProcessGroup, "_device_types", "_get_backend", "_register_backend", "_set_default_backend", "shutdown")
    need(ProcessGroup, "_set_group_name", "_set_group_desc", "BackendType")


@dataclass(frozen=True)
class NewGroup:
    """A process group that a caller asks torch for.

    Attributes:
        ranks: The members, in their order in the group.
        place: This rank's place among the members.
        backend: The backend that the caller has named, or the default group's backend.
        timeout: The time after which a collective fails.
        options: The backend's own options, if there are any.
        is_default: Whether the group is the default group.
    """

    ranks: tuple[int, ...]
    place: int
    backend: str
    timeout: timedelta
    options: Any = None
    is_default: bool = False


def answer_new_groups(answer: Callable[[NewGroup], ProcessGroup] | None) -> None:
    """Let ``answer`` make every process group of which this rank is a member; None restores torch's own function.

    The group that ``answer`` returns is registered with torch under the name that torch has chosen, unless it is
    registered already.
    """
    helper = _original if answer is None else _answered(answer)
    distributed_c10d._new_process_group_helper = helper


def _answered(answer: Callable[[NewGroup], ProcessGroup]) -> Callable[..., Any]:
    def helper(
        group_size: int,
        group_rank: int,
        global_ranks_in_group: list[int],
        backend: Any,
        store: Store,
        group_name: Any,
        backend_options: Any = None,
        timeout: timedelta | None = None,
        pg_tag: str | None = None,
        device_id: Any = None,
        group_desc: str | None = None,
        **more: Any,
    ) -> tuple[Any, Store | None]:
        _refuse(more)
        world = distributed_c10d._world
        if pg_tag:  # callers that ask with the same tag share a group
            existing = distributed_c10d._find_pg_by_ranks_and_tag(pg_tag, global_ranks_in_group)
            if existing is not None:
                return existing, world.pg_map[existing][1]
        ranks = global_ranks_in_group or list(range(group_size))
        if global_ranks_in_group and distributed_c10d._get_default_group().rank() not in ranks:
            return distributed_c10d.GroupMember.NON_GROUP_MEMBER, None
        made = answer(
            NewGroup(
                tuple(ranks),
                group_rank,
                str(backend),
                timeout or distributed_c10d._get_default_timeout(Backend(backend)),
                backend_options,
                is_default=not global_ranks_in_group,
            )
        )
        if made not in world.pg_map:
            made._set_group_desc(group_desc or "undefined")
            _register(made, _unused(group_name), str(backend), store, pg_tag)
        return made, store

    return helper


def _refuse(more: dict[str, Any]) -> None:
    """Raise an error for what newer versions of torch can ask of a group, and what a group that is kept cannot do."""
    asked = [f"{name}={value!r}" for name, value in more.items() if value]
    if asked:
        raise ConfigurationError(
            f"A process group was asked for with {', '.join(asked)}, which `replica_zero` cannot pass on: it opens its"
            " groups anew in a recovery. Leave it out."
        )


def open_group(wanted: NewGroup, name: str, store: Store) -> ProcessGroup:
    """Open a process group as torch itself does. All members call this.

    Args:
        wanted: Members, backend, timeout and options of the group.
        name: Name of the group, which no other group of this process may have.
        store: The store through which the members find each other.

    Raises:
        RuntimeError: If the members do not connect in time.
    """
    group: Any
    group, _ = _original(
        len(wanted.ranks),
        wanted.place,
        list(wanted.ranks),
        Backend(wanted.backend),
        store,
        distributed_c10d.GroupName(name) if hasattr(distributed_c10d, "GroupName") else name,  # type: ignore[arg-type]
        backend_options=wanted.options,
        timeout=wanted.timeout,
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(wanted.ranks)}
    opened: ProcessGroup = group
    return opened


def open_group_within(group: ProcessGroup, ranks: tuple[int, ...], name: str, timeout: timedelta) -> ProcessGroup:
    """Open a process group of some ranks of another, in this order, with its backend. All members call this.

    ``new_group(use_local_synchronization=True)`` derives the name from the number of groups that a rank is in. So it
    hangs where its members are in different numbers of groups.

    Args:
        group: The group that all members are in.
        ranks: The members, by their global numbers.
        name: Name of the new group, on which the members have agreed, and which no other group has.
        timeout: The time after which a collective fails.

    Raises:
        RuntimeError: If the members do not connect in time.
    """
    own = distributed_c10d._get_default_group().rank()
    wanted = NewGroup(ranks, ranks.index(own), str(distributed_c10d._world.pg_map[group][0]), timeout)
    return open_group(wanted, name, default_store())


def forget_group(group: ProcessGroup, shut_down: bool = True) -> None:
    """Do what ``destroy_process_group`` does for one group; do nothing if the group is destroyed already.

    Args:
        group: The group.
        shut_down: Whether to shut down the group's backends too.
    """
    world = distributed_c10d._world
    if group not in world.pg_map:
        return
    if shut_down:
        group.shutdown()
    name = world.pg_names.get(group)
    tag = world.pg_to_tag.get(group)
    for table in _tables_by_group():
        table.pop(group, None)
    for known in (tag, ""):
        if known is not None and group in world.tags_to_pg.get(known, ()):
            world.tags_to_pg[known].remove(group)
    if name is not None:
        _unregister_process_group(name)


def _tables_by_group() -> list[dict[ProcessGroup, Any]]:
    """Return all tables of torch that have an entry for each group, also those that only this version has."""
    world = distributed_c10d._world
    named: list[Any] = [world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag]
    return [*named, *(table for table in vars(world).values() if isinstance(table, dict))]


def devices_of(backend: str) -> list[str]:
    """Return the types of the devices whose tensors a group with ``backend`` carries."""
    return list(BackendConfig(Backend(backend)).get_device_backend_map())


def default_store() -> Store:
    """Return the store through which the ranks of the default group have found each other."""
    return distributed_c10d._get_default_store()


def is_registered(group: ProcessGroup) -> bool:
    """Return whether ``group`` is registered with torch, which means that it is not destroyed."""
    return group in distributed_c10d._world.pg_map


def _unused(name: str) -> str:
    """Return ``name``, or a variant of it if it is taken: groups come and go here, so torch may reuse a number."""
    taken = set(distributed_c10d._world.pg_names.values())
    candidate, number = name, 0
    while candidate in taken:
        number += 1
        candidate = f"{name}.{number}"
    return candidate


def _register(group: ProcessGroup, name: Any, backend: str, store: Store, tag: str | None) -> None:
    """Register a group with torch, as ``_new_process_group_helper`` does at its end."""
    world = distributed_c10d._world
    group._set_group_name(name)
    world.pg_map[group] = (backend, store)
    world.pg_names[group] = name
    world.pg_backend_config[group] = str(BackendConfig(Backend(backend)))
    _register_process_group(name, group)
    own_tag = f"user:{tag}" if tag else f"ptd:{name}"
    for each in (own_tag,) if tag else ("", own_tag):
        world.tags_to_pg.setdefault(each, []).append(group)
    world.pg_to_tag[group] = own_tag
