"""The demo in a real browser: real and made sounds go through the page, and what it saves equals the Python runtime.

Needs beside the browser onnxruntime-web, from the cache or through npm; skipped where neither has it.
"""

from __future__ import annotations

import functools
import http.server
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from echofree.demo import package
from echofree.demo.folder import build, exported
from echofree.errors import UserError
from echofree.export.base import describe
from echofree.export.golden import calibration
from echofree.export.onnx import Onnx
from echofree.model.bark import BarkNet
from echofree.model.graph import stream_graph
from echofree.runtime import Canceller
from echofree.runtime.contract import CHECKED, digest
from unit.export.small_models import MAKERS, make

pytestmark = pytest.mark.slow  # exports, and a browser that compiles 14 MB of WebAssembly
RATE = 16000
SIZES = {"laptop": (1280, 800), "phone": (390, 844)}
FAKE_MIC = ("--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


def artifact(name: str, folder: Path) -> Path:
    """An exported model of a kind, with weights that make every layer count."""
    MAKERS.setdefault("tiny at full size", BarkNet)
    model, exporter = make(name), Onnx()
    folder.mkdir(parents=True)
    torch.set_num_threads(1)
    graph = stream_graph(model)
    contract = describe(model, graph, "onnx", exporter, "outputs/tiny/a run")
    if graph is not None:
        exporter.write(graph, calibration(model, graph), folder)
        contract.sha256 = digest(folder / contract.file)
    contract.status = CHECKED
    contract.save(folder)
    return folder


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("artifacts")
    return {name: artifact(name, root / name) for name in ("tiny at full size", "base", "linear")}


@pytest.fixture(scope="module")
def sites(artifacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Addresses of demos by kind of model, served as a user would."""
    try:
        engine = package.find()
    except UserError as error:
        pytest.skip(str(error))
    root = tmp_path_factory.mktemp("sites")
    for name, folder in artifacts.items():
        build(exported(folder), engine, root / name.replace(" ", "-"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(root)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield {name: f"http://localhost:{server.server_port}/{name.replace(' ', '-')}/" for name in artifacts}
    server.shutdown()
    thread.join()
    server.server_close()


class Opened:
    """A demo in a browser, with everything that went wrong on it and all that it asked for."""

    def __init__(self, browser: Any, url: str, size: str = "laptop", scheme: str = "light", **more: Any):
        width, height = SIZES[size]
        self.context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, has_touch=size == "phone", **more
        )
        self.page = self.context.new_page()
        self.faults: list[str] = []
        self.asked: list[str] = []
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on(
            "console", lambda said: self.faults.append(said.text) if said.type in ("error", "warning") else None
        )
        self.page.on("request", lambda asked: self.asked.append(asked.url))
        self.page.goto(url)
        self.page.wait_for_selector("html[data-ready=true]", timeout=60_000)

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, *_: Any) -> None:
        self.context.close()


def made_pair(rng: np.random.Generator, seconds: float = 6.0) -> tuple[np.ndarray, np.ndarray]:
    """Coloured noise in syllables, 90 ms late through a decaying path, and a talker in the second half."""
    num, delay = int(seconds * RATE), int(0.09 * RATE)
    far = 0.1 * np.convolve(rng.standard_normal(num), [1, 0.9, 0.5], "same")
    far *= np.repeat(rng.random(num // 3200 + 1) > 0.3, 3200)[:num]
    path = 0.4 * rng.standard_normal(1200) * np.exp(-np.arange(1200) / 250)
    near = 0.05 * rng.standard_normal(num) * (np.arange(num) > num // 2)
    mic = np.convolve(np.pad(far, (delay, 0)), path)[:num] + near + 1e-4 * rng.standard_normal(num)
    return 0.5 * mic / np.abs(mic).max(), 0.5 * far / np.abs(far).max()


def files(mic: np.ndarray, far: np.ndarray, folder: Path) -> tuple[Path, Path]:
    for name, wave in (("mic", mic), ("far", far)):
        soundfile.write(folder / f"{name}.wav", wave, RATE, "PCM_16")
    return folder / "mic.wav", folder / "far.wav"


def by_python(folder: Path, mic: Path, far: Path) -> np.ndarray:
    """What the Python runtime makes of the same files, aligned with the microphone."""
    canceller = Canceller.load(folder)
    waves = [soundfile.read(path, dtype="float32")[0] for path in (mic, far)]
    size = len(waves[0])
    waves[1] = np.pad(waves[1], (0, max(0, size - len(waves[1]))))[:size]
    out = np.concatenate([canceller.process(*waves), canceller.flush()])
    return out[canceller.latency_samples :][:size]


def saved(page: Any, folder: Path) -> np.ndarray:
    page.wait_for_selector("html[data-state=done]", timeout=120_000)
    with page.expect_download() as download:
        page.click("#save")
    download.value.save_as(folder / "out.wav")
    wave, rate = soundfile.read(folder / "out.wav", dtype="float32")
    assert rate == RATE
    return wave


def until(page: Any, condition: str, seconds: float = 60.0) -> None:
    """Waits for a JavaScript condition; the page's own rules forbid the evaluation that wait_for_function needs."""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, f"{condition} didn't come true; fault: {page.inner_text('#fault')}"
        page.wait_for_timeout(50)


def cancel(page: Any, mic: Path, far: Path, folder: Path) -> np.ndarray:
    page.set_input_files("#mic", mic)
    page.set_input_files("#far", far)
    page.click("#run")
    return saved(page, folder)


@pytest.mark.parametrize("kind", ["tiny at full size", "base", "linear"])
def test_a_made_pair_comes_out_as_from_the_python_runtime(browser, sites, artifacts, rng, tmp_path, kind):
    mic, far = files(*made_pair(rng), tmp_path)
    opened = Opened(browser, sites[kind])
    with opened as page:
        out = cancel(page, mic, far, tmp_path)
        expected = by_python(artifacts[kind], mic, far)
        assert out.shape == expected.shape
        assert np.abs(out - expected).max() < 1e-4
        assert np.std(expected) > 1e-3
        figures = {
            tile.get_attribute("data-figure"): tile.locator("b").inner_text() for tile in page.locator(".tile").all()
        }
        assert 0 < float(figures["mean"].removesuffix(" ms")) < 16
        assert figures["late"].endswith(" ms")
        assert opened.faults == []
        assert all(url.startswith((sites[kind], "blob:")) for url in opened.asked), opened.asked


@pytest.mark.parametrize("name", ["dtln_dt", "nv_1"])
def test_a_real_pair_comes_out_as_from_the_python_runtime(browser, sites, artifacts, shared_audio, tmp_path, name):
    waves = [
        soundfile.read(shared_audio / "real" / f"{name}_{end}.flac", frames=10 * RATE)[0] for end in ("mic", "ref")
    ]
    mic, far = files(*waves, tmp_path)
    with Opened(browser, sites["tiny at full size"]) as page:
        out = cancel(page, mic, far, tmp_path)
        assert np.abs(out - by_python(artifacts["tiny at full size"], mic, far)).max() < 1e-4
        assert page.locator(".tile[data-figure=delay]").count() == 1


@pytest.mark.parametrize(
    ("size", "scheme", "locale"),
    [
        ("laptop", "light", "en-US"),
        ("laptop", "dark", "zh-CN"),
        ("phone", "dark", "en-US"),
        ("phone", "light", "zh-CN"),
    ],
)
def test_it_fits_draws_and_plays(browser, sites, size, scheme, locale):
    opened = Opened(browser, sites["tiny at full size"], size, scheme, locale=locale)
    with opened as page:
        page.click("#sample")
        page.wait_for_selector("html[data-state=done]", timeout=120_000)
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide == 0, f"{wide} pixels stick out"
        for signal in ("mic", "out", "far"):
            shades = page.locator(f"[data-signal={signal}] canvas").evaluate(
                "(c) => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size"
            )
            assert shades > 20, signal
        assert page.get_by_text("麦克风（处理前）" if locale == "zh-CN" else "Microphone, before").count() == 1
        assert page.evaluate("[...document.querySelectorAll('[data-text]')].every((n) => n.textContent)")
        ink, paper = page.evaluate(
            "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor].map("
            "(c) => c.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0) / 3)"
        )
        assert (ink > paper) == (scheme == "dark")
        page.click("#play")
        until(page, "Number(document.getElementById('clock').textContent.split(' ')[0]) >= 0.3")
        page.click("[data-signal=mic] button")
        assert page.locator(".track.on").get_attribute("data-signal") == "mic"
        page.click("#play")
        assert opened.faults == []


def test_wrong_files_are_named(browser, sites, tmp_path):
    (tmp_path / "text.wav").write_text("no sound")
    with Opened(browser, sites["linear"]) as page:
        page.click("#run")
        assert "Choose both files" in page.inner_text("#fault")
        page.set_input_files("#mic", tmp_path / "text.wav")
        page.set_input_files("#far", tmp_path / "text.wav")
        page.click("#run")
        until(page, "document.getElementById('fault').textContent.includes('text.wav')")
        assert page.is_enabled("#run")


def test_another_rate_and_two_channels(browser, sites, artifacts, rng, tmp_path):
    """48 kHz in stereo is brought to the model's rate; the result is what 16 kHz files give, but for the resampler."""
    mic, far = made_pair(rng)
    smooth = [np.fft.irfft(np.fft.rfft(x) * (np.arange(len(x) // 2 + 1) < len(x) // 4), len(x)) for x in (mic, far)]
    low = files(*smooth, tmp_path)
    expected = by_python(artifacts["linear"], *low)
    paths = []
    for name, wave in zip(("mic48", "far48"), smooth):
        up = np.fft.irfft(np.pad(np.fft.rfft(wave), (0, len(wave))), 3 * len(wave)) * 3
        soundfile.write(tmp_path / f"{name}.wav", np.stack([up, up], axis=1), 3 * RATE, "FLOAT")
        paths.append(tmp_path / f"{name}.wav")
    with Opened(browser, sites["linear"]) as page:
        out = cancel(page, *paths, tmp_path)
        assert abs(len(out) - len(expected)) <= 2
        size = min(len(out), len(expected))
        loss = np.std((out[:size] - expected[:size])[RATE:]) / np.std(expected[RATE:])
        assert loss < 0.5  # an adaptive filter goes its own way from another rounding on


def test_live_with_a_microphone(launch, sites, rng, tmp_path):
    mic, _ = files(*made_pair(rng), tmp_path)
    browser = launch(*FAKE_MIC, f"--use-file-for-fake-audio-capture={mic}")
    opened = Opened(browser, sites["tiny at full size"], permissions=["microphone"])
    with opened as page:
        page.click("#live")
        until(page, "parseFloat(document.getElementById('status').textContent.match(/[0-9.]+/)) > 2.5")
        assert page.locator(".tile[data-figure=mean]").count() == 1
        page.click("#live")
        out = saved(page, tmp_path)
        assert len(out) > 2.5 * RATE
        assert np.std(out) > 1e-4
        assert page.inner_text("#live") == "Start"
        page.click("#sample")
        page.wait_for_selector("html[data-state=busy]")
        page.wait_for_selector("html[data-state=done]", timeout=120_000)
        assert opened.faults == []


def test_a_refused_microphone_is_said(launch, sites):
    browser = launch("--use-fake-device-for-media-stream")
    with Opened(browser, sites["linear"], permissions=[]) as page:
        page.click("#live")
        until(page, "!document.getElementById('fault').hidden")
        assert "The microphone was refused" in page.inner_text("#fault")
        assert page.is_enabled("#live")


def test_a_missing_model_is_said(browser, sites, artifacts, tmp_path):
    context = browser.new_context()
    page = context.new_page()
    page.route("**/model.onnx", lambda route: route.fulfill(status=404, body="gone"))
    page.goto(sites["tiny at full size"])
    until(page, "!document.getElementById('fault').hidden")
    assert "artifact/model.onnx: 404" in page.inner_text("#fault")
    context.close()
