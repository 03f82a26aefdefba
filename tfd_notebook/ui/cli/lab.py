"""JupyterLab on the tutorial notebooks, and IPython with a cluster."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import NoReturn

from tfd_notebook.cluster import attach
from tfd_notebook.errors import Unsupported, UsageError

_LAB = "jupyterlab"
_FIRST = "01_quickstart.ipynb"


def run_lab(directory: Path, browser: bool, port: int | None) -> NoReturn:
    """Replace this process by JupyterLab on the notebooks in `directory`.

    Ctrl-C and SIGTERM then reach JupyterLab directly.
    """
    command = [
        *(sys.executable, "-m", _LAB, f"--ServerApp.root_dir={directory}"),
        f"--LabApp.default_url=/lab/tree/{_FIRST}",
    ]
    if not browser:
        command.append("--no-browser")
    if port is not None:
        # Without retries, the server has this port or reports that it is in use.
        command += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    sys.stdout.flush()
    os.execv(sys.executable, command)


def require_lab() -> None:
    """Raise Unsupported unless JupyterLab is installed."""
    if importlib.util.find_spec(_LAB) is None:
        raise Unsupported(
            "tfd lab needs the package jupyterlab", fix='pip install "tfd-notebook[lab]"'
        )


def copy_tutorials(directory: Path) -> tuple[int, list[str]]:
    """Copy the tutorial notebooks to `directory`, and create it if it is missing.

    Returns
    -------
    int
        Number of notebooks that were copied.
    list of str
        Names of the existing notebooks that differ from the tutorials. They are kept.

    Raises
    ------
    UsageError
        The directory cannot be written.
    """
    copied, kept = 0, []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for notebook in sorted(_tutorials().glob("*.ipynb")):
            copy = directory / notebook.name
            content = notebook.read_bytes()
            try:
                with copy.open("xb") as file:
                    file.write(content)
                copied += 1
            except FileExistsError:
                if copy.read_bytes() != content:
                    kept.append(copy.name)
    except OSError as error:
        raise UsageError(
            f"copying the tutorials to {directory} failed: {error.strerror or error}",
            fix="name another directory: tfd lab DIRECTORY",
        ) from None
    return copied, kept


def _tutorials() -> Path:
    """Return the directory of the tutorials, in an installation or in a checkout."""
    installed = Path(__file__).parents[2] / "tutorials"
    return installed if installed.exists() else Path(__file__).parents[3] / "notebooks"


def interact(name: str, agent: int | None) -> None:
    """Run IPython with a detached cluster in the variable ``cluster``. It keeps running."""
    # Import time.
    import IPython

    import tfd_notebook

    cluster = attach.attach(name, agent=agent)
    print(f"cluster {name!r} is {cluster.state}; it is in the variable 'cluster'")
    print("exit leaves it running, cluster.stop() ends it")
    try:
        IPython.start_ipython(
            argv=["--no-banner", "--ext", "tfd_notebook"],
            user_ns={"cluster": cluster, "tfd": tfd_notebook},
        )
    finally:
        cluster.leave()
