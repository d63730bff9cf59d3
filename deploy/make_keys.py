"""Makes a federation's keys: one authority, the server's certificate, and a key pair for every node.

    python deploy/make_keys.py keys --server server.example.org --node hospital-a --node hospital-b

writes one folder per machine::

    keys/authority/ca.key      stays here; signs the server's next certificate
    keys/server/               ca.crt, server.pem, server.key: to the server
    keys/hospital-a/           ca.crt, node.key: to that hospital
    keys/public/               hospital-a.pub, ...: to the operator who registers the nodes
    keys/public/node_keys      a line per node, key and name: to the server, ONESHOT_NODE_KEYS names it
    keys/ca.crt                to every machine; it is no secret

A second run adds missing files and never replaces one, except the list ``node_keys``. ``--renew-server`` replaces the
server's certificate and key only. The same authority signs it, so no node needs a new file. Needs ``cryptography``,
which Flower installs.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import re
import sys
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

# Flower's own processes on the server connect to these addresses.
LOOPBACK = ("localhost", "127.0.0.1")
AUTHORITY_DAYS, SERVER_DAYS = 3650, 825
# A valid client name, which is also the name of its folder and file.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RESERVED = {"authority", "server", "public"}

Key = ec.EllipticCurvePrivateKey


class KeysError(Exception):
    """An error that the user can correct; one line."""


def main(arguments: list[str] | None = None) -> int:
    """Make the requested files, print where each belongs, and return the exit status."""
    asked = parser().parse_args(arguments)
    try:
        made = make(
            asked.folder, servers=asked.server, nodes=asked.node, days=asked.days, renew_server=asked.renew_server
        )
    except (KeysError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write("\n".join([*(f"made {path}" for path in made), *_where_to(asked.folder)]) + "\n")
    return 0


def make(folder: Path, *, servers: list[str], nodes: list[str], days: int, renew_server: bool) -> list[Path]:
    """Make the missing files.

    Args:
        folder: The folder of all keys; created if missing.
        servers: Names and addresses by which nodes reach the server; needed to make its certificate.
        nodes: Names of the nodes.
        days: Validity of a new server certificate.
        renew_server: Replace the server's certificate and key.

    Returns:
        The files written.

    Raises:
        KeysError: A name is not valid, the days are out of range, or a needed file of the authority is missing.
    """
    for name in nodes:
        if not NAME.fullmatch(name) or name in RESERVED:
            raise KeysError(
                f"node {name!r}: must be a name that matches {NAME.pattern}, except {', '.join(sorted(RESERVED))}"
            )
    made: list[Path] = []
    _private_folder(folder)
    if not (ignored := folder / ".gitignore").exists():
        _write(ignored, b"*\n", private=False)  # no key is ever committed
    authority = folder / "authority" / "ca.key"
    certificate = folder / "ca.crt"
    if not certificate.exists():
        made += _make_authority(authority, certificate)
    server = folder / "server"
    if renew_server or not (server / "server.pem").exists():
        made += _make_server(server, authority, certificate, servers, days)
    for name in nodes:
        if not (public := folder / "public" / f"{name}.pub").exists():
            made += _make_node(folder / name, public)
    made += _list_keys(folder / "public")
    for place in (server, *(folder / name for name in nodes)):
        if not (place / "ca.crt").exists():
            made.append(_write(place / "ca.crt", certificate.read_bytes(), private=False))
    return made


def _make_authority(key_file: Path, certificate_file: Path) -> list[Path]:
    """Make the authority's certificate, and its key unless an earlier call has written it."""
    made = []
    if not key_file.exists():
        made.append(_write(key_file, _pem(ec.generate_private_key(ec.SECP384R1())), private=True))
    key = _read_key(key_file)
    name = _named("oneshot-fl authority")
    certificate = (
        _certificate(name, name, key, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA384())
    )
    return [*made, _write(certificate_file, certificate.public_bytes(serialization.Encoding.PEM), private=False)]


def _read_key(file: Path) -> Key:
    try:
        key = serialization.load_pem_private_key(file.read_bytes(), None)
    except (OSError, ValueError) as error:
        raise KeysError(f"the authority's key cannot be read from {file}: {error}") from error
    if not isinstance(key, Key):
        raise KeysError(f"{file} is not the key of an authority that this program made")
    return key


def _make_server(place: Path, key_file: Path, certificate_file: Path, servers: list[str], days: int) -> list[Path]:
    if not servers:
        raise KeysError("--server is missing: the name or address by which the nodes reach the server")
    if not 1 <= days <= AUTHORITY_DAYS:
        raise KeysError(f"--days {days}: must be 1 to {AUTHORITY_DAYS}, the validity of the authority")
    signer = _read_key(key_file)
    try:
        authority = x509.load_pem_x509_certificate(certificate_file.read_bytes())
    except (OSError, ValueError) as error:
        raise KeysError(f"the authority's certificate cannot be read from {certificate_file}: {error}") from error
    if signer.public_key() != authority.public_key():
        raise KeysError(f"{key_file} is not the key of {certificate_file}")
    key = ec.generate_private_key(ec.SECP384R1())
    names = list(dict.fromkeys([*servers, *LOOPBACK]))
    certificate = (
        _certificate(_named(names[0][:64]), authority.subject, key, days)
        .add_extension(x509.SubjectAlternativeName([_subject(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA384())
    )
    return [
        _write(place / "server.key", _pem(key), private=True),
        _write(place / "server.pem", certificate.public_bytes(serialization.Encoding.PEM), private=False),
    ]


def _make_node(place: Path, public_file: Path) -> list[Path]:
    made, private_file = [], place / "node.key"
    if not private_file.exists():
        new = ec.generate_private_key(ec.SECP384R1())  # the curve that Flower requires, in the format of ssh-keygen
        private = new.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )
        made.append(_write(private_file, private, private=True))
    try:
        key = serialization.load_ssh_private_key(private_file.read_bytes(), None)
    except (TypeError, ValueError, UnsupportedAlgorithm) as error:
        raise KeysError(f"{private_file} is no private key without a passphrase: {error}") from error
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    # The public key is written last: its presence means that both exist, the private one here or at the node.
    return [*made, _write(public_file, public + f" {place.name}\n".encode(), private=False)]


def _list_keys(public: Path) -> list[Path]:
    """Write the list that binds each public key to the name of its file, if it changes."""
    owners: dict[bytes, Path] = {}
    for file in sorted(public.glob("*.pub")):
        if (first := owners.setdefault(_public_key(file), file)) != file:
            raise KeysError(f"{file} holds the key of {first.name}: must be another, for a key names one client")
    lines = b"".join(b"%b %b\n" % (key, file.stem.encode()) for key, file in owners.items())
    listed = public / "node_keys"
    return [] if listed.exists() and listed.read_bytes() == lines else [_write(listed, lines, private=False)]


def _public_key(file: Path) -> bytes:
    """Return the kind and the key in a node's public file, as the server can read them."""
    if not NAME.fullmatch(file.stem):
        raise KeysError(f"{file} is named after no node: must be <name>.pub, with a name that matches {NAME.pattern}")
    line = b" ".join(file.read_bytes().split()[:2])
    try:
        fits = isinstance(serialization.load_ssh_public_key(line), ec.EllipticCurvePublicKey)
    except (ValueError, UnsupportedAlgorithm):
        fits = False
    if not fits:
        raise KeysError(f"{file} is no public key: must be a line of ssh-keygen, 'ecdsa-... AAAA...'")
    return line


def _certificate(subject: x509.Name, issuer: x509.Name, key: Key, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates, key_cert_sign=signs_certificates, crl_sign=signs_certificates,
        content_commitment=False, key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _named(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _subject(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass  # not an address, so a name
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", name):
        raise KeysError(f"--server {name!r}: must be a host's name or its address, without a port")
    return x509.DNSName(name)


def _pem(key: Key) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _private_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _write(file: Path, content: bytes, *, private: bool) -> Path:
    """Write a file atomically, with its final mode from the first byte on."""
    _private_folder(file.parent)
    temporary = file.with_name(f".{file.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.touch(mode=0o600 if private else 0o644)
    temporary.write_bytes(content)
    return temporary.replace(file)


def _where_to(folder: Path) -> list[str]:
    certificate = x509.load_pem_x509_certificate((folder / "server" / "server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    nodes = sorted(path.parent for path in folder.glob("*/node.key"))
    return [
        f"the server's certificate is valid for {', '.join(str(name.value) for name in names)}",
        f"it expires on {certificate.not_valid_after_utc:%Y-%m-%d}; renew it before with --renew-server",
        f"to the server:        {folder / 'server'}, {folder / 'public'}",
        *(f"to {node.name}: {node}" for node in nodes),
        *(
            f"of {file.stem}:  its private key is not here; remove {file} to make another"
            for file in sorted((folder / "public").glob("*.pub"))
            if file.stem not in {node.name for node in nodes}
        ),
        f"stays here, offline:  {folder / 'authority'}",
    ]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    flags = argparse.ArgumentParser(description="Make a federation's certificates and node keys; replaces nothing.")
    flags.add_argument("folder", type=Path, help="folder of all keys; created if missing")
    flags.add_argument("--server", action="append", default=[], help="name or address of the server; repeatable")
    flags.add_argument("--node", action="append", default=[], help="name of a node; repeatable")
    flags.add_argument("--days", type=int, default=SERVER_DAYS, help=f"validity of the certificate; {SERVER_DAYS}")
    flags.add_argument("--renew-server", action="store_true", help="replace the server's certificate and key")
    return flags


if __name__ == "__main__":
    sys.exit(main())
