"""The lines a person reads."""

from __future__ import annotations

from echofree.logger.console_logger import ConsoleLogger


def test_train_line() -> None:
    lines: list[str] = []
    logger = ConsoleLogger(lines.append)
    logger.start({"id": "x"}, {})
    logger.log(
        {
            "kind": "train",
            "step": 10,
            "epoch": 0,
            "loss": 0.123456,
            "lr": 1e-3,
            "grad_norm": 1.5,
            "step_s": 0.25,
            "samples_per_s": 64.0,
            "audio_s_per_s": 256.0,
            "peak_mem_mb": 512.4,
            "data_wait_share": 0.034,
            "skipped": 2,
        }
    )
    logger.finish("done")
    assert [part for text in lines for part in text.split("  ")] == [
        "train",
        "loss 0.1235",
        "lr 0.001",
        "grad norm 1.5",
        "0.25 s/step",
        "64 clips/s",
        "256 s audio/s",
        "waiting for data 3%",
        "peak 512 MB",
        "skipped 2",
    ]


def test_eval_line_shows_undefined_values() -> None:
    lines: list[str] = []
    ConsoleLogger(lines.append).log(
        {"kind": "eval", "split": "valid", "step": 3, "epoch": 0, "loss": -1.0, "erle": None, "scenario": {"a": 1}}
    )
    assert lines == ["eval valid  loss -1  erle -"]
