"""The command line: ``fastopt demo``, ``fastopt info``; the same as ``python -m fastopt``."""

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from fastopt import __version__

__all__ = ["main"]

INTERRUPTED, PIPE_CLOSED = 130, 141
"""Exit codes with which a shell reports the signals SIGINT and SIGPIPE."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments after the program's name. Default: those of the process.

    Returns
    -------
    int
        0 if the command succeeded, 2 if it could not do what was asked, 130 after Ctrl-C, 141 if
        nobody reads the output any more.

    Examples
    --------
    >>> from fastopt.__main__ import main
    >>> main(["--version"])  # doctest: +ELLIPSIS
    fastopt ...
    0
    """
    try:
        try:
            return _run(argv)
        finally:
            print(end="", flush=True)
    except KeyboardInterrupt:
        print("fastopt: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes standard output once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
    if args.command is None:
        parser.print_help()
        return 2
    command: Callable[[argparse.Namespace], int] = args.command
    return command(args)


class _Parser(argparse.ArgumentParser):
    """Reports what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fastopt", description="In-place optimizer updates for NumPy.")
    parser.add_argument("--version", action="version", version=f"fastopt {__version__}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_demo(commands)
    info = commands.add_parser(
        "info", help="describe what fastopt runs on: versions, CPU, threads, cache, CUDA"
    )
    info.set_defaults(command=_info)
    return parser


def _add_demo(commands: "argparse._SubParsersAction[_Parser]") -> None:
    words = "train a NumPy perceptron on scikit-learn's digits and time its optimizer"
    parser = commands.add_parser("demo", help=words, description=words)
    parser.set_defaults(command=_demo)
    add = parser.add_argument
    add("--optimizer", default="adam", metavar="NAME", help="a registered one, default adam")
    add(
        "--learning-rate",
        "--lr",
        type=_rate,
        metavar="RATE",
        help="default 0.1 for sgd, ccsgd, nag, lbsgd and dcasgd, 2 for lars, 0.001 for signum, "
        "0.0003 for lion, 0.0001 for sgld, else the optimizer's own",
    )
    add(
        "--momentum", type=float, metavar="M", help="for optimizers that take it, default their own"
    )
    types = ("float32", "float64", "float16", "bfloat16")
    add(
        "--dtype", default=types[0], choices=types, help="of weights and gradients, default float32"
    )
    add(
        "--no-master",
        action="store_true",
        help="keep no float32 masters of float16 or bfloat16 weights",
    )
    add(
        "--rounding",
        default="nearest",
        choices=("nearest", "stochastic"),
        help="of float16 or bfloat16 weights without masters, default nearest; stochastic goes "
        "without masters",
    )
    add("--epochs", type=_positive, default=20, metavar="N", help="default 20")
    add("--batch-size", type=_positive, default=32, metavar="N", help="images a step, default 32")
    add("--seed", type=_seed, default=0, metavar="N", help="of split, weights and order, default 0")
    add("--plot", type=Path, metavar="FILE.png", help="draw the loss to this file")


def _demo(args: argparse.Namespace) -> int:
    from fastopt import demo

    options = {name: value for name, value in vars(args).items() if name != "command"}
    try:
        demo.run(demo.Options(**options))
    except demo.Refused as error:
        print(f"fastopt demo: {error}", file=sys.stderr)
        return 2
    return 0


def _info(args: argparse.Namespace) -> int:
    from fastopt import info

    print(info.report())
    return 0


def _positive(text: str) -> int:
    return _integer(text, 1)


def _seed(text: str) -> int:
    return _integer(text, 0)


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"must be an integer of at least {least}, got {text!r}")
    return value


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number of at least 0, got {text!r}")
    return value


if __name__ == "__main__":
    sys.exit(main())
