"""The commands of the doctor, for the command line's socket and for front ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfd_notebook import diagnosis
from tfd_notebook.cluster.commands import cluster_of
from tfd_notebook.diagnosis import support_bundle


def doctor(request: Mapping[str, Any]) -> Any:
    """Return the findings about the cluster that a request names, or about this process."""
    if request.get("name") is None:
        return diagnosis.check_all().records()
    return diagnosis.doctor(cluster_of(request)).records()


def support(request: Mapping[str, Any]) -> Any:
    """Return the part of a support bundle that describes this process."""
    return support_bundle.describe_process()
