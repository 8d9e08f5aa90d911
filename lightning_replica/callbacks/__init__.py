"""Callbacks that come with the strategy."""

from lightning_replica.callbacks.fault_injector import FaultInjector, Injected
from lightning_replica.callbacks.faults import InjectedFault
from lightning_replica.callbacks.fingerprint import Fingerprint

__all__ = ["FaultInjector", "Fingerprint", "Injected", "InjectedFault"]
