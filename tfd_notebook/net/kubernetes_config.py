"""Credentials for the API of Kubernetes, and the text of its errors."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

from tfd_notebook.errors import AccessDenied
from tfd_notebook.net import proxies, validation


def configure(kubeconfig: str | None, context: str | None) -> tuple[Any, str]:
    """Return a configuration of the official client, and the default namespace.

    The credentials are read at each call, because they expire.

    Parameters
    ----------
    kubeconfig : str or None
        Path of the kubeconfig. None: in a pod its service account, otherwise ``$KUBECONFIG`` or
        ``~/.kube/config``.
    context : str or None
        A context of the kubeconfig. None: the current context.

    Raises
    ------
    AccessDenied
        The credentials cannot be read, or the address of the proxy is invalid.
    """
    import kubernetes

    configuration = kubernetes.client.Configuration()
    # Retries of the client would exceed the timeout of a request.
    configuration.retries = False
    inside = in_pod(kubeconfig, context)
    try:
        if inside:
            kubernetes.config.load_incluster_config(client_configuration=configuration)
            _check_tokens(configuration)
            _check_proxy(configuration)
            return configuration, _own_namespace(kubernetes)
        # The client reads the variable only once, at import.
        path = kubeconfig or os.environ.get("KUBECONFIG")
        kubernetes.config.load_kube_config(path, context, client_configuration=configuration)
        _check_tokens(configuration)
        _check_proxy(configuration)
        contexts, active = kubernetes.config.list_kube_config_contexts(path)
    except AccessDenied:
        raise
    except Exception as error:  # of many libraries: YAML, base64, certificates, files
        where = "the service account" if inside else kubeconfig or "the kubeconfig"
        raise AccessDenied(
            f"Kubernetes: reading the credentials from {where} failed: {error}",
            fix="mount the service account's token" if inside else "see kubectl config view",
        ) from error
    if context:
        active = next(item for item in contexts if item["name"] == context)
    return configuration, active["context"].get("namespace") or "default"


def _check_tokens(configuration: Any) -> None:
    """Remove line breaks around tokens; an error of the client would quote them."""
    for name, token in configuration.api_key.items():
        configuration.api_key[name] = validation.header_value(token, "token")


def _check_proxy(configuration: Any) -> None:
    if variable := proxies.invalid_variable(configuration.host):
        source = f"the variable {variable}"
    elif configuration.proxy in (None, *urllib.request.getproxies().values()) or proxies.is_address(
        configuration.proxy
    ):
        return
    else:
        source = "proxy-url of the kubeconfig"
    raise AccessDenied(f"Kubernetes: {source} is not a valid address", fix=proxies.FIX)


def in_pod(kubeconfig: str | None, context: str | None) -> bool:
    """Return True if `configure` uses the service account of the pod of this process."""
    return not (kubeconfig or context) and "KUBERNETES_SERVICE_HOST" in os.environ


def message(body: str | bytes | None) -> str:
    """Return the message of the API's Status object, or the text of the answer."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else body or ""
    try:
        return str(json.loads(text)["message"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return text


def _own_namespace(kubernetes: Any) -> str:
    """Return the namespace of the pod in which this process runs."""
    token = Path(kubernetes.config.incluster_config.SERVICE_TOKEN_FILENAME)
    try:
        return token.with_name("namespace").read_text(encoding="utf-8").strip()
    except OSError:
        return "default"
