"""A client's half of a round: its clips, its loop, its pull, what it keeps. No Flower needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from echofree.config.compose import compose
from echofree.errors import ConfigError
from echofree.federate import certificate, exchange, rules
from echofree.federate.site import Proximal, Site
from parent import TINY

WORDS = (
    *TINY, "data.num_train=20", "data.num_valid=2", "data.num_test=2", "data.num_rooms=8", "data.segment_s=0.5",
    "data.num_workers=0", "data.partition.by=room", "train.batch_size=2", "federated.num_clients=3",
    "federated.rounds=4", "federated.local_steps=2", "federated.held_out=0.25", "optim.lr=0.01", "train.device=cpu",
)  # fmt: skip


def site(folder: Path, *words: str) -> Site:
    config = compose([*WORDS, *words]).config
    rules.settle(config)
    return Site(config, folder, None, 1)


class Linear:
    """A task: the squared output, a clip's weight its seconds."""

    def weight(self, batch: Any) -> float:
        return float(batch[1])

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        seconds = torch.tensor(float(batch[1]))
        return model(batch[0]).square().mean() * seconds, seconds, {}


def test_the_pull_has_the_same_size_whatever_the_batches(rng: np.random.Generator) -> None:
    model = nn.Linear(3, 2)
    first = {name: torch.from_numpy(rng.standard_normal(p.shape)).float() for name, p in model.named_parameters()}
    x = torch.from_numpy(rng.standard_normal((4, 3))).float()
    mu, inner = 0.7, Linear()
    plain, pulled = [], []
    for task, found in ((inner, plain), (Proximal(inner, first, mu), pulled)):
        for parts in ([(x, 4.0)], [(x, 1.0), (x, 3.0)]):
            model.zero_grad()
            total = sum(seconds for _, seconds in parts)
            for part in parts:
                (task.loss(model, part)[0] / total).backward()
            found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    for before, after in zip(plain, pulled, strict=True):
        for name, p in model.named_parameters():
            torch.testing.assert_close(
                after[name] - before[name], mu * (p.detach() - first[name]), atol=1e-5, rtol=1e-4
            )


def test_a_round_is_a_function_of_its_number_and_what_came(tmp_path: Path) -> None:
    here, there = site(tmp_path / "a"), site(tmp_path / "b")
    start = exchange.pack(here.base, here.plan.shared)
    mark = here.plan.mark
    clips = [set(np.concatenate(here.indices(k)).tolist()) for k in range(3)]
    assert sorted(np.concatenate([sorted(c) for c in clips]).tolist()) == list(range(20))
    assert all(not set(here.indices(k)[0]) & set(here.indices(k)[1]) for k in range(3))
    one = here.fit(1, 3, start, 0.0, mark)
    here.fit(0, 1, start, 0.0, mark)
    there.evaluate(1, 2, start)
    other = there.fit(1, 3, start, 0.0, mark)
    assert one["tensors"] == other["tensors"] != start
    assert one["seconds"] == pytest.approx(0.5 * len(here.indices(1)[0]))
    assert one["facts"]["lr"] < here.fit(1, 1, start, 0.0, mark)["facts"]["lr"], "the schedule spans the rounds"
    assert here.fit(2, 3, start, 0.0, mark)["tensors"] != one["tensors"]
    far = [float(np.sqrt(sum(((a - b) ** 2).sum() for a, b in pairs))) for pairs in (
        [(exchange.from_bytes(x), exchange.from_bytes(y)) for x, y in zip(result["tensors"], start, strict=True)]
        for result in (one, here.fit(1, 3, start, 1000.0, mark))
    )]  # fmt: skip
    assert far[1] < far[0], "a strong pull keeps the weights near"
    with pytest.raises(ValueError, match="another model"):
        here.fit(1, 1, start, 0.0, "0" * 16)


def test_what_a_client_keeps_is_its_own_and_that_of_the_round(tmp_path: Path) -> None:
    here = site(tmp_path, "federated.keep_local=[batchnorm]", "federated.optimizer=kept")
    start = exchange.pack(here.base, here.plan.shared)
    norm = next(name for name in here.plan.local if name.endswith("running_mean"))
    for number in (1, 2, 3):
        here.fit(0, number, start, 0.0, here.plan.mark)
    assert sorted(path.name for path in here.home(0).glob("local-*")) == ["local-000002.pt", "local-000003.pt"]
    last = here.remembered(0, 3)
    assert "optimizer" in last
    assert not torch.equal(last["kept"][norm], here.base[norm])
    assert not torch.equal(last["kept"][norm], here.remembered(0, 2)["kept"][norm])
    here.begin(1, 3, start)
    assert torch.equal(here.model.state_dict()[norm], here.base[norm]), "another client's don't leak"
    here.begin(0, 3, start)
    assert torch.equal(here.model.state_dict()[norm], last["kept"][norm])
    assert here.remembered(0, 1) == {}, "gone, and not mixed up with a later one"
    again = here.fit(0, 3, start, 0.0, here.plan.mark)  # a server that was killed asks again
    torch.testing.assert_close(here.remembered(0, 3)["kept"][norm], last["kept"][norm], rtol=0, atol=0)
    assert again["facts"]["skipped"] == 0
    here.fit(0, 2, start, 0.0, here.plan.mark)  # a server that was put back further
    assert sorted(path.name for path in here.home(0).glob("local-*")) == ["local-000002.pt"]
    here.fit(0, 1, start, 0.0, here.plan.mark, "another")
    assert sorted(path.name for path in here.home(0).glob("local-*")) == ["local-000001.pt"]
    lines = (here.home(0) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2]


def test_frozen_parts_do_not_move_and_do_not_travel(tmp_path: Path) -> None:
    here = site(tmp_path, "optim.freeze=[*,-*norm*]")
    start = exchange.pack(here.base, here.plan.shared)
    assert all("norm" in name for name in here.plan.shared)
    assert 0 < sum(map(len, start)) < 0.2 * sum(t.numel() * 4 for t in here.base.values())
    here.fit(0, 1, start, 0.0, here.plan.mark)
    after = here.model.state_dict()
    assert all(torch.equal(after[name], here.base[name]) for name in after if "norm" not in name)
    assert not torch.equal(after[here.plan.shared[0]], here.base[here.plan.shared[0]])


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("dist=ddp", "a client trains in one process"),
        ("train.max_steps=5", "federated.rounds"),
        ("train.ema_decay=0.9", "keep no average"),
        ("federated.noise=1.0", "federated.clip_norm"),
        ("federated.noise=2.0", "federated.max_norm_ratio=null"),
        ("federated.role=client", "needs its number"),
        ("federated.role=server", "federated.certificates"),
        ("federated.faults=[1:nan]", "client:round:"),
        ("data.partition.client=1", "every client is trained"),
        ("federated.min_clients=9", "there are 3 clients"),
    ],
)
def test_what_does_not_go_together_is_told_before_anything_starts(word: str, text: str) -> None:
    config = compose([*WORDS, word]).config
    with pytest.raises(ConfigError, match=text):
        rules.settle(config)


def test_an_open_partition_is_settled_and_said() -> None:
    config = compose([word for word in WORDS if "partition" not in word]).config
    (note,) = rules.settle(config)
    assert "dirichlet" in note
    assert (config.data.partition.by, config.data.partition.num) == ("dirichlet", 3)


def test_certificates_fit_their_server(tmp_path: Path) -> None:
    x509 = pytest.importorskip("cryptography.x509", reason="needs echofree[federated]")
    paths = certificate.make(tmp_path / "pems", "192.0.2.7")
    ca, leaf = (x509.load_pem_x509_certificate(path.read_bytes()) for path in paths[:2])
    leaf.verify_directly_issued_by(ca)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {str(n) for n in names.get_values_for_type(x509.IPAddress)} == {"192.0.2.7", "127.0.0.1"}
    with pytest.raises(ConfigError, match="already"):
        certificate.make(tmp_path / "pems", "localhost")
    with pytest.raises(ConfigError, match=r"server\.key"):
        certificate.read(str(tmp_path), ("server.key",))
