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
        0 on success, 1 if ``bench`` had no time to measure any optimizer, 2 on a usage error or if
        the command cannot run as requested, 130 after Ctrl-C, 141 if the reader of standard output
        has closed it.

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
        "info", help="show the environment: versions, CPU, threads, kernel cache, CUDA"
    )
    info.set_defaults(command=_info)
    _add_warmup(commands)
    return parser


def _add_warmup(commands: "argparse._SubParsersAction[_Parser]") -> None:
    description = "compile kernels ahead of time, for example for a container image or a cluster"
    parser = commands.add_parser("warmup", help=description, description=description)
    parser.set_defaults(command=_warmup)
    add = partial(parser.add_argument, metavar="NAME")
    add("names", nargs="*", help="optimizers, default all")
    add("--optimizers", nargs="+", default=[], help="optimizers, as an option")
    add(
        "--dtypes",
        nargs="+",
        default=["float32"],
        help="float32, float64, float16, bfloat16; default float32",
    )
    parser.add_argument(
        "--rows", action="store_true", help="also compile the kernels for row-sparse gradients"
    )


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
    description = "compare updates with this machine's memory bandwidth and with plain NumPy"
    parser = commands.add_parser("bench", help=description, description=description)
    parser.set_defaults(command=_bench)
    add = partial(parser.add_argument, default=argparse.SUPPRESS)
    add(
        "--sizes",
        nargs="+",
        type=_positive,
        metavar="N",
        help="numbers of elements of the weight, default 1000 1000000 10000000; an element takes "
        "about 50 bytes of memory",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="optimizers, default all")
    add("--optimizers", nargs="+", metavar="NAME", help="optimizers, as an option")
    add(
        "--threads",
        type=_positive,
        metavar="N",
        help="number of threads, default all threads of numba",
    )
    add(
        "--seconds",
        type=_rate,
        metavar="S",
        help="start no further measurement after S seconds, default 60, including compilation, "
        "which the kernel cache saves in a second run",
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
        return 0 if run(Options(**options)) else 1
    except Refused as error:
        print(f"fastopt bench: {error}", file=sys.stderr)
        return 2


def _add_demo(commands: "argparse._SubParsersAction[_Parser]") -> None:
    description = "train small models in NumPy and time their optimizer"
    parser = commands.add_parser("demo", help=description, description=description)
    parser.set_defaults(command=_demo)
    tasks = ("digits", "embeddings", "recommend")
    # Omitted options are suppressed so that each task applies its own defaults.
    add = partial(parser.add_argument, default=argparse.SUPPRESS)
    parser.add_argument(
        "--task",
        default=tasks[0],
        choices=tasks,
        help="digits: networks classify images from scikit-learn; embeddings: word vectors from "
        "the text of Python's reference, with row-sparse gradients; recommend: users and items by "
        "id, in growing tables; default digits",
    )
    add(
        "--optimizer",
        metavar="NAME",
        help="name of the optimizer, default adam; for embeddings and recommend adagrad",
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
        help="examples in a step, default 32 images, 128 pairs of words, 512 choices",
    )
    add(
        "--seed",
        type=_seed,
        metavar="N",
        help="seed of the split, the weights and the order, default 0",
    )
    add("--text", type=Path, metavar="FILE.txt", help="read this text; embeddings only")
    add(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="plot the loss over time to this file, with fastopt, plain NumPy and, if installed, "
        "torch; embeddings: with row-sparse and dense gradients; recommend: the recall "
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
        help="momentum, for optimizers that have one, default the optimizer's; digits only",
    )
    add(
        "--dtype",
        choices=("float32", "float64", "float16", "bfloat16"),
        help="of weights and gradients, default float32; half precision has float32 masters and is "
        "for digits only",
    )
    add(
        "--no-master",
        action="store_true",
        help="half-precision weights without masters; digits only",
    )
    add(
        "--rounding",
        choices=("nearest", "stochastic"),
        help="rounding of weights without masters, default nearest; digits only",
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
