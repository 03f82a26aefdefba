"""The default methods of task hosts, for third-party launchers."""

import inspect

import pytest

from tfd_notebook import errors
from tfd_notebook.launchers.base import TaskHost

OPTIONAL = {
    "restart": ("worker:0", {}),
    "kill": ("worker:0",),
    "serve_errors": (["worker:0"],),
    "install": (b"", [], []),
    "inspect": (),
    "gpus": (),
    "journal": ({},),
    "free_disk_space": (),
    "lease": (5.0,),
    "describe": ({},),
}


class Minimal(TaskHost):
    """A host that implements the abstract methods only."""

    host, label, directory = "10.0.0.5", "blue", ""

    def reserve_ports(self, tasks, *, timeout=30.0):
        return {}

    def start(self, tasks, *, timeout=30.0):
        pass

    def stop(self, tasks, *, timeout=30.0):
        pass

    def logs(self, task, size, offset=None, *, timeout=30.0):
        return "", 0

    def close(self, timeout=10.0):
        pass

    def detach(self):
        pass


@pytest.mark.parametrize("method", OPTIONAL)
def test_optional_method_raises_unsupported(method):
    with pytest.raises(errors.Unsupported, match=r"host blue does not support this: .*cannot"):
        getattr(Minimal(), method)(*OPTIONAL[method])


def test_all_methods_with_a_timeout_are_abstract_or_optional():
    with_timeout = {
        name
        for name, method in vars(TaskHost).items()
        if inspect.isfunction(method) and "timeout" in inspect.signature(method).parameters
    }
    assert with_timeout == (TaskHost.__abstractmethods__ - {"detach"}) | OPTIONAL.keys()
