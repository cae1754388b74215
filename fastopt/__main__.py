"""The command line: ``fastopt demo``, ``bench``, ``info`` and ``warmup``."""

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from fastopt import __version__

__all__ = ["main"]

INTERRUPTED, PIPE_CLOSED = 130, 141
"""Exit codes of a process ended by SIGINT and by SIGPIPE, as a shell reports them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments after the program name. Default: ``sys.argv[1:]``.

    Returns
    -------
    int
        0 on success, 2 on a usage error or if the command cannot run as requested, 130 after
        Ctrl-C, 141 if the reader of standard output has closed it.

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
    """Argument parser that reports an error in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fastopt", description="In-place optimizer updates for NumPy.")
    parser.add_argument("--version", action="version", version=f"fastopt {__version__}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_demo(commands)
    _add_bench(commands)
    info = commands.add_parser(
        "info", help="describe what fastopt runs on: versions, CPU, threads, cache, CUDA"
    )
    info.set_defaults(command=_info)
    _add_warmup(commands)
    return parser


def _add_warmup(commands: "argparse._SubParsersAction[_Parser]") -> None:
    words = "compile kernels into the cache, as for an image or before a cluster starts"
    parser = commands.add_parser("warmup", help=words, description=words)
    parser.set_defaults(command=_warmup)
    add = partial(parser.add_argument, metavar="NAME")
    add("names", nargs="*", help="optimizers by registered name, default all")
    add("--optimizers", nargs="+", default=[], help="the same as an option")
    add(
        "--dtypes",
        nargs="+",
        default=["float32"],
        help="float32, float64, float16, bfloat16; default float32",
    )
    parser.add_argument("--rows", action="store_true", help="row-sparse gradients too")


def _warmup(args: argparse.Namespace) -> int:
    from fastopt import warmup
    from fastopt._console import unknown

    known = warmup.names()
    given = [name.lower() for name in (*args.names, *args.optimizers)]
    optimizers = list(dict.fromkeys(given)) or known
    for given, there in ((optimizers, known), (args.dtypes, list(warmup.DTYPES))):
        for name in given:
            if name not in there:
                print(f"fastopt warmup: {unknown(name, there)}", file=sys.stderr)
                return 2
    warmup.run(optimizers, args.dtypes, args.rows)
    return 0


def _add_bench(commands: "argparse._SubParsersAction[_Parser]") -> None:
    words = "measure how near each update comes to this machine's memory limit, and to plain NumPy"
    parser = commands.add_parser("bench", help=words, description=words)
    parser.set_defaults(command=_bench)
    add = partial(parser.add_argument, default=argparse.SUPPRESS)
    add(
        "--sizes",
        nargs="+",
        type=_positive,
        metavar="N",
        help="elements of the weight, default 1000 1000000 10000000; the largest takes about 50 "
        "bytes of memory for each",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="optimizers, default all")
    add("--optimizers", nargs="+", metavar="NAME", help="the same as an option")
    add("--threads", type=_positive, metavar="N", help="default all that numba has")
    add(
        "--seconds",
        type=_rate,
        metavar="S",
        help="after which no further row is started, default 60; compilation counts, which the "
        "kernel cache saves a second run",
    )


def _bench(args: argparse.Namespace) -> int:
    from fastopt._console import Refused
    from fastopt.bench.report import Options, run

    options = {
        name: value for name, value in vars(args).items() if name not in ("command", "names")
    }
    if args.names:
        options["optimizers"] = [*args.names, *options.get("optimizers", ())]
    try:
        run(Options(**options))
    except Refused as error:
        print(f"fastopt bench: {error}", file=sys.stderr)
        return 2
    return 0


def _add_demo(commands: "argparse._SubParsersAction[_Parser]") -> None:
    words = "train small models in NumPy and time their optimizer"
    parser = commands.add_parser("demo", help=words, description=words)
    parser.set_defaults(command=_demo)
    tasks = ("digits", "embeddings", "recommend")
    # Omitted options are suppressed so that each task applies its own defaults.
    add = partial(parser.add_argument, default=argparse.SUPPRESS)
    parser.add_argument(
        "--task",
        default=tasks[0],
        choices=tasks,
        help="digits: networks read images of scikit-learn; embeddings: words of Python's "
        "reference get vectors, by row-sparse gradients; recommend: users and items by any id, in "
        "tables that grow; default digits",
    )
    add(
        "--optimizer",
        metavar="NAME",
        help="a registered one, default adam; embeddings adagrad; recommend adagrad",
    )
    add(
        "--learning-rate",
        type=_rate,
        metavar="RATE",
        help="default 0.1 for sgd, ccsgd, nag, lbsgd and dcasgd, 2 for lars, 0.001 for signum, "
        "0.0003 for lion, 0.01 for muon, 0.0001 for sgld, else the optimizer's own; embeddings 0.1 "
        "for adagrad and groupadagrad, 0.05 for sgd and ccsgd, 0.002 for adam; recommend 0.1, "
        "0.005 for adam",
    )
    _add_digits(add)
    add("--epochs", type=_positive, metavar="N", help="default 20; embeddings 10; recommend 10")
    add(
        "--batch-size",
        type=_positive,
        metavar="N",
        help="images a step, default 32; pairs of words, default 128; choices, default 512",
    )
    add("--seed", type=_seed, metavar="N", help="of split, weights and order, default 0")
    add("--text", type=Path, metavar="FILE.txt", help="read this text; embeddings only")
    add(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="draw the loss over time to this file, with fastopt, plain NumPy and torch, if it is "
        "installed; embeddings: with row-sparse and dense gradients; recommend: the recall "
        "of each epoch",
    )
    add(
        "--mpi",
        action="store_true",
        help="divide batches and state among the ranks of mpiexec; digits only",
    )


def _add_digits(add: Callable[..., argparse.Action]) -> None:
    """Add the options of the task "digits"."""
    add(
        "--momentum",
        type=float,
        metavar="M",
        help="for optimizers that take it, default their own; digits only",
    )
    add(
        "--dtype",
        choices=("float32", "float64", "float16", "bfloat16"),
        help="of weights and gradients, default float32; those of 16 bits, digits only, have "
        "float32 masters",
    )
    add("--no-master", action="store_true", help="weights of 16 bits without masters; digits only")
    add(
        "--rounding",
        choices=("nearest", "stochastic"),
        help="of weights without masters, default nearest; digits only",
    )
    add(
        "--hidden",
        nargs="+",
        type=_positive,
        metavar="N",
        help="units of the hidden layers of one network, default two networks, 128 and 512 512; "
        "digits only",
    )


def _demo(args: argparse.Namespace) -> int:
    from fastopt.demo.common import Refused
    from fastopt.demo.team import Team

    task = import_module(f"fastopt.demo.{args.task}")
    options = {name: value for name, value in vars(args).items() if name not in ("command", "task")}
    with ExitStack() as stack:
        try:
            for name in options.keys() - {field.name for field in fields(task.Options)}:
                raise Refused(f"--task {args.task} does not take --{name.replace('_', '-')}")
            stack.enter_context(Team.of(options.get("mpi", False)).first_speaks())
            task.run(task.Options(**options))
        except Refused as error:
            print(f"fastopt demo: {error}", file=sys.stderr)
            return 2
    return 0


def _info(args: argparse.Namespace) -> int:
    from fastopt import info

    text = info.report()
    if info.is_first():
        print(text)
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
