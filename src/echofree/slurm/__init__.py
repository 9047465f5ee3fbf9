"""SLURM: what its variables say, how jobs stand, how a job is put back into the queue, and the guard of a task.

env.py       who am I in this job (`Task`), from SLURM's variables alone
states.py    how jobs stand, by squeue, sacct and scontrol, at most one question per few seconds (`Scheduler`)
requeue.py   why a job is being stopped, and asking for it to be started again
history.py   which run directory an earlier start of this job has used
guard.py     a small process around each rank: sees how it ends, ends the others, asks for the requeue
__main__.py  `srun python -m echofree.slurm RUN_DIR`: what a launcher's job script starts in every task

Nothing here imports torch, hydra or omegaconf.
"""
