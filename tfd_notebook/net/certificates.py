"""Certificates with which hosts and processes of one cluster authenticate each other."""

from __future__ import annotations

import datetime
import importlib.util
from typing import Any

from tfd_notebook.errors import LaunchError, Unsupported

#: Clocks of hosts may differ by this much.
_BEFORE = datetime.timedelta(days=1)
#: Longer than any lease. The files of the certificates are removed with their cluster.
_AFTER = datetime.timedelta(days=3660)


class CertificateAuthority:
    """Signs certificates for one cluster. Its key is never written to a file.

    Attributes
    ----------
    certificate : str
        The CA certificate, in PEM. Hosts trust the certificates that it signed.

    Raises
    ------
    Unsupported
        The package cryptography is missing.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("cryptography") is None:
            raise Unsupported(
                "encrypted connections need the package cryptography",
                fix='pip install "tfd-notebook[tls]"',
            )
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec

        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _x509_name("tfd-notebook cluster")
        limits = x509.BasicConstraints(ca=True, path_length=0)
        self.certificate = self._sign(self._name, self._key.public_key(), [(limits, True)])

    def key_and_certificate(self) -> bytes:
        """Return the private key and its certificate, in PEM, for processes that share both."""
        from cryptography.hazmat.primitives import serialization

        key = self._key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return bytes(key) + self.certificate.encode()

    def sign(self, request: str, name: str) -> str:
        """Return a certificate for `name` and the public key of a signing request, in PEM.

        The private key stays on the host that created it. Other fields of the request are ignored.

        Raises
        ------
        LaunchError
            The signing request is invalid.
        """
        from cryptography import x509
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric import ec

        try:
            parsed = x509.load_pem_x509_csr(request.encode())
            key = parsed.public_key()
            valid = isinstance(key, ec.EllipticCurvePublicKey) and parsed.is_signature_valid
        except (ValueError, UnsupportedAlgorithm):
            valid = False
        if not valid:
            raise LaunchError(f"the signing request of host {name} is invalid")
        uses = [x509.OID_SERVER_AUTH, x509.OID_CLIENT_AUTH]
        return self._sign(
            _x509_name(name),
            key,
            [
                (x509.SubjectAlternativeName([x509.DNSName(name)]), False),
                (x509.ExtendedKeyUsage(uses), False),
                (x509.BasicConstraints(ca=False, path_length=None), True),
            ],
        )

    def _sign(self, name: Any, key: Any, extensions: list[tuple[Any, bool]]) -> str:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization

        now = datetime.datetime.now(datetime.timezone.utc)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _BEFORE)
            .not_valid_after(now + _AFTER)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical=critical)
        signed = builder.sign(self._key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM).decode()


def _x509_name(name: str) -> Any:
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
