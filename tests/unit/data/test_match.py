from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from echofree.contracts import Scenario
from echofree.data.match import compile_pattern, pair, read_cases, scenario_of
from echofree.errors import ConfigError, DataError

PATTERNS = {
    "mic": "{id}_mic.*|mic/{id}.*",
    "far": "{id}_ref.*|{id}_lpb.*|far/{id}.*",
    "near": "{id}_near.*|near/{id}.*",
    "echo": "",
}


def touched(root: Path, *names: str) -> list[Path]:
    paths = [root / name for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return paths


def test_files_side_by_side(tmp_path: Path) -> None:
    paths = touched(tmp_path, "a_mic.wav", "a_ref.flac", "a_near.wav", "day/a_mic.wav", "day/a_lpb.wav")
    recordings, left_out = pair(tmp_path, paths, PATTERNS)
    assert [(r.name, r.mic.name, r.far and r.far.name, r.near and r.near.name) for r in recordings] == [
        ("a", "a_mic.wav", "a_ref.flac", "a_near.wav"),
        ("day/a", "a_mic.wav", "a_lpb.wav", None),
    ]
    assert not left_out


def test_sibling_folders(tmp_path: Path) -> None:
    paths = touched(tmp_path, "x/mic/07.wav", "x/far/07.wav", "x/near/07.wav", "y/mic/07.wav", "y/far/07.wav")
    recordings, left_out = pair(tmp_path, paths, PATTERNS)
    assert [r.name for r in recordings] == ["x/07", "y/07"]
    assert recordings[0].near == tmp_path / "x/near/07.wav"
    assert recordings[1].near is None
    assert not left_out


def test_what_fits_nothing_is_listed(tmp_path: Path) -> None:
    paths = touched(tmp_path, "a_mic.wav", "a_mic.flac", "b_ref.wav", "notes.wav")
    recordings, left_out = pair(tmp_path, paths, PATTERNS)
    assert [r.name for r in recordings] == ["a"]
    assert sorted((i.name, i.reason) for i in left_out) == [
        ("a_mic.wav", "a second mic file of one recording"),
        ("b_ref.wav", "no microphone file"),
        ("notes.wav", "the name fits no pattern"),
    ]


def test_patterns_are_the_users(tmp_path: Path) -> None:
    paths = touched(tmp_path, "rec.7-microphone.wav", "rec.7-loop.wav")
    own = PATTERNS | {"mic": "rec.{id}-microphone.wav", "far": "rec.{id}-loop.wav"}
    recordings, _ = pair(tmp_path, paths, own)
    assert [(r.name, r.far) for r in recordings] == [("7", paths[1])]
    with pytest.raises(ConfigError, match=r"data\.mic_pattern.*\{id\}"):
        compile_pattern("*_mic.wav", "data.mic_pattern")


@pytest.mark.parametrize(
    ("name", "scenario"),
    [
        ("Qf3_farend_singletalk_with_movement", Scenario.FAR_END),
        ("Qf3_doubletalk", Scenario.DOUBLE_TALK),
        ("x/near-end_04", Scenario.NEAR_END),
        ("Double Talk 3", Scenario.DOUBLE_TALK),
        ("syn07_dt", Scenario.DOUBLE_TALK),
        ("syn07_fe", Scenario.FAR_END),
        ("ne-12", Scenario.NEAR_END),
        ("dtln_fe", Scenario.FAR_END),
        ("one_felt_knee", Scenario.UNKNOWN),
        ("farend/near_end_1", Scenario.NEAR_END),
    ],
)
def test_scenario_keywords(name: str, scenario: Scenario) -> None:
    assert scenario_of(name) == scenario


def test_cases_are_stretches_of_one_recording(write: Callable[..., Path], tmp_path: Path) -> None:
    write("m.wav", np.ones(10))
    write("r.wav", np.ones(10))
    table = tmp_path / "cases.csv"
    table.write_text(
        "id,scenario,mic,ref,near,start_s,end_s,note\n"
        'k_fe,fe,m.wav,r.wav,,0,13.6,"noisy, clipped"\n'
        "k_ne,ne,m.wav,r.wav,,14.1,,\n"
        "gone,dt,m.wav,other.wav,,,,\n"
    )
    recordings, left_out = read_cases(table)
    assert [(r.name, r.scenario, r.start_s, r.end_s) for r in recordings] == [
        ("k_fe", Scenario.FAR_END, 0.0, 13.6),
        ("k_ne", Scenario.NEAR_END, 14.1, None),
    ]
    assert [(i.name, i.reason) for i in left_out] == [("gone", "other.wav: no such file")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id,scenario,ref\n", "no column mic"),
        ("id,scenario,mic\n", "no column ref"),
        ("id,scenario,mic,ref\na,quiet,m.wav,r.wav\n", "line 2: scenario='quiet'"),
        ("id,scenario,mic,ref,start_s\na,fe,m.wav,r.wav,soon\n", "line 2: start_s='soon'"),
        ("id,scenario,mic,ref,start_s,end_s\na,fe,m.wav,r.wav,3,2\n", "line 2: the stretch"),
        ("id,scenario,mic,ref\na,fe,,r.wav\n", "line 2: names no microphone"),
    ],
)
def test_mistakes_in_a_table_name_line_and_column(text: str, message: str, tmp_path: Path) -> None:
    table = tmp_path / "cases.csv"
    table.write_text(text)
    with pytest.raises(DataError, match=message):
        read_cases(table)
