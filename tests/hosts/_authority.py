"""Certificates for the hosts' servers, signed by an authority that only the tests trust."""

from __future__ import annotations

import datetime
import ipaddress
import uuid
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.hosts._network import Peer

_DAY = datetime.timedelta(days=1)


class Authority:
    """A certificate authority.

    Attributes
    ----------
    path : Path
        Its certificate for clients, in PEM format.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("authority of the tests")
        own = self._certificate(self._name, self._key.public_key(), _DAY)
        limits = x509.BasicConstraints(ca=True, path_length=0)
        self.path = directory / "ca.pem"
        self.path.write_bytes(_pem(self._signed(own.add_extension(limits, critical=True))))

    def issue(self, peer: Peer, expired: bool = False) -> tuple[Path, Path]:
        """Return a certificate for a name and an address, and the file of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName(
            [
                x509.DNSName(peer.name),
                x509.IPAddress(ipaddress.ip_address(peer.address)),
            ]
        )
        lifetime = -_DAY if expired else _DAY
        builder = self._certificate(_name(peer.name), key.public_key(), lifetime)
        stem = self._directory / uuid.uuid4().hex[:8]
        certificate, private = stem.with_suffix(".pem"), stem.with_suffix(".key")
        certificate.write_bytes(_pem(self._signed(builder.add_extension(names, critical=False))))
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return certificate, private

    def _certificate(
        self, name: x509.Name, key: ec.EllipticCurvePublicKey, lifetime: datetime.timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.timezone.utc)
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 2 * _DAY)
            .not_valid_after(now + lifetime)
            # Strict clients such as Python 3.13 require these two extensions.
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )

    def _signed(self, builder: x509.CertificateBuilder) -> x509.Certificate:
        return builder.sign(self._key, hashes.SHA256())


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
