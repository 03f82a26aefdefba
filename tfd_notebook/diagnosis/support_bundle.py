"""Archive for a support ticket: the state of processes and clusters, without secrets."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import platform
import re
import sys
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfd_notebook import diagnosis
from tfd_notebook._version import VERSION
from tfd_notebook.agent.task_supervisor import last_lines
from tfd_notebook.cluster.cluster import Cluster, running
from tfd_notebook.diagnosis.redaction import Redactor, is_secret
from tfd_notebook.errors import UsageError
from tfd_notebook.launchers import profiles
from tfd_notebook.model.snapshot import as_dict
from tfd_notebook.model.spec import pack
from tfd_notebook.net import config_files, runtime_dir
from tfd_notebook.views import text
from tfd_notebook.views.diagnostics import Findings

_LINES = 200
#: Environment variables that the archive contains, in addition to redacted secrets.
_VARIABLES = re.compile(
    r"CONDA_|CUDA_|GRPC_|JUPYTER|KUBERNETES_|LD_LIBRARY|NCCL_|NVIDIA_|OMP_|PATH$|PYTHON|SLURM_|SM_"
    r"|TF_|TFD_|TMPDIR$|TPU_|VIRTUAL_ENV|XDG_|XLA_|((http|https|grpc|no|no_grpc)_proxy$)",
    re.IGNORECASE,
)
#: Distributions whose versions the archive contains.
_DISTRIBUTIONS = re.compile(
    r"anywidget|asyncssh|cloudpickle|comm$|cryptography|grpcio|ipykernel|ipython|ipywidgets|jupyter"
    r"|keras|kubernetes|numpy|nvidia|pandas|protobuf|psutil|tensorflow|tf[-_d]|tornado|traitlets"
)
_README = """Written by tfd support on {when}.

This archive contains versions, findings, the state of clusters, the last lines of their logs,
profiles, and the relevant environment variables. Tokens, passwords and keys were removed if they
were recognized. Read the archive before you share it.
"""


def describe_process() -> dict[str, str]:
    """Return the texts about this process by file name, without secrets."""
    clusters = running()
    redactor = Redactor(os.environ, *(cluster.config.env for cluster in clusters.values()))
    unredacted = diagnosis.check_all()
    findings = Findings(map(redactor.value, unredacted), redactor.value(unredacted.checked))
    texts = {
        "versions.json": _json(versions()),
        "environment.json": _json(redactor.value(_environment())),
        "findings.json": _json(findings.records()),
        "findings.txt": repr(findings),
    }
    for name, cluster in clusters.items():
        snapshot = redactor.value(cluster.snapshot())
        texts[f"{name}/state.json"] = _json(as_dict(snapshot))
        texts[f"{name}/state.txt"] = text(snapshot)
        texts[f"{name}/configuration.json"] = _json(redactor.value(pack(cluster.config)))
        for row in snapshot.tasks:
            texts[f"{name}/logs/{row.task.replace(':', '-')}.txt"] = redactor.text(
                _log(cluster, row.task)
            )
    return texts


def describe_host() -> dict[str, str]:
    """Return the texts about this user's profiles and agents on this host, without secrets."""
    redactor = Redactor()
    texts = {}
    for profile_directory in (config_files.SYSTEM, profiles.user_directory()):
        for path in sorted(profile_directory.glob("*.toml")):
            texts[f"profiles/{path.name}"] = redactor.text(_read(path))
    for directory, state in runtime_dir.agent_states():
        texts[f"agents/{directory.name}/state.json"] = _json(redactor.value(state))
        for log in sorted(directory.glob("*.log")):
            lines = "\n".join(last_lines(log, _LINES))
            texts[f"agents/{directory.name}/{log.name}"] = redactor.text(lines)
    return texts


def write(texts: Mapping[str, str], path: str | os.PathLike[str] | None = None) -> Path:
    """Write an archive (``.tar.gz``) that only this user can read.

    Parameters
    ----------
    texts : mapping of str to str
        Texts by file name.
    path : path, optional
        Default: ``tfd-support-<time>.tar.gz`` in the working directory.

    Raises
    ------
    UsageError
        The file exists, or cannot be written.
    """
    name = f"tfd-support-{time.strftime('%Y%m%d-%H%M%S')}"
    target = Path(f"{name}.tar.gz" if path is None else path)
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise UsageError(
            f"writing {target} failed: {error.strerror}", fix="name another file"
        ) from None
    with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for entry, content in {"README.txt": _README.format(when=time.ctime()), **texts}.items():
            data = content.encode(errors="replace")
            info = tarfile.TarInfo(f"{name}/{entry}")
            info.size, info.mtime, info.mode = len(data), int(time.time()), 0o600
            archive.addfile(info, io.BytesIO(data))
    return target


def versions() -> dict[str, Any]:
    """Return the versions of Python, this package and the relevant distributions."""
    installed = {
        str(distribution.metadata["Name"]).lower(): distribution.version
        for distribution in importlib.metadata.distributions()
    }
    return {
        "tfd_notebook": VERSION,
        "python": sys.version,
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "packages": {
            name: installed[name] for name in sorted(installed) if _DISTRIBUTIONS.match(name)
        },
    }


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if _VARIABLES.match(name) or is_secret(name)
    }


def _log(cluster: Cluster, task: str) -> str:
    try:
        return str(cluster.logs(task, _LINES))
    except Exception as error:  # Another task's log must not be lost if this task has ended.
        return f"reading the log failed: {type(error).__name__}: {error}"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        return f"reading the file failed: {error}"


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, default=str)
