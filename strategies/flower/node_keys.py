"""The names that the server's operator gives to clients, by the public keys of their nodes.

The file is in the format of ssh's ``authorized_keys``; ``deploy/make_keys.py`` writes it.
"""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

from ..core.errors import OptionError
from ..uploads.checks import CLIENT_NAME

VARIABLE = "ONESHOT_NODE_KEYS"


def named_keys() -> dict[bytes, str] | None:
    """Return the client of every public key; None if ``$ONESHOT_NODE_KEYS`` names no file.

    Returns:
        Public key, in PEM as the SuperLink reports it -> client.

    Raises:
        OptionError: The file cannot be read, a line is no key with a name, or a key or a name stands twice.
    """
    if not (place := os.environ.get(VARIABLE, "")):
        return None
    try:
        lines = Path(place).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{VARIABLE} names {place}, which cannot be read: {error}") from error
    found: dict[bytes, str] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip() and not line.startswith("#"):
            key, name = _read(line, f"{place}, line {number}")
            if key in found or name in found.values():
                raise OptionError(f"{place}, line {number}: the key or the name {name!r} stands twice")
            found[key] = name
    return found


def _read(line: str, where: str) -> tuple[bytes, str]:
    kind, _, rest = line.strip().partition(" ")
    encoded, _, name = rest.partition(" ")
    try:
        key = load_ssh_public_key(f"{kind} {encoded}".encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise OptionError(f"{where}: must be a public key of ssh and a client's name, KIND KEY NAME") from error
    if not CLIENT_NAME.fullmatch(name):
        raise OptionError(f"{where}: {name[:80]!r} is no client's name: must match {CLIENT_NAME.pattern}")
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo), name
