"""Addresses of Jupyter servers, as people copy them."""

from __future__ import annotations

import pytest

from tfd_notebook import errors
from tfd_notebook.launchers.client.jupyter_server import split


@pytest.mark.parametrize(
    ("page", "base"),
    [
        ("/?token=abc", ""),
        ("/lab?token=abc", ""),
        ("/tree/?token=abc", ""),
        ("/lab/tree/some/where.ipynb?token=abc", ""),
        ("/lab/workspaces/auto-1/tree/where.ipynb?token=abc", ""),
        ("/tree/where.ipynb?token=abc", ""),
        ("/user/ada/notebooks/where.ipynb?token=abc", "/user/ada"),
        ("/user/tree/lab?token=abc", "/user/tree"),
        ("/user/lab/lab/tree/where.ipynb?token=abc", "/user/lab"),
        ("/a/lab/b/?token=abc", "/a/lab/b"),
    ],
)
def test_page_is_removed_from_the_address(page: str, base: str) -> None:
    assert split(f"https://one:8888{page}") == (f"https://one:8888{base}", "abc")


@pytest.mark.parametrize("url", ["", "one:8888", "grpc://one:1", "https://one:0", None, ["a"]])
def test_invalid_address_is_refused(url: object) -> None:
    with pytest.raises(errors.UsageError, match="invalid Jupyter server address"):
        split(url)  # type: ignore[arg-type]
