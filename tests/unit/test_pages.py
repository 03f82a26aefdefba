"""Pages of `docs` name files and tests that exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
SECURITY = (ROOT / "docs" / "security.md").read_text()
#: A row of a table after its header, or an entry of a list with its further lines.
CLAIM = re.compile(r"^(?:\| (?!.*\n\|-)|\* ).*(?:\n  \S.*)*", re.MULTILINE)

#: A test of Python, or one of the front end with its file.
TEST = re.compile(r'`test_\w+`|" in `\S+\.test\.ts`')


def tracked() -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return set(listed.stdout.split())


def test_every_file_of_the_architecture_exists() -> None:
    files = tracked()
    known = {file.removeprefix("tfd_notebook/") for file in files}
    named = set(re.findall(r"[\w./-]+\.(?:py|ts|md|toml)\b", ARCHITECTURE))
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
    rows = set(re.findall(r"^\| `(\w+)/", ARCHITECTURE, re.MULTILINE))
    assert packages <= rows


@pytest.mark.parametrize("claim", CLAIM.findall(SECURITY), ids=lambda claim: claim[2:40])
def test_every_claim_about_security_has_a_test(claim: str) -> None:
    # A dash stands for a test where nothing is protected. The name of a file is not enough.
    assert TEST.search(claim) or re.search(r"\*\*open\*\*.*\| – \|$", claim)


@pytest.mark.parametrize(
    "claim", ["| a | b | `test_fuzz.py` |", "* A claim.\n  Test: `one.test.ts`."]
)
def test_name_of_a_file_is_not_a_test(claim: str) -> None:
    assert not TEST.search(claim)


def test_every_test_of_the_security_page_exists() -> None:
    defined = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert set(re.findall(r"`(test_\w+)`", SECURITY)) <= defined
    for name, file in re.findall(r'"(.+?)" in `(\S+\.test\.ts)`', SECURITY):
        assert f"test('{name}', " in (ROOT / file).read_text()
    for file in re.findall(r"`(test_\w+\.py)`: ", SECURITY):
        assert any((ROOT / "tests").rglob(file))
