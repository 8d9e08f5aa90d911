"""Where a store is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import parse_qsl, quote, unquote, urlencode

from lightning_replica.core import checks
from lightning_replica.errors import ConfigurationError

_ETCD: Final = "etcd://"
_FILES: Final = ("ca_cert", "cert", "key")


@dataclass(frozen=True)
class StoreAddress:
    """Where a process listens that serves a store, and which part of the store is a run's.

    Attributes:
        host: Name or IP address of the host.
        port: Port.
        prefix: What all keys of the run begin with; empty if the store serves this run only.
    """

    host: str
    port: int
    prefix: str = ""

    @property
    def endpoint(self) -> str:
        """The host and the port, for messages."""
        return _join(self.host, self.port)

    def __str__(self) -> str:
        """Return the address as text; `parse` reads it."""
        return f"{self.endpoint}/{self.prefix}" if self.prefix else self.endpoint


@dataclass(frozen=True)
class EtcdAddress:
    """Where an etcd is, how its members and this process prove who they are, and which part is a run's.

    Attributes:
        endpoints: Host and client port of each member.
        ca_cert: PEM file with the certificate of the authority that has signed those of the members. With it, all
            connections use TLS.
        cert: PEM file with the certificate of this process, if the members ask for one.
        key: PEM file with the private key of that certificate.
        prefix: What all keys of the run begin with.
    """

    endpoints: tuple[tuple[str, int], ...]
    ca_cert: str | None = None
    cert: str | None = None
    key: str | None = None
    prefix: str = ""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigurationError: If one of them makes no sense, or a file does not exist.
        """
        if not self.endpoints or len(set(self.endpoints)) < len(self.endpoints):
            raise ConfigurationError(f"endpoints={self.endpoints!r} must name each member of etcd once: (HOST, PORT).")
        for host, port in self.endpoints:
            checks.whole(1, port=port)
            if not host or port > 65535:
                raise ConfigurationError(f"{(host, port)!r} in endpoints must be a host and a port up to 65535.")
        if (self.cert is None) != (self.key is None):
            raise ConfigurationError(f"cert={self.cert!r} and key={self.key!r} belong together: give both, or neither.")
        if self.cert is not None and self.ca_cert is None:
            raise ConfigurationError(f"cert={self.cert!r} is used with TLS only: give ca_cert as well.")
        for name in _FILES:
            file = getattr(self, name)
            if file is not None and not Path(file).is_file():
                raise ConfigurationError(f"{name}={file!r} must be a PEM file, but there is no such file.")

    @property
    def host(self) -> str:
        """The host of the first member."""
        return self.endpoints[0][0]

    @property
    def port(self) -> int:
        """The port of the first member."""
        return self.endpoints[0][1]

    @property
    def endpoint(self) -> str:
        """The hosts and the ports, for messages."""
        return ",".join(_join(host, port) for host, port in self.endpoints)

    def __str__(self) -> str:
        """Return the address as text; `parse` reads it."""
        files = {name: getattr(self, name) for name in _FILES if getattr(self, name) is not None}
        return f"{_ETCD}{self.endpoint}/{quote(self.prefix)}{f'?{urlencode(files)}' if files else ''}"


Address: TypeAlias = StoreAddress | EtcdAddress
"""Where the store of a run is."""


def parse(text: str) -> Address:
    """Return the address that ``text`` says.

    Raises:
        ValueError: If it says none.
    """
    if text.startswith(_ETCD):
        where, _, files = text.removeprefix(_ETCD).partition("?")
        endpoints, _, prefix = where.partition("/")
        return EtcdAddress(tuple(map(_split, endpoints.split(","))), **dict(parse_qsl(files)), prefix=unquote(prefix))
    endpoint, _, prefix = text.partition("/")
    return StoreAddress(*_split(endpoint), prefix)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _split(endpoint: str) -> tuple[str, int]:
    host, colon, port = endpoint.rpartition(":")
    if not (host and colon):
        raise ValueError(f"{endpoint!r} is not of the form HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)
