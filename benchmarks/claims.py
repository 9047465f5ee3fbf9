"""What the project claims in figures, and the benchmark that measures each: the table behind `all.py` and its pages.

A claim takes its value from the JSON lines of one run of one script. Texts are (English, Chinese).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Lines = list[dict[str, Any]]
Text = tuple[str, str]


@dataclass(frozen=True)
class Claim:
    """A figure.

    Attributes:
        what: it is.
        value: from the lines of JSON; None when they don't have it.
        bound: what it has to keep; None: it is told, not judged.
        most: whether the bound is a largest value; else a least one.
        form: how a number is written.
        beside: the peer of a ratio, measured in the same run, and its own value.
        peer: that value; None: the ratio is all there is.
    """

    what: Text
    value: Callable[[Lines], float | None]
    bound: float | None = None
    most: bool = True
    form: str = "{:.3g}"
    beside: Text = ("", "")
    peer: Callable[[Lines], str] | None = None


@dataclass(frozen=True)
class Bench:
    """A run of a script.

    Attributes:
        name: of the run, unique.
        title: of its section.
        script: in this folder.
        words: of the real run.
        small: of one that only shows that it works.
        claims: taken from it.
        options: of `all.py` that are handed on when given: peers, recordings, checkpoint.
        cluster: needs the Slurm cluster of tests/slurm.
        limit_s: after which it is given up.
    """

    name: str
    title: Text
    script: str
    words: tuple[str, ...]
    small: tuple[str, ...]
    claims: tuple[Claim, ...]
    options: tuple[str, ...] = field(default=())
    cluster: bool = False
    limit_s: float = 3600.0


def at(*path: str | int) -> Callable[[Lines], Any]:
    """The value at a path into the last line."""

    def take(lines: Lines) -> Any:
        value: Any = lines[-1]
        for key in path:
            if value is None or (isinstance(key, str) and key not in value):
                return None
            value = value[key]
        return value

    return take


def written(take: Callable[[Lines], Any], form: str) -> Callable[[Lines], str]:
    """The same, as text."""

    def text(lines: Lines) -> str:
        value = take(lines)
        return "" if value is None else form.format(value)

    return text


def of_strategy(name: str, key: str) -> Callable[[Lines], Any]:
    """strategies.py prints a line for each."""
    return lambda lines: next((line[key] for line in lines if line.get("strategy") == name), None)


def median(key: str) -> Callable[[Lines], Any]:
    return lambda lines: sorted(lines[-1][key])[len(lines[-1][key]) // 2] if lines[-1].get(key) else None


def quotient(one: Callable[[Lines], Any], other: Callable[[Lines], Any]) -> Callable[[Lines], Any]:
    def take(lines: Lines) -> Any:
        a, b = one(lines), other(lines)
        return None if a is None or not b else a / b

    return take


def difference(one: Callable[[Lines], Any], other: Callable[[Lines], Any]) -> Callable[[Lines], Any]:
    def take(lines: Lines) -> Any:
        a, b = one(lines), other(lines)
        return None if a is None or b is None else a - b

    return take


BARE = ("a bare PyTorch loop", "纯 PyTorch 循环")
RANKS = {1: ("one process", "单进程"), 2: ("two processes, DDP over gloo", "两个进程，gloo 上的 DDP")}


def loop(ranks: int) -> Bench:
    en, zh = RANKS[ranks]
    step = written(lambda lines: 1e3 * lines[-1]["bare_step_s"], "{:.0f} ms")
    claim = Claim(
        ("a step, to the bare one", "一步与纯 PyTorch 之比"), at("ratio_median"), 1.03, beside=BARE, peer=step
    )
    title = (f"What the loop costs: {en}", f"训练循环的开销：{zh}")
    words = ("--ranks", str(ranks))
    return Bench(f"loop-{ranks}", title, "loop.py", words, (*words, "--rounds", "1", "--steps", "2"), (claim,))


def frameworks(ranks: int) -> Bench:
    en, zh = RANKS[ranks]
    claims = []
    for name, label in (("bare", BARE), ("lightning", ("Lightning", "Lightning")), ("accelerate", ("accelerate",) * 2)):
        bound = None if name == "bare" else 1.0
        for kind, (one, other) in {
            "step_s": ("a step, by the clock", "一步，按时钟"),
            "cpu_s": ("a step, in processor time", "一步，按处理器时间"),
        }.items():
            peer = written(lambda lines, k=kind, n=name: _ms(lines[-1][k].get(n)), "{:.0f} ms")
            claims.append(
                Claim((one, other), at(f"{kind}_echofree_to_{name}"), bound, beside=label, peer=peer, form="{:.3f}")
            )
    title = (f"Beside other frameworks: {en}", f"与其他框架相比：{zh}")
    words = ("--ranks", str(ranks))
    small = (*words, "--rounds", "1", "--steps", "2")
    return Bench(f"frameworks-{ranks}", title, "frameworks.py", words, small, tuple(claims), ("peers",))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def strategies() -> Bench:
    claims = []
    for name in ("fsdp", "tensor", "pipeline"):
        peer = written(lambda lines, n=name: _ms(of_strategy(n, "bare_s")(lines)), "{:.0f} ms")
        label = (f"torch's own recipe for {name}", f"torch 自己的 {name} 写法")
        claims.append(
            Claim((f"a step under {name}", f"{name} 的一步"), of_strategy(name, "ratio"), 1.05, beside=label, peer=peer)
        )
    title = ("What the strategies cost, on two ranks", "各策略的开销，两个进程")
    return Bench("strategies", title, "strategies.py", (), ("--rounds", "1", "--hidden", "32"), tuple(claims))


def target(name: str, label: str) -> list[Claim]:
    """Figures of one exported artifact."""
    rtf, size = at("rows", name, "rtf"), at("rows", name, "bytes")
    hop = written(at("rows", "torch", "hop_us"), "{:.0f} us")
    torch = ("eager torch", "直接运行的 torch")
    bounds = {"onnx": (0.015, 1.3), "onnx_int8": (None, 0.4)}.get(name, (None, None))
    hops = quotient(at("rows", name, "hop_us"), at("rows", "torch", "hop_us"))
    return [
        Claim(
            (f"{label}: processor time of a second of audio, s", f"{label}：每秒音频的处理器时间，秒"), rtf, bounds[0]
        ),
        Claim((f"{label}: a hop", f"{label}：一帧"), hops, beside=torch, peer=hop, form="{:.2f}"),
        Claim((f"{label}: size, MB", f"{label}：大小，MB"), lambda lines: _mb(size(lines)), bounds[1]),
        Claim((f"{label}: import and load, s", f"{label}：导入与加载，秒"), at("rows", name, "load_s"), 0.3),
        Claim((f"{label}: output to the model's, dB", f"{label}：输出相对模型，dB"), at("rows", name, "snr_db")),
    ]


def _mb(size: float | None) -> float | None:
    return None if size is None else size / 1e6


EXPORT = Bench(
    "export",
    ("Exported models, a hop at a time on one core", "导出的模型：单核逐帧运行"),
    "export.py",
    (),
    ("--seconds", "2", "--rounds", "1", "--chunkings", "10"),
    (
        *target("onnx", "ONNX"),
        *target("onnx_int8", "ONNX int8"),
        *target("litert", "LiteRT"),
        *target("executorch", "ExecuTorch"),
        Claim(
            (
                "ONNX in C, the whole chain: processor time of a second of audio, s",
                "C 程序中的 ONNX，整条链路：每秒音频的处理器时间，秒",
            ),
            at("rows", "onnx_in_c", "rtf"),
            0.015,
            form="{:.4f}",
        ),
        Claim(
            (
                "ONNX int8 in C, the whole chain: processor time of a second of audio, s",
                "C 程序中的 ONNX int8，整条链路：每秒音频的处理器时间，秒",
            ),
            at("rows", "onnx_int8_in_c", "rtf"),
            0.015,
            form="{:.4f}",
        ),
        *(
            Claim(
                ("ONNX in C, the whole chain: processor time", "C 程序中的 ONNX，整条链路：处理器时间"),
                quotient(at("rows", "onnx_in_c", "rtf"), at("rows", name, "rtf")),
                1.0,
                beside=(label, label),
                peer=written(at("rows", name, "rtf"), "{:.4f}"),
                form="{:.2f}",
            )
            for name, label in (("speex_res", "SpeexDSP + residual"), ("webrtc", "WebRTC AEC3"))
        ),
        Claim(
            ("ONNX int8: processor time, to float32", "ONNX int8：处理器时间与 float32 之比"),
            quotient(at("rows", "onnx_int8", "rtf"), at("rows", "onnx", "rtf")),
            1.0,
            beside=("ONNX float32", "ONNX float32"),
        ),
        Claim(
            ("random chunkings and resets, difference", "随机分块与重置，差异"), at("chunkings"), 1e-5, form="{:.1e}"
        ),
    ),
    ("checkpoint", "peers"),
)


def soak(name: str, words: tuple[str, ...], title: Text) -> Bench:
    claims = (
        Claim(("kills", "强制结束次数"), at("kills"), 200, most=False, form="{:.0f}"),
        Claim(("runs that got through", "最终完成的运行"), at("runs"), form="{:.0f}"),
        Claim(
            ("runs that differ from an untouched one", "与未受干扰者不同的运行"),
            lambda lines: len(lines[-1]["wrong"]),
            0,
            form="{:.0f}",
        ),
    )
    return Bench(name, title, "soak.py", words, (*words, "--kills", "3", "--steps", "12"), claims, limit_s=7200.0)


def cancellers() -> Bench:
    scores = (
        ("far_erle_db", "far end alone: echo reduction, dB", "远端单讲：回声衰减，dB", "{:.1f}"),
        ("far_echo", "far end alone: AECMOS echo", "远端单讲：AECMOS 回声", "{:.2f}"),
        ("talk_echo", "double talk: AECMOS echo", "双讲：AECMOS 回声", "{:.2f}"),
        ("talk_deg", "double talk: AECMOS other", "双讲：AECMOS 其他", "{:.2f}"),
        ("near_deg", "near end alone: AECMOS other", "近端单讲：AECMOS 其他", "{:.2f}"),
        ("near_level_db", "near end alone: change of level, dB", "近端单讲：电平变化，dB", "{:.1f}"),
        (
            "rtf",
            "processor time of a second of audio, s (ours in torch; exported: see above)",
            "每秒音频的处理器时间，秒（本项目在 torch 中；导出后见上）",
            "{:.4f}",
        ),
    )
    others = (
        ("mic", ("the microphone as it is", "未处理的麦克风")),
        ("speex", ("SpeexDSP", "SpeexDSP")),
        ("speex_res", ("SpeexDSP with its residual suppressor", "SpeexDSP 及其残余抑制")),
        ("webrtc", ("WebRTC AEC3", "WebRTC AEC3")),
    )

    known = {"linear", *(name for name, _ in others)}

    def own(lines: Lines, key: str) -> Any:
        systems = lines[-1]["systems"]
        own_name = next((name for name in systems if name not in known), "linear")
        return systems[own_name].get(key)

    claims = []
    for key, en, zh, form in scores:
        for name, label in others:
            if (key, name) == ("rtf", "mic"):
                continue
            peer = written(at("systems", name, key), form)
            claims.append(Claim((en, zh), lambda lines, k=key: own(lines, k), None, True, form, label, peer))
    title = ("Beside other cancellers, on the same recordings", "与其他消除器相比：同样的录音")
    return Bench(
        "cancellers", title, "cancellers.py", (), ("--limit", "2"), tuple(claims), ("checkpoint", "recordings", "peers")
    )


BENCHES: tuple[Bench, ...] = (
    loop(1),
    loop(2),
    frameworks(1),
    frameworks(2),
    strategies(),
    Bench(
        "watchdog",
        ("What the watchdog costs", "看门狗的开销"),
        "watchdog.py",
        (),
        ("--seconds", "2"),
        (
            Claim(
                ("share of a step, %", "占一步的比例，%"), lambda lines: 100 * lines[-1]["share"], 0.5, form="{:.3f}"
            ),
            Claim(
                ("a step with it, by the clock", "开启时的一步，按时钟"),
                at("wall_ratio"),
                form="{:.3f}",
                beside=("the same without it", "不开启时"),
                peer=written(at("step_ms"), "{:.1f} ms"),
            ),
        ),
    ),
    Bench(
        "startup",
        ("How long a newcomer waits", "新用户要等多久"),
        "startup.py",
        (),
        ("--rounds", "1"),
        (
            Claim(
                ("until the first step, to a bare script", "到第一步为止，与裸脚本之比"),
                at("ratio"),
                1.5,
                form="{:.2f}",
                beside=("import torch, build the model, one step", "导入 torch、建立模型、走一步"),
                peer=written(at("bare_step"), "{:.1f} s"),
            ),
            Claim(("`--help`, s", "`--help`，秒"), at("help"), 1.5, form="{:.2f}"),
            Claim(
                ("a wrong value, until it is said, s", "错误的值，到指出为止，秒"),
                at("typed_error"),
                1.5,
                form="{:.2f}",
            ),
        ),
    ),
    Bench(
        "save",
        ("How long training stands for a checkpoint", "保存检查点时训练停顿多久"),
        "save.py",
        (),
        ("--model", "tiny", "--rounds", "1"),
        (
            Claim(
                ("in the background, to a save at once", "后台保存与立即保存之比"),
                at("background / at once"),
                0.25,
                beside=("the same save at once", "立即保存"),
                peer=written(at("at once"), "{:.2f} s"),
            ),
            Claim(
                ("at once, to a plain write of the same bytes", "立即保存与直接写同样字节之比"),
                at("at once / plain"),
                1.3,
                beside=("write and fsync", "write 加 fsync"),
                peer=written(at("plain write"), "{:.2f} s"),
            ),
        ),
    ),
    Bench(
        "scene",
        ("How fast scenes are made", "生成场景的速度"),
        "scene.py",
        (),
        ("--scenes", "8"),
        (Claim(("times real time per core", "每核相对实时的倍数"), at("times_real_time_cpu"), 200, most=False),),
    ),
    Bench(
        "filter",
        ("How fast the linear front end runs in training", "训练中线性前端的速度"),
        "filter.py",
        (),
        ("--batch", "4", "--seconds", "1"),
        (
            Claim(
                ("the filter: times real time per core", "滤波器：每核相对实时的倍数"),
                at("filter_median_x"),
                250,
                most=False,
            ),
            Claim(("the whole front end: times real time", "整个前端：相对实时的倍数"), at("front_end_median_x")),
        ),
    ),
    Bench(
        "robustness",
        ("What the front end survives", "前端能经受什么"),
        "robustness.py",
        (),
        ("--seconds", "14"),
        (
            Claim(
                ("conditions beyond their bound", "超出界限的条件"),
                lambda lines: lines[-1]["bounded"] - lines[-1]["held"],
                0,
                form="{:.0f}",
            ),
            Claim(("conditions with a bound", "有界限的条件"), at("bounded"), form="{:.0f}"),
            Claim(
                ("undisturbed: echo reduction, dB", "无干扰：回声衰减，dB"),
                at("undisturbed_db", "front"),
                form="{:.1f}",
                beside=("a plain Kalman filter", "单独的卡尔曼滤波器"),
                peer=written(at("undisturbed_db", "plain"), "{:.1f} dB"),
            ),
        ),
    ),
    EXPORT,
    cancellers(),
    Bench(
        "runs",
        ("A table of ten thousand runs", "一万个运行的列表"),
        "runs.py",
        (),
        ("--runs", "50", "--rounds", "1"),
        (Claim(("the whole command, s", "整条命令，秒"), median("seconds"), 3.0, form="{:.2f}"),),
    ),
    soak("soak", ("--seed", "1"), ("Killed at any moment: one process", "随时被强制结束：单进程")),
    soak(
        "soak-fsdp",
        ("--ranks", "2", "--dist", "fsdp", "--seed", "2"),
        ("Killed at any moment: two processes, fsdp", "随时被强制结束：两个进程，fsdp"),
    ),
    Bench(
        "distill",
        ("What a teacher adds", "教师模型带来什么"),
        "distill.py",
        (),
        (
            "--steps",
            "2",
            "--seeds",
            "0",
            "debug=quick",
            "checkpoint=default",
            "data.num_train=8",
            "data.num_valid=4",
            "data.num_test=8",
            "train.batch_size=4",
            "train.final_test=true",
        ),
        (
            Claim(
                ("SI-SDR gained, mean of the seeds, dB", "SI-SDR 的提高，各种子的平均，dB"),
                at("gain", "si_sdr"),
                0.3,
                most=False,
                form="{:+.2f}",
                beside=("without a teacher", "没有教师"),
                peer=written(at("plain_si_sdr"), "{:.2f} dB"),
            ),
            Claim(("the seed with the least, dB", "最小的种子，dB"), at("least", "si_sdr"), form="{:+.2f}"),
            Claim(("the seed with the most, dB", "最大的种子，dB"), at("most", "si_sdr"), form="{:+.2f}"),
            Claim(
                ("echo reduction gained, far end alone, dB", "远端单讲：回声衰减的提高，dB"),
                at("gain", "erle"),
                form="{:+.2f}",
                beside=("without a teacher", "没有教师"),
                peer=written(at("plain_erle"), "{:.1f} dB"),
            ),
        ),
    ),
    Bench(
        "adapt",
        ("What adaptation to one device brings", "适应一台设备带来什么"),
        "adapt.py",
        (),
        ("--recordings", "6", "--seconds", "8", "steps=2", "clips=4"),
        (
            Claim(
                ("echo reduction gained on the device, dB", "该设备上回声衰减的提高，dB"),
                at("gain_db"),
                2.0,
                most=False,
                form="{:+.2f}",
                beside=("before", "适应之前"),
                peer=written(at("before", "device_erle"), "{:.1f} dB"),
            ),
            Claim(
                ("SI-SDR lost elsewhere, dB", "其他场景损失的 SI-SDR，dB"),
                at("lost_elsewhere_db"),
                0.2,
                form="{:+.2f}",
                beside=("before", "适应之前"),
                peer=written(at("before", "elsewhere_si_sdr"), "{:.2f} dB"),
            ),
        ),
    ),
    Bench(
        "federated",
        ("A round of federated training", "联邦训练的一轮"),
        "federated.py",
        (),
        ("--clients", "2", "--steps", "2", "--rounds", "1"),
        (
            Claim(
                ("processor time beyond the same local steps, share", "比同样的本地步数多用的处理器时间，比例"),
                at("overhead"),
                0.1,
                beside=("the steps alone", "只做这些步"),
                peer=written(at("bare_cpu_s"), "{:.1f} s"),
            ),
        ),
    ),
    Bench(
        "slurm",
        ("A job on two nodes of a cluster", "集群两个节点上的作业"),
        "slurm.py",
        ("start",),
        ("start", "--rounds", "1"),
        (
            Claim(
                ("from sbatch to the first step, to a bare script", "从 sbatch 到第一步，与裸脚本之比"),
                at("ratio"),
                1.2,
                beside=("the same srun, torch alone", "同样的 srun，只用 torch"),
                peer=written(at("bare_s"), "{:.1f} s"),
            ),
        ),
        cluster=True,
    ),
)
