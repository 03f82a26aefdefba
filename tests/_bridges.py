"""Processes of this test run next to the workers of an engine."""

from __future__ import annotations

import os

import psutil


def bridges() -> list[psutil.Process]:
    """Return the processes next to workers that connect agents to this process."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if "bridges.rendezvous" in " ".join(process.info["cmdline"] or ())
        and process.environ().get("TFD_TEST_RUN") == os.environ["TFD_TEST_RUN"]
    ]
