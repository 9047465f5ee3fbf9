"""The same few verbs at the desk and in CI: `nox` runs the default five, `nox -s NAME` one, `nox -l` lists them.

Each session makes its own virtual environment and keeps it (over 1 GB with torch). In an environment that has
everything, `nox --no-venv` runs the same commands right there; .ci/run does that.
"""

from __future__ import annotations

from pathlib import Path

import nox

nox.needs_version = ">=2026.10"
nox.options.sessions = ["lint", "types", "tests", "conf", "ranks"]
nox.options.reuse_existing_virtualenvs = True

ROOT = Path(__file__).parent
EVERYTHING = ".[dev,metrics,tensorboard,export]"
SMALL = ["data.num_train=16", "data.num_valid=4", "train.batch_size=4"]  # a run of seconds


def install(session: nox.Session, *packages: str) -> None:
    """Into the session's own environment, at the versions that CI uses; nothing to do with --no-venv."""
    if session.venv_backend != "none":
        session.install("-c", ".ci/constraints.txt", *packages)


def pytest(session: nox.Session, *arguments: str) -> None:
    """`nox -s tests -- -k name` hands on what stands behind the dashes."""
    install(session, "-e", EVERYTHING)
    session.run("python", "-m", "pytest", *arguments, *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Rules and format; changes nothing."""
    install(session, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """mypy over the sources."""
    install(session, "-e", EVERYTHING)
    session.run(
        "mypy", *[folder for folder in ("src/echofree", "src/hydra_plugins") if any(Path(folder).rglob("*.py"))]
    )


@nox.session
def tests(session: nox.Session) -> None:
    """Everything that one process can show in minutes."""
    pytest(session, "-m", "not slow and not ranks and not slurm and not gpu")


@nox.session
def conf(session: nox.Session) -> None:
    """Every option of every group composes, and so does every experiment."""
    pytest(session, "tests/unit/config", "tests/unit/test_conf.py")


@nox.session
def ranks(session: nox.Session) -> None:
    """Several processes that talk over gloo."""
    pytest(session, "-m", "ranks and not gpu")


@nox.session
def slurm(session: nox.Session) -> None:
    """Jobs on a Slurm cluster of two nodes that comes and goes with the session (root, and Debian's slurm packages)."""
    install(session, "-e", EVERYTHING)
    words = ["-m", "slurm", "tests/slurm", *session.posargs]
    session.run("python", "tests/slurm/cluster.py", "--", "python", "-m", "pytest", *words)


@nox.session
def slow(session: nox.Session) -> None:
    """What the default run leaves out."""
    pytest(session, "-m", "slow and not gpu")


@nox.session
def gpu(session: nox.Session) -> None:
    """What needs a CUDA device; on request."""
    pytest(session, "-m", "gpu")


@nox.session
def smoke(session: nox.Session) -> None:
    """The commands as users type them, every experiment for a few steps; slow ones included."""
    pytest(session, "tests/cli", "-m", "slow or not slow")


@nox.session
def docs(session: nox.Session) -> None:
    """The site in build/site, both languages; a warning is an error, and so is a page that loads from elsewhere."""
    install(session, "-e", ".[docs]")
    session.run("mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})
    session.run("python", "docs/tools/offline.py", "build/site")


@nox.session
def benchmarks(session: nox.Session) -> None:
    """All figures of docs/benchmarks.md, measured anew, an hour or two; `-- --small` only shows that it works."""
    install(session, "-e", EVERYTHING)
    session.run("python", "benchmarks/all.py", *session.posargs)


@nox.session
def build(session: nox.Session) -> None:
    """The wheel, installed alone into a fresh environment, works in an empty folder."""
    install(session, "build")
    folder = Path(session.create_tmp()).resolve()
    wheels, fresh, empty = folder / "wheels", folder / "venv", folder / "empty"
    for old in wheels.glob("*.whl"):
        old.unlink()
    empty.mkdir(exist_ok=True)
    session.run("python", "-m", "build", "--wheel", "--outdir", str(wheels), str(ROOT))
    (wheel,) = wheels.glob("*.whl")
    session.run("python", "-m", "venv", "--clear", str(fresh))
    python = str(fresh / "bin" / "python")
    constraints = str(ROOT / ".ci/constraints.txt")
    session.run(python, "-m", "pip", "install", "-q", "-c", constraints, str(wheel), external=True)
    with session.chdir(empty):
        session.run(python, "-m", "echofree.train", "--cfg", "job", external=True)
        session.run(str(fresh / "bin" / "echofree"), "train", "--help", external=True)
        session.run(python, "-m", "echofree.train", "debug=quick", *SMALL, external=True)
        sweep = ["-m", "seed=0,1", "hydra/launcher=local", "hydra.launcher.snapshot=true"]
        session.run(python, "-m", "echofree.train", *sweep, "debug=quick", *SMALL, external=True)
