"""Draws docs/picture/*.svg, English and Chinese (NAME.zh.svg): narrow, so that they can be read on a phone.

python docs/tools/pictures.py
"""

from __future__ import annotations

from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "picture"
WIDTH = 420
INK, PALE, LINE = "#1b2b34", "#eef3f4", "#7a8b92"
DATA, WORK, TALK, UPDATE, WAIT = "#f2c14e", "#5fb0b7", "#e4572e", "#8d99ae", "#d9d9d9"


class Picture:
    """Shapes one after another; y grows downwards."""

    def __init__(self, height: int, title: str):
        self.height, self.parts = height, [f"<title>{escape(title)}</title>"]
        self.parts.append(f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>')

    def box(self, x: float, y: float, w: float, h: float, text: str, fill: str = PALE, size: int = 13) -> None:
        self.parts.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="4" fill="{fill}" stroke="{LINE}"/>')
        lines = text.split("\n")
        top = y + h / 2 - (len(lines) - 1) * (size + 3) / 2 + size * 0.35
        for number, line in enumerate(lines):
            self.text(x + w / 2, top + number * (size + 3), line, size, "middle")

    def text(
        self, x: float, y: float, text: str, size: int = 13, anchor: str = "start", weight: str = "normal"
    ) -> None:
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" '
            f'fill="{INK}">{escape(text)}</text>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{INK}" stroke-width="1.5" marker-end="url(#tip)"/>'
        )

    def svg(self) -> str:
        tip = (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>'
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" '
            f'height="{self.height}" font-family="system-ui, sans-serif">'
        )
        return "\n".join([head, tip, *self.parts, "</svg>"]) + "\n"


def way(say: dict[str, str]) -> Picture:
    picture = Picture(560, say["the way of a batch"])
    picture.box(16, 14, 188, 52, say["scenes\nfrom a seed"], DATA)
    picture.box(216, 14, 188, 52, say["recordings\nin a folder"], DATA)
    picture.arrow(110, 66, 170, 92)
    picture.arrow(310, 66, 250, 92)
    rows = [
        (say["clips: mic, far, near\na function of seed, epoch, index"], DATA),
        (say["order of the epoch, shared out\nrank 0: 0 2 4 …   rank 1: 1 3 5 …"], DATA),
        (say["front end and network: estimate\nloss: sum and seconds"], WORK),
        (say["gradients of all ranks added up\ndivided by all seconds, clipped"], TALK),
        (say["one step of the optimizer"], UPDATE),
        (say["metrics.jsonl, report.html\ncheckpoints: last and best"], PALE),
        (say["evaluate · cancel · export"], PALE),
    ]
    y = 92.0
    for number, (text, fill) in enumerate(rows):
        height = 48 if "\n" in text else 34
        picture.box(60, y, 300, height, text, fill)
        if number + 1 < len(rows):
            picture.arrow(210, y + height, 210, y + height + 20)
        y += height + 20
    return picture


def model(say: dict[str, str]) -> Picture:
    picture = Picture(400, say["front end and model"])
    picture.box(30, 14, 150, 40, say["mic"], DATA)
    picture.box(240, 14, 150, 40, say["far"], DATA)
    picture.arrow(315, 54, 315, 78)
    picture.box(220, 78, 190, 48, say["delay: how late\nis the echo?"], WORK)
    picture.arrow(315, 126, 315, 150)
    picture.box(220, 150, 190, 48, say["Kalman filter:\nlinear part of the echo"], WORK)
    picture.arrow(105, 54, 105, 150)
    picture.box(30, 150, 150, 48, say["error =\nmic − echo"], PALE)
    picture.arrow(220, 174, 180, 174)
    picture.arrow(105, 198, 150, 228)
    picture.arrow(315, 198, 270, 228)
    picture.box(60, 228, 300, 48, say["network: a gain for each band and frame\n(this part is trained)"], "#bfe3c0")
    picture.arrow(210, 276, 210, 300)
    picture.box(60, 300, 300, 34, say["gain × spectrum, back to a wave"], WORK)
    picture.arrow(210, 334, 210, 356)
    picture.box(110, 356, 200, 34, say["near"], DATA)
    return picture


STEPS = {
    "single": [[("data", 50), ("forward", 90), ("backward", 130), ("update", 60)]],
    "ddp": [[("data", 50), ("forward", 90), ("backward", 90), ("exchange", 50), ("update", 60)]] * 2,
    "fsdp": [
        [
            ("data", 40),
            ("exchange", 30),
            ("forward", 70),
            ("exchange", 30),
            ("backward", 80),
            ("exchange", 40),
            ("update", 40),
        ]
    ]
    * 2,
    "tensor": [
        [
            ("data", 40),
            *[("forward", 28), ("exchange", 18)] * 2,
            *[("backward", 38), ("exchange", 18)] * 2,
            ("update", 50),
        ]
    ]
    * 2,
    "pipeline": [
        [
            ("data", 40),
            ("forward", 34),
            ("forward", 34),
            ("wait", 68),
            ("backward", 52),
            ("backward", 52),
            ("update", 50),
        ],
        [
            ("wait", 74),
            ("forward", 34),
            ("backward", 52),
            ("forward", 34),
            ("backward", 52),
            ("wait", 34),
            ("update", 50),
        ],
    ],
}
COLOURS = {"data": DATA, "forward": WORK, "backward": "#3b8ea5", "exchange": TALK, "update": UPDATE, "wait": WAIT}


def step(say: dict[str, str]) -> Picture:
    picture = Picture(480, say["the life of a step"])
    y = 26
    for name, ranks in STEPS.items():
        picture.text(14, y, name, 14, weight="bold")
        picture.text(96, y, say[name], 12)
        y += 10
        for number, blocks in enumerate(ranks):
            picture.text(14, y + 15, f"rank {number}", 11)
            x = 66.0
            for kind, width in blocks:
                picture.box(x, y, width, 20, "", COLOURS[kind])
                x += width
            y += 24
        y += 26
    x, row = 14.0, y - 4
    for kind, colour in COLOURS.items():
        if x > 300:
            x, row = 14.0, row + 24
        picture.box(x, row, 16, 16, "", colour)
        picture.text(x + 22, row + 13, say[kind], 12)
        x += 136
    return picture


def hang(say: dict[str, str]) -> Picture:
    picture = Picture(250, say["a hang and its verdict"])
    rows = [[("forward", 90), ("wait", 230)], [("forward", 60), ("data", 260)], [("forward", 84), ("wait", 236)]]
    labels = [
        say["waits in all_reduce number 12"],
        say["has not entered it: worker 0 makes clip 637"],
        say["waits in all_reduce number 12"],
    ]
    y = 20
    for number, blocks in enumerate(rows):
        picture.text(14, y + 17, f"rank {number}", 12, weight="bold" if number == 1 else "normal")
        x = 66.0
        for kind, width in blocks:
            picture.box(x, y, width, 24, "", "#e4572e" if kind == "data" else COLOURS[kind])
            x += width
        picture.text(72 + blocks[0][1], y + 16, labels[number], 11)
        y += 44
    picture.arrow(386, 12, 386, 150)
    picture.text(400, 10, "", 11)
    picture.text(404, 166, "dist.timeout_s", 12, "end")
    picture.box(
        14,
        180,
        392,
        56,
        say["the verdict names rank 1: the others are its victims\nlogs/hang.json holds the stacks of all"],
        PALE,
    )
    return picture


CHINESE = {
    "the way of a batch": "一个批次的路线",
    "scenes\nfrom a seed": "由随机种子\n生成的场景",
    "recordings\nin a folder": "文件夹中的\n录音",
    "clips: mic, far, near\na function of seed, epoch, index": "片段：mic、far、near\n由种子、轮次和序号决定",
    "order of the epoch, shared out\nrank 0: 0 2 4 …   rank 1: 1 3 5 …": "一轮的顺序，分给各进程\nrank 0: 0 2 4 …   rank 1: 1 3 5 …",  # noqa: E501
    "front end and network: estimate\nloss: sum and seconds": "前端与网络：估计近端\n损失：总和与秒数",
    "gradients of all ranks added up\ndivided by all seconds, clipped": "各进程的梯度相加\n除以总秒数，再裁剪",
    "one step of the optimizer": "优化器走一步",
    "metrics.jsonl, report.html\ncheckpoints: last and best": "metrics.jsonl、report.html\n检查点：last 和 best",
    "evaluate · cancel · export": "evaluate · cancel · export",
    "front end and model": "前端与模型",
    "mic": "mic（麦克风）",
    "far": "far（远端）",
    "near": "near（近端估计）",
    "delay: how late\nis the echo?": "时延：回声\n晚了多少？",
    "Kalman filter:\nlinear part of the echo": "卡尔曼滤波器：\n回声的线性部分",
    "error =\nmic − echo": "error =\nmic − echo",
    "network: a gain for each band and frame\n(this part is trained)": "网络：每帧每个频带一个增益\n（训练的是这一部分）",  # noqa: E501
    "gain × spectrum, back to a wave": "增益 × 频谱，再变回波形",
    "the life of a step": "一步的过程",
    "single": "一个进程",
    "ddp": "各有完整模型，交换梯度",
    "fsdp": "权重分片，用时收集",
    "tensor": "每一层切开，片段相同",
    "pipeline": "层分给各进程，小批依次通过",
    "data": "数据",
    "forward": "前向",
    "backward": "反向",
    "exchange": "交换",
    "update": "更新",
    "wait": "等待",
    "a hang and its verdict": "卡死与判定",
    "waits in all_reduce number 12": "在第 12 次 all_reduce 中等待",
    "has not entered it: worker 0 makes clip 637": "没有进入：加载进程 0 在做片段 637",
    "the verdict names rank 1: the others are its victims\nlogs/hang.json holds the stacks of all": "判定指出 rank 1：其他进程是受害者\nlogs/hang.json 里有全部调用栈",  # noqa: E501
}
ENGLISH = {
    **{key: key for key in CHINESE},
    "single": "one process",
    "ddp": "whole model each, gradients exchanged",
    "fsdp": "weights in shards, gathered when needed",
    "tensor": "every layer cut, the same clips",
    "pipeline": "layers shared out, parts pass through",
    "near": "near (estimate)",
}


def write(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for draw in (way, model, step, hang):
        for ending, say in ((".svg", ENGLISH), (".zh.svg", CHINESE)):
            (folder / f"{draw.__name__}{ending}").write_text(draw(say).svg(), encoding="utf-8")


if __name__ == "__main__":
    write(FOLDER)
