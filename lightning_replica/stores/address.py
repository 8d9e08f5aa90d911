"""Where a store is."""

from dataclasses import dataclass


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
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        """Return the address as text; `parse` reads it."""
        return f"{self.endpoint}/{self.prefix}" if self.prefix else self.endpoint

    @classmethod
    def parse(cls, text: str) -> "StoreAddress":
        """Return the address that ``text`` says.

        Raises:
            ValueError: If it says none.
        """
        endpoint, _, prefix = text.partition("/")
        host, colon, port = endpoint.rpartition(":")
        if not (host and colon):
            raise ValueError(f"{text!r} is not of the form HOST:PORT")
        return cls(host.removeprefix("[").removesuffix("]"), int(port), prefix)
