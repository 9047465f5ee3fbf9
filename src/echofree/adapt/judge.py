"""Whether an adapted model is better on its device and no worse elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echofree import audio
from echofree.contracts import Clip, Dataset, Scenario
from echofree.data.remix import Stretch
from echofree.errors import DataError

WARM_UP_S = 3.0  # heard before a stretch is scored
MAX_SURVIVAL_DROP = 0.02
ROWS = {
    "device_erle": "device, echo alone: ERLE, dB",
    "device_si_sdr": "device, double talk remixed: SI-SDR, dB",
    "device_survival": "device, double talk remixed: speech survival",
    "elsewhere_si_sdr": "elsewhere: SI-SDR, dB",
    "elsewhere_erle": "elsewhere, far end alone: ERLE, dB",
}


class Echoes:
    """Held-out stretches as clips of far-end single talk, with what came before them; see `Dataset`."""

    def __init__(self, chosen: Sequence[Stretch], sample_rate: int):
        self.chosen, self.sample_rate = list(chosen), sample_rate

    def __len__(self) -> int:
        return len(self.chosen)

    def item(self, index: int, epoch: int) -> Clip:
        s = self.chosen[index]
        start_s = max(0.0, s.start_s - WARM_UP_S)
        mic, far = (audio.read(Path(p), self.sample_rate, "first", start_s, s.stop_s)[0] for p in (s.mic, s.far))
        return Clip(
            mic, audio.fit(far, len(mic)), None, None, None, Scenario.FAR_END, -1, f"{s.mic} {s.start_s:g}", index
        )

    def stretch(self, index: int) -> tuple[int, int]:
        """The samples [first, stop) that are scored."""
        s = self.chosen[index]
        start_s = max(0.0, s.start_s - WARM_UP_S)
        return round((s.start_s - start_s) * self.sample_rate), round((s.stop_s - start_s) * self.sample_rate)


class Exam:
    """
    Args:
        found: all stretches; those for validation are scored.
        remix: the `data` node of the device's clips.
        parent: the frozen config whose data is elsewhere.
        sample_rate: Hz.
        num_clips: of elsewhere.

    Raises:
        DataError: there is nothing to score elsewhere.
    """

    def __init__(
        self,
        found: Sequence[Stretch],
        remix: Mapping[str, Any],
        parent: Mapping[str, Any],
        sample_rate: int,
        num_clips: int,
    ):
        from echofree.config.build import build_data, instantiate

        device, elsewhere = instantiate(remix, "data"), build_data(parent).split("valid")
        if elsewhere is None or len(elsewhere) == 0:
            raise DataError("the run's own data has no validation clips, by which to tell what is lost elsewhere")
        self.echoes = Echoes([s for s in found if s.split == "valid"], sample_rate)
        self.device: Dataset = device.split("valid")
        self.elsewhere, self.num_clips, self.sample_rate = elsewhere, num_clips, sample_rate

    def scores(self, model: Any) -> dict[str, float]:
        """The rows of `ROWS`; NaN where an output was invalid (silent, not finite)."""
        device, elsewhere = self._rows(model, self.device), self._rows(model, self.elsewhere, self.num_clips)
        talking = [row for row in device if row["scenario"] == "double_talk"]
        return {
            "device_erle": mean(self._rows(model, self.echoes), "erle"),
            "device_si_sdr": mean(talking, "si_sdr"),
            "device_survival": mean(talking, "speech_survival"),
            "elsewhere_si_sdr": mean(elsewhere, "si_sdr"),
            "elsewhere_erle": mean(elsewhere, "erle"),
        }

    def _rows(self, model: Any, dataset: Dataset, limit: int | None = None) -> list[dict[str, Any]]:
        from echofree.metric import default_metrics
        from echofree.score import score

        metrics = default_metrics(["si_sdr", "erle", "speech_survival"], self.sample_rate)
        return score({"model": lambda mic, far: model(mic, far)}, dataset, metrics, limit)


def mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """Over the clips for which the score is defined; NaN when it is invalid for one, or defined for none."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return float(np.mean(values)) if values else math.nan


def problems(
    before: Mapping[str, float], after: Mapping[str, float], min_gain_db: float, max_drop_db: float
) -> list[str]:
    """Why the adapted model is refused; empty when it isn't."""
    found = []
    gain = after["device_erle"] - before["device_erle"]
    if not gain >= min_gain_db:
        found.append(f"it takes away {gain:+.2f} dB of the device's echo, min_gain={min_gain_db:g} is asked for")
    for name, what in (("device_si_sdr", "double talk on the device"), ("elsewhere_si_sdr", "SI-SDR elsewhere")):
        drop = before[name] - after[name]
        if math.isfinite(before[name]) and not drop <= max_drop_db:
            found.append(f"{what} falls by {drop:.2f} dB, max_drop={max_drop_db:g} is allowed")
    lost = before["device_survival"] - after["device_survival"]
    if math.isfinite(before["device_survival"]) and not lost <= MAX_SURVIVAL_DROP:
        found.append(f"{100 * lost:.1f} % more of the talker's frames are lost")
    return found


def table(before: Mapping[str, float], after: Mapping[str, Mapping[str, float]]) -> str:
    """Scores before and after, a column for each way that was tried."""
    width = max(map(len, ROWS.values()))
    lines = ["  ".join([" " * width, f"{'before':>8}", *(f"{name:>8}" for name in after)])]
    for key, what in ROWS.items():
        cells = [f"{scores[key]:8.2f}" for scores in (before, *after.values())]
        lines.append("  ".join([f"{what:{width}}", *cells]))
    return "\n".join(lines)
