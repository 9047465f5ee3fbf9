"""The code as it is now, in the sweep's folder: `hydra.launcher.snapshot=true`. Jobs that start hours later run it,
whatever was edited meanwhile."""

from __future__ import annotations

import shutil
from pathlib import Path

from echofree.config.search import EXPERIMENTS_VARIABLE, conf_dir, experiment_dirs

FOLDER = ".code"
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc")


def take(sweep: Path) -> dict[str, str]:
    """Copies EchoFree, its configs and the user's experiments below `sweep`, unless that was done by an earlier start.
    -> the variables by which a job finds the copy"""
    root = (sweep / FOLDER).resolve()
    if not root.is_dir():
        half = root.with_name(f"{FOLDER}-half")
        shutil.rmtree(half, ignore_errors=True)
        package = Path(__file__).resolve().parent.parent
        shutil.copytree(package, half / "echofree", ignore=LEFT_OUT)
        shutil.copytree(conf_dir(), half / "echofree/conf", ignore=LEFT_OUT, dirs_exist_ok=True)
        for folder in reversed(experiment_dirs()):  # the user's last: they win
            shutil.copytree(folder, half / "experiments", ignore=LEFT_OUT, dirs_exist_ok=True)
        (half / "experiments").mkdir(exist_ok=True)
        half.rename(root)
    # safe path: else the folder in which the job runs comes before the copy
    return {"PYTHONPATH": str(root), "PYTHONSAFEPATH": "1", EXPERIMENTS_VARIABLE: str(root / "experiments")}
