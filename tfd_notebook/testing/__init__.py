"""Checks for authors of launchers."""

from __future__ import annotations

from tfd_notebook.testing.conformance import CHECKS, Outcome, Report, check_launcher

__all__ = ["CHECKS", "Outcome", "Report", "check_launcher"]
