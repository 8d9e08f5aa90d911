"""A real etcd: members in processes of their own, which a test can kill, stop and start again."""

import datetime
import ipaddress
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from lightning_replica.core.polling import poll
from tests.support.ranks import free_port

LOOPBACK = "127.0.0.1"
ETCD = shutil.which("etcd") or "/usr/bin/etcd"
NEEDS_ETCD = pytest.mark.skipif(not Path(ETCD).exists(), reason="needs etcd: apt install etcd-server")
_WITHIN_S = 30.0


def until(ready: Callable[[], bool], what: str, within_s: float = _WITHIN_S) -> None:
    """Waits, but not for ever."""
    deadline = time.monotonic() + within_s

    def look() -> None:
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"

    poll(ready, look)


@dataclass(frozen=True)
class Identity:
    """Files with which one side of a connection proves who it is; ``ca_cert`` is whom it believes."""

    ca_cert: str
    cert: str
    key: str


class Member:
    """One member.

    Args:
        number: Its number.
        ports: For clients, and for other members.
        directory: Where its data and its log are.
        cluster: What etcd calls the initial cluster.
        identity: None if it uses no TLS.
    """

    def __init__(
        self, number: int, ports: tuple[int, int], directory: Path, cluster: str, identity: Identity | None
    ) -> None:
        self.endpoint = LOOPBACK, ports[0]
        self._name, self._identity, self._log = f"member{number}", identity, directory / f"member{number}.log"
        self._url = f"{'https' if identity else 'http'}://{LOOPBACK}:{ports[0]}"
        peers = f"http://{LOOPBACK}:{ports[1]}"
        self._command = [ETCD, "--name", self._name, "--data-dir", str(directory / self._name)]
        self._command += ["--listen-client-urls", self._url, "--advertise-client-urls", self._url]
        self._command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
        self._command += ["--initial-cluster", cluster, "--logger", "zap", "--log-outputs", "stderr"]
        self._command += ["--heartbeat-interval", "50", "--election-timeout", "500"]
        if identity:
            self._command += ["--client-cert-auth", "--trusted-ca-file", identity.ca_cert]
            self._command += ["--cert-file", identity.cert, "--key-file", identity.key]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts its process, and does not wait for it."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD")}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)

    def await_health(self) -> None:
        """Waits until it has a leader and answers."""
        until(self._is_healthy, f"{self._name} is healthy, {self._log}")

    def _is_healthy(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self._log.read_text()
        tls: Any = {}
        if self._identity:
            tls = {"verify": self._identity.ca_cert, "cert": (self._identity.cert, self._identity.key)}
        try:
            with requests.get(f"{self._url}/health", timeout=1, **tls) as answer:
                return bool(answer.ok and answer.json()["health"] == "true")
        except (requests.ConnectionError, requests.Timeout):
            return False

    def restart(self) -> None:
        """Starts it again, with the data that it had, and waits until it answers."""
        self.start()
        self.await_health()

    def kill(self) -> None:
        """Kills it, as when its machine loses power."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def stop(self) -> None:
        """Makes it silent: its connections stay open, and nothing answers."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Ends what `stop` began."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)


@contextmanager
def etcd(directory: Path, count: int = 3, identity: Identity | None = None) -> Iterator[list[Member]]:
    """Starts an etcd of some members, and ends what is left of it."""
    ports = [(free_port(), free_port()) for _ in range(count)]
    cluster = ",".join(f"member{number}=http://{LOOPBACK}:{peer}" for number, (_, peer) in enumerate(ports))
    members = [Member(number, pair, directory, cluster, identity) for number, pair in enumerate(ports)]
    try:
        for member in members:
            member.start()
        for member in members:
            member.await_health()
        yield members
    finally:
        for member in members:
            member.kill()


def identity(directory: Path, name: str) -> Identity:
    """Makes an authority and a certificate of it that is valid on loopback, on both sides of a connection."""
    authority, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    files = [directory / f"{name}.{kind}.pem" for kind in ("ca", "cert", "key")]
    files[0].write_bytes(_certificate(f"{name} authority", authority, f"{name} authority", authority))
    files[1].write_bytes(_certificate(name, own, f"{name} authority", authority))
    encoding, kind = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    files[2].write_bytes(own.private_bytes(encoding, kind, serialization.NoEncryption()))
    return Identity(*map(str, files))


def _certificate(
    name: str, key: ec.EllipticCurvePrivateKey, issuer: str, issuer_key: ec.EllipticCurvePrivateKey
) -> bytes:
    now = datetime.datetime.now(datetime.timezone.utc)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(LOOPBACK))])
    builder = x509.CertificateBuilder(
        issuer_name=x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer)]),
        subject_name=x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]),
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - datetime.timedelta(hours=1),
        not_valid_after=now + datetime.timedelta(days=1),
    )
    builder = builder.add_extension(x509.BasicConstraints(ca=key is issuer_key, path_length=None), critical=True)
    # From Python 3.13 on, certificates without these are refused.
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    builder = builder.add_extension(identifier, critical=False)
    if key is issuer_key:
        builder = builder.add_extension(_signs(), critical=True)
    else:
        builder = builder.add_extension(address, critical=False)
    return builder.sign(issuer_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _signs() -> x509.KeyUsage:
    others = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    unused = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    return x509.KeyUsage(key_cert_sign=True, crl_sign=True, **unused)
