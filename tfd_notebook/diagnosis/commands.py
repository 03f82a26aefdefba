"""Requests of other processes and front ends to the doctor."""

from __future__ import annotations

from typing import Any

from tfd_notebook import diagnosis
from tfd_notebook.cluster.commands import cluster_of
from tfd_notebook.diagnosis import support_bundle


class Requests:
    """Requests that `tfd_notebook.cluster.commands` cannot perform, because it is a lower layer."""

    def doctor(self, name: str | None) -> Any:
        """Return the findings about a cluster, or about this process."""
        findings = diagnosis.check_all() if name is None else diagnosis.doctor(cluster_of(name))
        return findings.records()

    def support(self) -> Any:
        """Return the part of a support bundle that describes this process."""
        return support_bundle.describe_process()
