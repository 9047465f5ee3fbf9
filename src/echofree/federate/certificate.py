"""Certificates to try a server out with: an authority of one's own and a certificate that it signs. For devices in the
field use those of an authority that is looked after."""

from __future__ import annotations

import ipaddress
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from echofree.errors import ConfigError, MissingExtra

CA, CERTIFICATE, KEY = "ca.crt", "server.crt", "server.key"
DAYS = 90


def make(folder: Path, host: str) -> list[Path]:
    """Writes ca.crt, server.crt and server.key for a server that clients call `host`. The authority's own key is
    forgotten. -> the files

    Raises:
        ConfigError: the folder holds certificates already.
        MissingExtra: the package cryptography isn't installed.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ModuleNotFoundError as error:
        raise MissingExtra("cryptography", "federated", "making certificates") from error
    paths = [folder / name for name in (CA, CERTIFICATE, KEY)]
    if there := [path.name for path in paths if path.exists()]:
        raise ConfigError(f"federated.certificates={folder} holds {', '.join(there)} already. Name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.now(UTC)

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def builder(subject: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        start = x509.CertificateBuilder().subject_name(name(subject)).issuer_name(name("EchoFree trial authority"))
        start = start.public_key(key.public_key()).serial_number(x509.random_serial_number())
        return start.not_valid_before(now - timedelta(minutes=5)).not_valid_after(now + timedelta(days=DAYS))

    authority, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    root = builder("EchoFree trial authority", authority).add_extension(x509.BasicConstraints(True, 0), True)
    leaf = builder(host, own).add_extension(x509.SubjectAlternativeName(_names(host)), False)
    pem = serialization.Encoding.PEM
    contents = [cert.sign(authority, hashes.SHA256()).public_bytes(pem) for cert in (root, leaf)]
    key = own.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    for path, content in zip(paths, [*contents, key], strict=True):
        mode = 0o600 if path.name == KEY else 0o644
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
    return paths


def _names(host: str) -> list[Any]:
    from cryptography import x509

    found: list[x509.GeneralName] = []
    for text in dict.fromkeys([host, "localhost", "127.0.0.1"]):
        try:
            found.append(x509.IPAddress(ipaddress.ip_address(text.strip("[]"))))
        except ValueError:
            found.append(x509.DNSName(text))
    return found


def read(folder: str, names: tuple[str, ...]) -> tuple[bytes, ...]:
    """
    Raises:
        ConfigError: one of them isn't there or can't be read.
    """
    found = []
    for name in names:
        path = Path(folder).expanduser() / name
        try:
            found.append(path.read_bytes())
        except OSError as error:
            raise ConfigError(
                f"federated.certificates={folder}: {path} can't be read ({error.strerror}). A server needs {CA}, "
                f"{CERTIFICATE} and {KEY} there, a client {CA}"
            ) from error
    return tuple(found)
