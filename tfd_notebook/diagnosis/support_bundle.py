"""An archive for a ticket: what somebody needs who was not there, without secrets."""

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
from tfd_notebook.cluster import registry
from tfd_notebook.cluster.cluster import Cluster
from tfd_notebook.diagnosis.redaction import Redactor, is_secret
from tfd_notebook.errors import UsageError
from tfd_notebook.launchers import profiles
from tfd_notebook.model.snapshot import as_dict
from tfd_notebook.model.spec import pack
from tfd_notebook.net import config_files, runtime_dir
from tfd_notebook.views import text
from tfd_notebook.views.diagnostics import Findings

_LINES = 200
#: Of all variables only these matter here.
_VARIABLES = re.compile(
    r"CONDA_|CUDA_|GRPC_|JUPYTER|KUBERNETES_|LD_LIBRARY|NCCL_|NVIDIA_|OMP_|PATH$|PYTHON|SLURM_|SM_"
    r"|TF_|TFD_|TMPDIR$|TPU_|VIRTUAL_ENV|XDG_|XLA_|((http|https|grpc|no|no_grpc)_proxy$)",
    re.IGNORECASE,
)
#: Distributions whose versions matter.
_DISTRIBUTIONS = re.compile(
    r"anywidget|asyncssh|cloudpickle|comm$|cryptography|grpcio|ipykernel|ipython|ipywidgets|jupyter"
    r"|keras|kubernetes|numpy|nvidia|pandas|protobuf|psutil|tensorflow|tf[-_d]|tornado|traitlets"
)
_README = """What tfd support wrote on {when}.

It holds versions, findings, the state of clusters, the last lines of their logs, profiles, and the
environment variables that matter here. What looks like a token, a password or a key was taken out.
Read it before you give it to anybody.
"""


def of_process() -> dict[str, str]:
    """Return what there is to tell of this process: texts by file name, without secrets."""
    clusters = registry.clusters()
    redactor = Redactor(os.environ, *(one.config.env for one in clusters.values()))
    seen = diagnosis.everything()
    found = Findings(map(redactor.value, seen), redactor.value(seen.looked_at))
    texts = {
        "versions.json": _json(versions()),
        "environment.json": _json(redactor.value(_environment())),
        "findings.json": _json(found.records()),
        "findings.txt": repr(found),
    }
    for name, one in clusters.items():
        snapshot = redactor.value(one.snapshot())
        texts[f"{name}/state.json"] = _json(as_dict(snapshot))
        texts[f"{name}/state.txt"] = text(snapshot)
        texts[f"{name}/configuration.json"] = _json(redactor.value(pack(one.config)))
        for row in snapshot.tasks:
            texts[f"{name}/logs/{row.task.replace(':', '-')}.txt"] = redactor.text(
                _log(one, row.task)
            )
    return texts


def of_host() -> dict[str, str]:
    """Return what there is to tell of this user on this host: profiles and agents."""
    redactor = Redactor()
    texts = {}
    for place in (config_files.SYSTEM, profiles.user_directory()):
        for path in sorted(place.glob("*.toml")):
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
        By file name.
    path : path, optional
        Default: ``tfd-support-<time>.tar.gz`` in this directory.

    Raises
    ------
    UsageError
        It exists, or cannot be written.
    """
    name = f"tfd-support-{time.strftime('%Y%m%d-%H%M%S')}"
    target = Path(f"{name}.tar.gz" if path is None else path)
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise UsageError(
            f"{target} cannot be written: {error.strerror}", fix="name another file"
        ) from None
    with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for entry, said in {"README.txt": _README.format(when=time.ctime()), **texts}.items():
            data = said.encode(errors="replace")
            info = tarfile.TarInfo(f"{name}/{entry}")
            info.size, info.mtime, info.mode = len(data), int(time.time()), 0o600
            archive.addfile(info, io.BytesIO(data))
    return target


def versions() -> dict[str, Any]:
    """Return the versions of what matters here."""
    found = {
        str(one.metadata["Name"]).lower(): one.version for one in importlib.metadata.distributions()
    }
    return {
        "tfd_notebook": VERSION,
        "python": sys.version,
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "packages": {name: found[name] for name in sorted(found) if _DISTRIBUTIONS.match(name)},
    }


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if _VARIABLES.match(name) or is_secret(name)
    }


def _log(one: Cluster, task: str) -> str:
    try:
        return str(one.logs(task, _LINES))
    except Exception as error:  # a task that is just gone must not keep the rest from being told
        return f"no log: {type(error).__name__}: {error}"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        return f"cannot be read: {error}"


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, default=str)
