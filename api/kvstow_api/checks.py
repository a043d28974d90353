"""Names of readiness checks, for those who must not load more."""

INFORMATIONAL_CHECKS = ("pool", "pinned")
"""Fail `/readyz` only where the host says so."""
