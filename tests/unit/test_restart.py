"""Going on with another number of ranks, another code, other data or other settings (field reports B28, B32, B34)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from echofree import checkpoint, restart, rundir
from echofree.config import frozen
from echofree.config.compose import Composer, compose
from echofree.contracts import Batch
from echofree.dist.world import World
from echofree.errors import CheckpointError
from echofree.rundir import RunDir
from toy import Toy, ToyData, ToyModel, records, weights


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


@pytest.fixture
def run(tmp_path: Path, composer: Composer, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run directory as a start leaves it, with one checkpoint of two ranks."""
    monkeypatch.setattr(rundir, "_code_state", lambda folder: {"git_commit": "abc", "patch": None})
    monkeypatch.setattr(rundir, "code_digest", lambda: "111111111111")
    text = frozen.dump(compose(["dist=ddp", "dist.num_procs=2"], composer).config)
    made = RunDir(rundir.create(tmp_path, text, ["train"], 0), is_first=True)
    about = {"run_id": made.facts["id"], "step": 7, "epoch": 0, "scores": {}, "world_size": 2}
    checkpoint.save(made.checkpoints, 7, {"model": {}}, {}, about, World())
    return made


def config(run: RunDir, **keys: Any) -> Any:
    loaded = frozen.load(run.folder)
    for key, value in keys.items():
        group, _, name = key.partition("__")
        if name:
            loaded[group][name] = value
        else:
            loaded[group] = value
    return loaded


def test_another_number_of_ranks_is_refused_with_both(run: RunDir) -> None:
    before = {p: p.read_bytes() for p in run.folder.rglob("*") if p.is_file() and p.name != ".lock"}
    with pytest.raises(CheckpointError, match=r"saved by 2 rank\(s\), this start has 4.*'resume_allow=\[world_size\]'"):
        restart.prepare(run, config(run), None, 4, [])
    after = {p: p.read_bytes() for p in run.folder.rglob("*") if p.is_file() and p.name != ".lock"}
    assert before == after, "refused before anything was touched"


def test_an_allowed_number_of_ranks_says_what_is_no_longer_exact(run: RunDir) -> None:
    restart.prepare(run, config(run, resume_allow=["world_size"]), None, 1, [])
    (note,) = run.facts["notes"]
    assert "2 rank(s) become 1" in note
    assert "no longer exact: every rank's random state (dropout) begins anew" in note
    assert run.facts["resumes"][0]["world_size"] == 1


def test_another_code_is_refused_with_both(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "code_digest", lambda: "222222222222")
    with pytest.raises(CheckpointError, match=r"code 111111111111 \(commit abc\), this is code 222222222222.*\[code\]"):
        restart.prepare(run, config(run), None, 2, [])
    restart.prepare(run, config(run, resume_allow=["code"]), None, 2, [])
    assert "no longer exact" in run.facts["notes"][0]
    restart.prepare(run, config(run), None, 2, [])  # what was allowed once is what the run has now
    monkeypatch.setattr(rundir, "code_digest", lambda: "111111111111")
    with pytest.raises(CheckpointError, match="code 222222222222"):
        restart.prepare(run, config(run), None, 2, [])


def test_a_new_setting_reaches_the_ranks_and_the_old_config_stays(run: RunDir) -> None:
    """Each rank reads config.yaml, so that is where a new learning rate has to be."""
    old = (run.folder / "config.yaml").read_text()
    changed = config(run, optim__lr=0.125, resume_allow=["lr"], resume=str(run.folder))
    restart.prepare(run, changed, run.checkpoints / "step-000007", 2, ["optim.lr"])
    assert frozen.load(run.folder).optim.lr == 0.125
    assert frozen.load(run.folder).resume is None
    assert (run.folder / "config-0.yaml").read_text() == old
    (entry,) = run.facts["resumes"]
    assert (entry["changed"], entry["from"]) == ({"optim.lr": [0.001, 0.125]}, "step-000007")
    assert run.facts["notes"] == ["resume: optim.lr changes from 0.001 to 0.125"]
    restart.prepare(run, config(run), None, 2, [])
    assert not (run.folder / "config-1.yaml").exists(), "nothing changed"


def test_a_stop_file_of_an_earlier_start_is_forgotten(run: RunDir) -> None:
    (run.folder / "stop").touch()
    restart.prepare(run, config(run), None, 2, [])
    assert not (run.folder / "stop").exists()


# --- in the ranks ---------------------------------------------------------------------------------------------------


def facts(folder: Path, **keys: Any) -> RunDir:
    found = RunDir(folder, is_first=True)
    found.note(resume=True, **keys)
    return found


def test_other_data_is_refused_with_both_fingerprints(tmp_path: Path) -> None:
    toy = Toy(tmp_path, keys={"train.save_every_steps": 2, "train.max_steps": 4})
    toy.loop().fit()
    run = facts(tmp_path, data_fingerprint="aaa")
    with pytest.raises(CheckpointError, match=r"fingerprint aaa then, bbb now.*'resume_allow=\[data\]'"):
        restart.go_on(toy.loop(), run, "bbb")
    loop = toy.loop()
    restart.go_on(loop, facts(tmp_path, resume_allow=["data"]), "bbb")
    assert loop.state.step == 4
    restart.go_on(toy.loop(), facts(tmp_path, resume_allow=[]), "aaa")


def test_the_automatic_resume_passes_over_a_damaged_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    toy = Toy(tmp_path, keys={"train.save_every_steps": 2, "train.max_steps": 4})
    toy.loop().fit()
    (tmp_path / "checkpoints/step-000004/model.pt").write_bytes(b"torn")
    loop = toy.loop()
    with caplog.at_level("INFO"):
        restart.go_on(loop, facts(tmp_path), "any")
    assert loop.state.step == 2
    assert "passing over step-000004" in caplog.text
    assert "resumed from step-000002" in caplog.text
    assert [r["step"] for r in records(loop)] == [1, 2]


def test_an_earlier_checkpoint_is_gone_back_to(tmp_path: Path) -> None:
    keys = {"train.save_every_steps": 2, "train.max_steps": 6, "checkpoint.keep_last": 9}
    toy = Toy(tmp_path, model=lambda: ToyModel(dropout=0.3), keys=keys)
    uncut = toy.loop()
    uncut.fit()
    expected, lines = weights(uncut), records(uncut)
    torch.manual_seed(999)
    loop = toy.loop()
    restart.go_on(loop, facts(tmp_path, resumed_from="step-000002"), "any")
    assert loop.state.step == 2
    loop.fit()
    assert records(loop) == lines, "every step once, in order"
    assert all(torch.equal(weights(loop)[k], v) for k, v in expected.items())


def test_another_global_batch_keeps_the_place_in_the_epoch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """24 clips in batches of 4, stopped after step 9 (12 clips into epoch 1); batches of 8 go on from clip 8: four are
    seen twice, none is left out, and the run ends with its epochs."""
    keys = {"train.epochs": 3, "train.save_every_steps": 9, "train.max_steps": 9, "checkpoint.keep_last": 9}
    Toy(tmp_path, data=ToyData(24), keys=keys).loop().fit()
    log = tmp_path / "made"
    keys = {"train.epochs": 3, "train.batch_size": 8, "optim.schedule": "cosine"}
    loop = Toy(tmp_path, data=ToyData(24, log=str(log)), keys=keys).loop()
    restart.go_on(loop, facts(tmp_path), "any")
    assert (loop.state.step, loop.state.epoch, loop.state.step_in_epoch) == (9, 1, 1)
    assert loop.total_steps == 9 + 2 + 3
    assert "5 steps remain; 4 clips of this epoch are seen again" in caplog.text
    assert loop.fit().status == "done"
    assert loop.state.step == 14
    made = [int(line.split()[1]) for line in log.read_text().splitlines()]
    order = [list(loop.plan.order(epoch)) for epoch in (1, 2)]
    assert made == [*order[0][8:], *order[1]]
    assert loop.schedule.factor(14) == pytest.approx(0.01), "the schedule ends where the run ends"


def test_a_rank_that_begins_anew_repeats_no_stream(tmp_path: Path) -> None:
    loop = Toy(tmp_path).loop()

    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(np.random.rand())

    streams = []
    for rank in (0, 1):
        for step in (0, 7):
            loop.world.rank = rank
            restart.reseed(loop, step)
            streams.append(draw())
    assert len({s[0] for s in streams}) == len({s[1] for s in streams}) == len({s[2] for s in streams}) == 4
    restart.reseed(loop, 7)
    assert draw() == streams[-1], "and can be repeated"


def test_early_stop_best_and_plateau_go_on_where_they_were(tmp_path: Path) -> None:
    """Scores come from a list: the uncut run and one that is cut after each of its evaluations take the same turns."""
    values = [5.0, 4.0, 4.5, 4.2, 4.1, 4.3, 4.4, 4.6, 4.0, 4.0]

    class Scores:
        def weight(self, batch: Batch) -> float:
            return float(batch.weight.sum())

        def loss(
            self, model: torch.nn.Module, batch: Batch
        ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            total = (model(batch.mic, batch.far) - batch.near).square().sum()
            return total, batch.weight.sum(), {"mse": total.detach()}

        def evaluate(self, model: torch.nn.Module, batch: Batch) -> list[dict[str, Any]]:
            value = values[loop.state.step - 1]
            return [{"name": "a", "index": 0, "scenario": "unknown", "seconds": 1.0, "loss": value}]

    keys = {
        "train.eval_every_steps": 1, "train.save_every_steps": 1, "train.early_stop_patience": 6, "train.epochs": 9,
        "optim.schedule": "plateau", "optim.plateau_patience": 2, "checkpoint.keep_last": 99, "optim.lr": 1e-4,
    }  # fmt: skip

    def make(folder: str) -> Any:
        return Toy(tmp_path / folder, valid_clips=1, task=Scores(), keys=keys).loop()

    loop = make("uncut")
    uncut = loop
    assert uncut.fit().status == "stopped"
    assert (uncut.state.best, uncut.state.best_step, uncut.state.step) == (4.0, 2, 8)
    assert uncut.schedule.plateau_scale < 1
    for _ in range(12):
        loop = make("cut")
        restart.go_on(loop, loop.run, "any")
        loop.run.note(resume=True)
        loop.stop.file = tmp_path / "cut/stop"
        loop.stop.file.write_text(str(loop.state.step + 1))
        if loop.fit().status == "stopped":
            break
    assert loop.state == uncut.state
    assert records(loop) == records(uncut)
    assert loop.schedule.state_dict() == uncut.schedule.state_dict()
    assert checkpoint.pointed(tmp_path / "cut/checkpoints", "best") == tmp_path / "cut/checkpoints/step-000002"
