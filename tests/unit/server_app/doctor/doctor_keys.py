"""Throw-away certificates and keys."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import NameOID

NOW = datetime.now(UTC)
PLAIN = serialization.NoEncryption()


class Authority:
    """Signs certificates."""

    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
        self.certificate = self._sign(self.name, self.key.public_key(), 3650, x509.BasicConstraints(True, 0))

    def issue(self, folder: Path, *names: str, days: float = 365) -> Path:
        """Write ca.crt, server.pem and server.key."""
        key = ec.generate_private_key(ec.SECP256R1())
        entries = [_entry(name) for name in names]
        own = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")])
        extension = x509.SubjectAlternativeName(entries) if entries else x509.BasicConstraints(False, None)
        certificate = self._sign(own, key.public_key(), days, extension)
        folder.mkdir(exist_ok=True)
        (folder / "ca.crt").write_bytes(_pem(self.certificate))
        (folder / "server.pem").write_bytes(_pem(certificate))
        write_key(folder / "server.key", key, serialization.PrivateFormat.PKCS8)
        return folder

    def _sign(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, days: float, extension: object
    ) -> x509.Certificate:
        begin = NOW - timedelta(days=2)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self.name).public_key(key)
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(begin)
        builder = builder.not_valid_after(NOW + timedelta(days=days)).add_extension(extension, False)  # type: ignore[arg-type]
        return builder.sign(self.key, hashes.SHA256())


def write_key(
    path: Path,
    key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey,
    form: serialization.PrivateFormat = serialization.PrivateFormat.OpenSSH,
    mode: int = 0o600,
) -> Path:
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, PLAIN))
    path.chmod(mode)
    return path


def _entry(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
