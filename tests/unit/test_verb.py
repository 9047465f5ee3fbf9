"""The key=value words of the small verbs."""

from __future__ import annotations

import pytest

from echofree.errors import ConfigError, EchoFreeError
from echofree.verb import REQUIRED, Key, ending, parse

KEYS = {"mic": Key(REQUIRED, "the microphone"), "limit": Key("null", "how many"), "names": Key("a,b", "which")}


def test_words_are_taken_apart():
    words = parse(["mic=a=b.wav", "data=folder", "+data.root=/x", "limit=3", "names=[p, q]"], KEYS, ("data",))
    assert words["mic"] == "a=b.wav"
    assert words.passed == ["data=folder", "+data.root=/x"]
    assert words.number("limit") == 3
    assert words.names("names") == ["p", "q"]


def test_defaults_and_spellings_of_nothing():
    words = parse(["mic=none"], KEYS)
    assert words.given("mic") is None
    assert words.number("limit") is None
    assert words.names("names") == ["a", "b"]


@pytest.mark.parametrize(
    ("word", "text"),
    [
        (["--mic", "x.wav"], "--mic x.wav: EchoFree takes key=value. Type: mic=x.wav"),
        (["--mic=x.wav"], "--mic=x.wav: EchoFree takes key=value. Type: mic=x.wav"),
        (["--data.root", "/x"], "Type: data.root=/x"),
        (["--quiet"], "--quiet: unknown flag"),
        (["mik=x.wav"], "Type: mic=x.wav"),
        (["x.wav"], "'x.wav': settings are typed key=value"),
        (["zzzzzz=1"], "Keys: mic, limit, names, data"),
    ],
)
def test_other_spellings_get_ours(word, text):
    with pytest.raises(ConfigError) as caught:
        parse(word, KEYS, ("data",))
    assert text in str(caught.value)
    assert "mic is missing" in str(caught.value)


def test_wrong_values():
    words = parse(["mic=maybe", "limit=0"], KEYS)
    with pytest.raises(ConfigError, match="whole number"):
        words.number("limit")
    with pytest.raises(ConfigError, match="true or false"):
        words.switch("mic")


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (None, 0, ""),
        (ConfigError(["a=1: give 2", "b is missing"]), 2, "a=1: give 2\nb is missing\n"),
        (EchoFreeError("the run failed"), 1, "the run failed\n"),
        (KeyboardInterrupt(), 130, "nothing was written\n"),
    ],
)
def test_every_end_has_its_exit_code_and_no_traceback(
    error: BaseException | None, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        if error is not None:
            raise error

    assert ending(work, "nothing was written") == code
    assert capsys.readouterr().err == text
    assert ending(lambda: 75) == 75
    with pytest.raises(ZeroDivisionError):  # a fault of ours keeps its traceback
        ending(lambda: 1 // 0)
