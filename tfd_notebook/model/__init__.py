"""Immutable values that every process shares, and the store of closures."""
