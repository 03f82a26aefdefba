"""The page `docs/architecture.md` names files that exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def tracked() -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return set(listed.stdout.split())


def test_every_file_that_the_page_names_exists() -> None:
    files = tracked()
    known = {file.removeprefix("tfd_notebook/") for file in files}
    named = set(re.findall(r"[\w./-]+\.(?:py|ts|md|toml)\b", PAGE))
    names = {Path(file).name for file in files}
    missing = sorted(
        name for name in named if name not in (known if "/" in name else names | known)
    )
    assert not missing


def test_every_package_has_a_row_in_the_table_of_folders() -> None:
    packages = {
        file.split("/")[1]
        for file in tracked()
        if file.startswith("tfd_notebook/") and file.count("/") > 1 and file.endswith(".py")
    }
    rows = set(re.findall(r"^\| `(\w+)/", PAGE, re.MULTILINE))
    assert packages <= rows
