"""The typed half of the run config: one dataclass per core group.

Open groups (model, data, task, loss, export) are plain mappings with `_target_`, since users bring their own; see
`build.py`. Nothing here imports torch, so that a typo is answered at once. The comment behind a key is its line in
`--help`. Rules about values stand in `check.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING


class Precision(Enum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Backend(Enum):
    auto = "auto"
    nccl = "nccl"
    gloo = "gloo"


class Nonfinite(Enum):
    """What all ranks do together with a step whose gradient isn't finite."""

    skip = "skip"
    stop = "stop"


class Mode(Enum):
    min = "min"
    max = "max"


class OnFull(Enum):
    """What a run does when its disk is full: end with the old checkpoints kept, or wait for space."""

    stop = "stop"
    wait = "wait"


class CheckpointFormat(Enum):
    """Who writes the tensors of a checkpoint: rank 0 whole ones, or every rank its own part."""

    auto = "auto"
    whole = "whole"
    parts = "parts"


class ScheduleKind(Enum):
    constant = "constant"
    cosine = "cosine"
    plateau = "plateau"


class StrategyKind(Enum):
    single = "single"
    ddp = "ddp"
    fsdp = "fsdp"
    tensor = "tensor"
    pipeline = "pipeline"


class SyncBatchNorm(Enum):
    auto = "auto"
    on = "on"
    off = "off"


class DryRun(Enum):
    """A step with the largest shapes before the first: auto does it where memory is a device's own."""

    auto = "auto"
    on = "on"
    off = "off"


class FrontEndPlace(Enum):
    """Who runs what of a model needs no weights."""

    auto = "auto"
    workers = "workers"  # the loader's, ahead of the step
    device = "device"  # where the rest of the model runs


class OptimKind(Enum):
    adamw = "adamw"
    adam = "adam"
    sgd = "sgd"


class FederatedRole(Enum):
    """What `python -m echofree.federate` is: all of it on one machine, one side of it, or the maker of certificates."""

    simulation = "simulation"
    server = "server"
    client = "client"
    certificates = "certificates"


class FederatedStrategy(Enum):
    fedavg = "fedavg"
    fedprox = "fedprox"


class FederatedWeights(Enum):
    """What a client counts in the average."""

    seconds = "seconds"
    equal = "equal"


class FederatedOptimizer(Enum):
    """Whether a client's optimizer begins each round anew or remembers its own last one."""

    fresh = "fresh"
    kept = "kept"


class BadUpdate(Enum):
    """What the server does with a client that is late, gone, or sends what can't be averaged."""

    skip = "skip"
    stop = "stop"


class LoggerKind(Enum):
    console = "console"
    tensorboard = "tensorboard"
    wandb = "wandb"


@dataclass
class TrainConfig:
    """How long, how much at once, how often to look and to save."""

    batch_size: int | str = 16  # clips of one process and one micro-batch; auto: as many as fit (auto:32: of 32)
    global_batch_size: int | None = None  # clips of a step over all ranks: sets the accumulation; null: it follows
    gradient_accumulation_steps: int = 1  # micro-batches per optimizer step
    epochs: int = 5  # passes over the training clips
    max_steps: int | None = None  # optimizer steps; stops before `epochs` if reached first
    max_time: str | None = None  # wall-clock limit, "HH:MM:SS" or "90m"; saves and exits 75
    log_every: int = 10  # optimizer steps
    save_interval: int = 1  # epochs; 0: only at the end
    save_every_steps: int = 0  # optimizer steps; 0: off
    eval_interval: int = 1  # epochs; 0: only at the end
    eval_every_steps: int = 0  # optimizer steps; 0: off
    precision: Precision = Precision.fp32  # of the forward pass; weights stay fp32
    clip_norm: float | None = 5.0  # of the whole gradient; null: no clipping
    ema_decay: float = 0.0  # 0: no moving average of the weights
    nonfinite: Nonfinite = Nonfinite.skip  # a step whose gradient is NaN or infinite
    early_stop_patience: int = 0  # evaluations without a better `checkpoint.metric`; 0: off
    compile: bool = False  # torch.compile
    device: str = "auto"  # auto | cpu | cuda
    front_end: FrontEndPlace = FrontEndPlace.auto  # who runs the model's linear stage; auto: workers, on a GPU device
    final_test: bool = True  # score the best weights on the test split at the end
    dry_run: DryRun = DryRun.auto  # a step with the largest shapes before step one; auto: on GPUs
    activation_checkpointing: bool = False  # forget what blocks computed and compute it again: less memory, more time
    deterministic: bool = False  # every operation; without it those where it costs little


@dataclass
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    name: OptimKind = OptimKind.adamw
    lr: float = 1e-3  # highest learning rate, after the warm-up
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    momentum: float = 0.9  # sgd only
    schedule: ScheduleKind = ScheduleKind.cosine  # after the warm-up
    warmup_steps: int = 0  # linear, optimizer steps
    min_lr_ratio: float = 0.01  # where cosine ends and plateau stops, as a share of lr
    plateau_factor: float = 0.5
    plateau_patience: int = 2  # evaluations
    freeze: list[str] = field(default_factory=list)  # weights that stay, by name: [*,-network.gain.*]; the last fits
    lr_by_part: list[str] = field(default_factory=list)  # [network.gru.*:0.1]: factors on lr; the last that fits


@dataclass
class MeshConfig:
    """Ranks along each axis, outermost first. 0: not asked for; the strategy's own axis, or data, takes the rest."""

    replicate: int = 0  # fsdp: whole copies of what `data` shares out
    data: int = 0  # ranks that read different clips
    pipeline: int = 0  # ranks that hold different layers
    tensor: int = 0  # ranks that hold different parts of the same layers


@dataclass
class DistConfig:
    """Where the work runs."""

    name: StrategyKind = StrategyKind.single
    num_procs: str = "1"  # a number, or auto: all GPUs of this machine (without GPUs: 1)
    num_nodes: int = 1  # machines; above 1, type the same command on each, with dist.rendezvous
    rendezvous: str | None = None  # HOST:PORT on one of the machines, which all others can reach
    interface: str | None = None  # network interface of gloo and NCCL; null: the one that leads to the other machines
    backend: Backend = Backend.auto  # auto: nccl on GPUs, gloo on CPUs
    init_method: str = "auto"  # auto | env:// | tcp://host:port | file:///path
    timeout_s: float = 300.0  # a rank that doesn't move for longer is named, and the run ends
    start_timeout_s: float = 600.0  # the same from the start to the end of the first step, and after the last
    max_restarts: int = 0  # starts again from the last checkpoint after a failure
    max_timeouts: int | None = None  # SLURM: so often a job that ran out of time is requeued; null: until it is done
    sync_batchnorm: SyncBatchNorm = SyncBatchNorm.auto
    bucket_cap_mb: float = 25.0
    find_unused_parameters: bool = False
    mesh: MeshConfig = field(default_factory=MeshConfig)  # ranks along each axis, such as {data:2,tensor:2}
    reshard_after_forward: bool = True  # fsdp: give weights back between forward and backward; off: faster, more memory
    cpu_offload: bool = False  # fsdp: shards of weights, gradients and optimizer states live in main memory
    schedule: str = "1f1b"  # pipeline: gpipe | 1f1b | interleaved (two stages on each rank)
    microbatches: int = 4  # pipeline: parts into which each batch of train.batch_size clips is cut
    stages: list[str] = field(default_factory=list)  # pipeline: blocks that begin a stage; empty: balanced by cost
    threads: int = 0  # intra-op threads of each rank; 0: its share of the cores, less one for its loader workers


@dataclass
class GuardConfig:
    """What a run that begins from another model must not unlearn: scores on the old data."""

    max_drop: float | None = None  # how far `metric` may lie below the parent's; null: nobody looks
    metric: str = "si_sdr"  # of the validation clips of the old data (data.replay)


@dataclass
class CheckpointConfig:
    """What is kept."""

    metric: str = "loss"  # a key of the validation scores
    mode: Mode = Mode.min  # whether less or more of it is better
    keep_last: int = 2  # newest checkpoints
    keep_best: int = 1  # best checkpoints by `metric`
    keep_every_steps: int = 0  # for ever: checkpoints whose step is a multiple; 0: off
    window_steps: int = 0  # all checkpoints of the last optimizer steps; 0: off
    pin: list[int] = field(default_factory=list)  # steps never removed; a file `pinned` in a checkpoint does the same
    archive_dir: str | None = None  # what would be removed is copied there first and verified
    async_save: bool = False  # training goes on while a copy in memory is written; also spelled checkpoint.async
    on_full: OnFull = OnFull.stop  # a full disk: stop with the old checkpoints kept, or wait for space
    guard: GuardConfig = field(default_factory=GuardConfig)  # which checkpoints may be the best after init_from
    format: CheckpointFormat = CheckpointFormat.auto  # whole tensors | parts: each rank its own | auto: by dist


@dataclass
class LoggerConfig:
    """Where metrics go beside metrics.jsonl."""

    name: LoggerKind = LoggerKind.console
    project: str = "echofree"  # wandb
    entity: str | None = None  # wandb
    mode: str = "offline"  # wandb: offline | online | disabled
    progress: str = "auto"  # auto: a bar on a terminal, plain lines elsewhere | on | off
    level: str = "info"  # debug | info | warning | error


@dataclass
class FederatedConfig:
    """Rounds of training on clients that keep their audio. Read by `python -m echofree.federate` alone."""

    role: FederatedRole = FederatedRole.simulation  # all of it here, one side of it, or a maker of certificates
    num_clients: int = 8  # shares of the data in a simulation; clients that a server waits for
    rounds: int = 3  # the server averages so often
    local_steps: int = 20  # optimizer steps of each client in a round; the schedule runs over all rounds
    fraction: float = 1.0  # of the clients, drawn anew for each round
    strategy: FederatedStrategy = FederatedStrategy.fedavg
    proximal_mu: float = 0.01  # fedprox: pull of the round's first weights, mu / 2 times the squared distance
    weights: FederatedWeights = FederatedWeights.seconds  # what a client counts: its seconds of audio, or all the same
    optimizer: FederatedOptimizer = FederatedOptimizer.fresh  # of a client in its next round
    keep_local: list[str] = field(default_factory=list)  # never sent, by name: [network.gain.*]; batchnorm: those norms
    held_out: float = 0.1  # of each client's clips, to score what the server sends; never trained on
    on_bad_update: BadUpdate = BadUpdate.skip  # late, gone, not finite, of another shape, far too large
    min_clients: int = 2  # good updates that a round needs; with fewer the weights stay as they were
    max_norm_ratio: float | None = 10.0  # an update so many times longer than the median one is poisoned; null: any
    timeout_s: float = 600.0  # for a client's answer; after it the client is late
    clip_norm: float | None = None  # longest update of a client; null: as it comes
    noise: float = 0.0  # Gaussian noise on the sum of updates, in clip_norm; the privacy budget is then reported
    noise_seed: int | None = None  # null: from the system, as privacy needs it; a number: the same noise again
    delta: float = 1e-5  # of the privacy budget
    processes: int | None = None  # simulation: clients that train beside each other; null: one for each core
    client: int | None = None  # client: its number, from 0
    address: str = "127.0.0.1:8443"  # server: where it listens; client: where the server is
    certificates: str | None = None  # folder of ca.crt and, for the server, server.crt and server.key
    insecure: bool = False  # no TLS, for trying out
    wait_s: float = 300.0  # server: for clients to come; client: for a server that is gone
    faults: list[str] = field(default_factory=list)  # rehearsal: client:round:late|drop|nan|shape|poison


@dataclass
class ExportConfig:
    """What the best checkpoint becomes at the end of a training, or of `python -m echofree.export`."""

    minutes: float = 10.0  # of the stream on which an artifact is compared with its model
    targets: dict[str, Any] = field(default_factory=dict)  # name -> exporter; filled by export=onnx and the like


@dataclass
class RunConfig:
    """One run, complete. Frozen into `config.yaml` of the run directory before the first rank starts."""

    model: Any = MISSING
    data: Any = MISSING
    task: Any = MISSING
    loss: Any = MISSING
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    dist: DistConfig = field(default_factory=DistConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    federated: FederatedConfig = field(default_factory=FederatedConfig)
    seed: int = 0  # of weights, scenes and order
    name: str = "run"  # folder of the run below output_root
    init_from: str | None = None  # a run directory or checkpoint whose weights this run begins with
    resume: str | None = None  # auto | a run directory | a checkpoint directory
    resume_allow: list[str] = field(default_factory=list)  # what may differ: keys, groups, world_size, lr, code, data
    output_root: str = "outputs"  # where run directories go
