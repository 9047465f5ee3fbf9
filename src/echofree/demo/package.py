"""onnxruntime-web, the engine of the page: fetched once with npm, its checksum compared, kept for the next time."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from echofree.errors import ConfigError, UserError

VERSION = "1.30.0"
NAME = f"onnxruntime-web@{VERSION}"
FILE = f"onnxruntime-web-{VERSION}.tgz"
SHA512 = "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="  # as npm states it
# What the page needs of it. A server that doesn't know .mjs sends it as a text that browsers refuse to run: hence .js
PARTS = {
    "package/dist/ort.wasm.min.mjs": "ort.js",
    "package/dist/ort-wasm-simd-threaded.mjs": "ort-wasm.js",
    "package/dist/ort-wasm-simd-threaded.wasm": "ort-wasm.wasm",
}
FETCH_S = 300.0


def kept() -> Path:
    """Where the package is kept between calls."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "echofree" / FILE


def find(given: str = "auto") -> Path:
    """The package's file, fetched when there is none.

    Args:
        given: a file, or auto.

    Raises:
        ConfigError: no such file, or another one.
        UserError: npm isn't there or can't reach its registry.
    """
    if given != "auto":
        return checked(Path(given), f"package={given}")
    path = kept()
    if not path.is_file():
        _fetch(path)
    return checked(path, str(path))


def checked(path: Path, what: str) -> Path:
    """The same path, its contents being the ones that npm has published.

    Raises:
        ConfigError: they aren't.
    """
    if not path.is_file():
        raise ConfigError(f"{what}: there is no such file. Type: npm pack {NAME}, which writes {FILE}")
    digest = hashlib.sha512(path.read_bytes()).digest()
    if base64.b64encode(digest).decode() != SHA512:
        raise ConfigError(f"{what} isn't {FILE} as published, or not all of it: remove it and type npm pack {NAME}")
    return path


def unpack(path: Path, folder: Path) -> None:
    """Writes what the page needs into folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path) as archive:
        for member, name in PARTS.items():
            content = archive.extractfile(member)
            assert content is not None  # the checksum says that they're there
            with content, (folder / name).open("wb") as file:
                shutil.copyfileobj(content, file)


def _fetch(path: Path) -> None:
    by_hand = (
        f"On a machine that has both, type: npm pack {NAME}. Put the file {FILE} that it writes to {path}, or name it: "
        f"package=/path/to/{FILE}"
    )
    npm = shutil.which("npm")
    if npm is None:
        raise UserError(f"the page needs {FILE}, and npm, which fetches it, isn't installed. {by_hand}")
    print(f"fetching {NAME} with npm (33 MB, once) ...", flush=True)
    with TemporaryDirectory(prefix="echofree-npm-") as folder:
        try:
            done = subprocess.run(
                [npm, "pack", NAME, "--silent"], cwd=folder, capture_output=True, text=True, timeout=FETCH_S
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"npm didn't fetch {NAME} within {FETCH_S:g} s. {by_hand}") from None
        if done.returncode != 0 or not (Path(folder) / FILE).is_file():
            said = " ".join(done.stderr.split())[-300:] or f"exit code {done.returncode}"
            raise UserError(f"npm couldn't fetch {NAME} ({said}). {by_hand}")
        fresh = checked(Path(folder) / FILE, f"what npm has fetched, {FILE},")
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{FILE}.{os.getpid()}")  # whole or not at all
        shutil.copyfile(fresh, part)
        part.replace(path)
