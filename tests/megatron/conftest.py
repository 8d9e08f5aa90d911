"""Imports megatron-core before any test does."""

from tests.megatron import imported  # noqa: F401
