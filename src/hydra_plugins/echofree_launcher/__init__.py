"""Hydra finds these launchers by itself: `hydra/launcher=local` and `hydra/launcher=slurm`."""
