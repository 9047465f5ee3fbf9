"""`echofree <verb> ...`, the same as `python -m echofree.<verb> ...`."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Hands the words after the verb to that verb's `main(argv)`. -> the exit code"""
    from echofree import __version__
    from echofree.config import help as texts

    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(texts.verb_help(words[1]) if len(words) > 1 and words[1] in texts.VERBS else texts.overview())
        return 0
    if words[0] in ("-V", "--version", "version"):
        print(f"echofree {__version__}")
        return 0
    verb, rest = words[0], words[1:]
    if verb not in texts.VERBS:
        near = difflib.get_close_matches(verb, texts.VERBS, n=1)
        setting = "=" in verb or verb.startswith("-")
        remedy = f"echofree train {' '.join(words)}" if setting else f"echofree {near[0] if near else '--help'}"
        print(f"{verb!r} is no verb. Verbs: {', '.join(texts.VERBS)}. Type: {remedy}", file=sys.stderr)
        return 2
    if verb == "train" and any(word in ("-h", "--help") for word in rest):
        print(texts.verb_help(verb))  # without importing torch; the other verbs know their keys themselves
        return 0
    sys.argv = [f"echofree {verb}", *rest]
    return int(importlib.import_module(f"echofree.{verb}").main(rest) or 0)


if __name__ == "__main__":
    sys.exit(main())
