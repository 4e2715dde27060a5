"""Random command lines: right ones, wrong ones, and those that nobody would type.

Each must end within a time limit, without a traceback; what is refused is refused in one line on stderr; and what can
never be right is never accepted.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from typer.testing import CliRunner

from dphero.cli import app
from tests.fuzz.harness import Findings, attempt

SECONDS = 90

NEVER = ("", " ", "nan", "inf", "-inf", "-1", "abc", "1e400", "0x10", "--", "-", "1,5", "٣٫٥", "½", "\x1b[31m3", "[1]")
"""No number, or none that any option takes."""

ODD = ("1e308", "1e-308", "1e-320", "-0.0", "1e30", "1e-30", "99999999999999999999999999", "007", "+3", " 3", "3 ", "٣")
"""Numbers that may be right or wrong."""

TEXTS = (
    "", " ", ".", "..", "/", "/dev/null", "/dev/zero", "/dev/full", "/proc/self/mem", "nowhere", "a:b", ":", "a:", ":b",
    "json:loads", "time:sleep", "sys:exit", "os:getcwd", "json:dumps", "os:system", "builtins:print", "builtins:dict",
    "builtins:object", "math:pi", "torch:nn", "torch.nn:Linear", "torch.nn:Module", "dphero.data:load", "x" * 5000,
    "a/" * 2000, "\x1b[2J", "é漢字", "[red]x", "{}", "'; rm -rf /", "${HOME}", "%s", "-x", "--help me", "digits ",
    "DIGITS",
)  # fmt: skip


def numbers(*right: str) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Values of a number: right, odd, never right."""
    return right, ODD, NEVER


def texts(*right: str) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Values of a text; which of them are wrong is not known."""
    return right, TEXTS, ()


Values = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]

PRICING: Mapping[str, Values] = {
    "--noise-multiplier": numbers("1", "0.7", "5"),
    "--sample-rate": numbers("0.01", "1", "0.5"),
    "--steps": numbers("1", "10", "100"),
    "--delta": numbers("1e-5", "0.1"),
    "--accountant": texts("pld", "rdp", "zcdp", "gdp"),
}

TRAINING: Mapping[str, Values] = {
    "--data": texts("digits"),
    "--model": texts("digits", "mlp"),
    "--method": texts("dp-sgd", "dp-hero", "gdp", "sgd"),
    "--noise-multiplier": numbers("3", "1"),
    "--epsilon": numbers("3", "8"),
    "--delta": numbers("1e-5"),
    "--lot": numbers("16", "512"),
    "--lr": numbers("0.1", "1"),
    "--momentum": numbers("0.9"),
    "--optimizer": texts("sgd", "adam"),
    "--clip": numbers("1", "0.1"),
    "--clipping": texts("flat", "per_layer", "automatic", "adaptive"),
    "--guidance": texts("pca", "history", "isotropic"),
    "--mechanism": texts("ellipsoid", "ball"),
    "--accountant": texts("pld", "rdp"),
    "--physical-batch": numbers("100", "8"),
    "--seed": (("0", "1"), ODD, tuple(value for value in NEVER if value != "")),
    "--device": texts("cpu", "auto"),
    "--dataset-size": (("public", "1437"), ("1", "1000000"), NEVER),
    "--set": texts("floor=0.2", "exponent=1", "a", "=", "floor=[[[[", "exponent='", "exponent=1e400", "floor={}"),
    "--recipe": texts("nowhere.toml"),
    "--resume": texts("nowhere"),
}

SHORT = ("0.02", "0.05")


class CommandLines:
    """Draws command lines.

    Args:
        draw: What decides.
        run: A finished run, to be used.
        folder: Where new runs may go.
    """

    def __init__(self, draw: random.Random, run: Path, folder: Path) -> None:
        self.draw, self.run, self.folder = draw, run, folder
        self.number = 0

    def __call__(self) -> tuple[list[str], bool]:
        """Return the words of a line, and whether it has to be refused."""
        makers = (
            self.pricing,
            self.pricing,
            self.train,
            self.train,
            self.train,
            self.compare,
            self.predict,
            self.small,
        )
        words, wrong = self.draw.choice(makers)()
        return self.mangled(words, wrong)

    def chosen(self, options: Mapping[str, Values], share: float, needed: Sequence[str]) -> tuple[list[str], bool]:
        """Draw options, mostly with right values."""
        words, wrong = [], False
        names = [name for name in options if name in needed or self.draw.random() < share]
        self.draw.shuffle(names)
        spoiled = self.draw.choice(names) if names and self.draw.random() < 0.7 else None
        for name in names:
            right, odd, never = options[name]
            value = self.draw.choice(right)
            if name == spoiled:
                value = self.draw.choice((*odd, *never))
                wrong = wrong or value in never
            words += [name, value]
        return words, wrong

    def pricing(self) -> tuple[list[str], bool]:
        needed = ("--noise-multiplier", "--sample-rate", "--steps", "--delta")
        words, wrong = self.chosen(PRICING, 0.3, needed)
        return ["epsilon", *words, *(["--json"] if self.draw.random() < 0.5 else [])], wrong

    def train(self) -> tuple[list[str], bool]:
        self.number += 1
        words, wrong = self.chosen(TRAINING, 0.12, ("--data", "--noise-multiplier"))
        length = self.draw.choice(SHORT) if self.draw.random() < 0.9 else self.draw.choice(NEVER)
        wrong = wrong or length in NEVER
        return ["train", *words, "--epochs", length, "--out", str(self.folder / f"run{self.number}")], wrong

    def compare(self) -> tuple[list[str], bool]:
        """Always with something wrong: right ones take minutes."""
        broken = self.draw.choice(
            [
                ["--methods", "no-such-method"], ["--epsilons", "0"], ["--epsilons", "nan"], ["--seeds", "x"],
                ["--seeds", ""], ["--seeds", "-1"], ["--vary", "nothing"], ["--vary", "lr=abc"], ["--vary", "=1"],
                ["--vary", "nope=1,2"], ["--workers", "0"], ["--workers", "x"], ["--delta", "2"], ["--lot", "0"],
                ["--recipe", "nowhere.toml"], ["--resume", "nowhere"], ["--dataset-size", "-5"], ["--device", "meta2"],
            ]
        )  # fmt: skip
        words, _ = self.chosen({"--data": texts("digits"), "--epsilons": texts("3", "1,2")}, 0.5, ("--data",))
        return ["compare", *words, *broken, "--out", str(self.folder / f"compared{self.number}")], True

    def predict(self) -> tuple[list[str], bool]:
        run = str(self.run) if self.draw.random() < 0.7 else self.draw.choice(TEXTS)
        files = (*TEXTS, *(str(file) for file in sorted(self.run.iterdir())))
        return ["predict", run, self.draw.choice(files), *(["--json"] if self.draw.random() < 0.3 else [])], False

    def small(self) -> tuple[list[str], bool]:
        text = self.draw.choice(TEXTS)
        lines = (
            ["methods"], ["methods", text], ["data", "list"], ["data", text], ["data", "get", f"no{text}"],
            ["audit", f"no{text}"], ["audit", "published", "--releases", self.draw.choice(NEVER)],
            ["audit", "published", "--confidence", self.draw.choice(NEVER)], ["audit", "--method", f"no{text}"],
            ["calibrate", "--epsilon", self.draw.choice(NEVER), "--sample-rate", ".1", "--steps", "9", "--delta", ".1"],
            ["reproduce", f"no{text}"], ["demo", f"--no{text}"], [text], ["--version"], ["--help"], [],
        )  # fmt: skip
        return list(self.draw.choice(lines)), False

    def mangled(self, words: list[str], wrong: bool) -> tuple[list[str], bool]:
        """Sometimes break the line itself; then nothing is known of what must be refused."""
        if self.draw.random() < 0.8 or len(words) < 2:
            return words, wrong
        at = self.draw.randrange(1, len(words))
        kind = self.draw.randrange(4)
        if kind == 0:
            del words[at]
        elif kind == 1:
            words.insert(at, self.draw.choice(TEXTS))
        elif kind == 2:
            words[at] = words[at][: len(words[at]) // 2]
        else:
            words.append(f"--{self.draw.choice(('nothing', 'jsn', 'x' * 300))}")
        if words[0] in ("train", "compare", "audit", "demo", "reproduce"):
            words += ["--no-such-option"] * 2  # it might now ask for hours; the first may be taken for a value
        return words, False


def fuzz(count: int, seed: int, run: Path, folder: Path) -> Findings:
    """Try so many command lines, from inside ``folder``: some write where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(folder):
        return _fuzz(count, seed, run.absolute(), folder.absolute())


def _fuzz(count: int, seed: int, run: Path, folder: Path) -> Findings:
    findings = Findings("command lines")
    lines = CommandLines(random.Random(seed), run, folder)
    for _ in range(count):
        words, wrong = lines()
        shown = " ".join(repr(word if len(word) < 60 else f"{word[:60]}…") for word in words)
        result, hang = attempt(lambda words=words: CliRunner().invoke(app, words), SECONDS)
        if hang is not None:
            findings.fault("hang", shown, hang)
        elif result.exception is not None and not isinstance(result.exception, SystemExit):
            kind = "hang" if type(result.exception).__name__ == "Hang" else "traceback"
            findings.fault(kind, shown, repr(result.exception))
        elif result.exit_code == 0 and wrong:
            findings.fault("wrongly accepted", shown, result.output[-200:])
        elif result.exit_code not in (0, 1, 2, 130):
            findings.fault("odd exit code", shown, result.exit_code)
        elif result.exit_code == 2 and result.stderr.count("dphero: error:") != 1:
            findings.fault("not one line", shown, result.stderr)
        else:
            findings.note("refused" if result.exit_code else "accepted")
    return findings
