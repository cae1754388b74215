"""The command line: ``fastopt demo``, ``bench``, ``info`` and ``warmup``."""

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from fastopt import __version__
from fastopt._console import Refused, is_first_rank

INTERRUPTED, PIPE_CLOSED = 130, 141
"""Exit codes of a process ended by SIGINT and by SIGPIPE, as a shell reports them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. Of ranks of an MPI job, the first prints.

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
    with ExitStack() as stack:
        if not is_first_rank():
            none = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(none))
            stack.enter_context(redirect_stderr(none))
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
        options = vars(parser.parse_args(argv))
    except SystemExit as stop:
        return int(stop.code or 0)
    name, command = options.pop("name", None), options.pop("command", None)
    if command is None:
        parser.print_help()
        return 2
    try:
        return int(command(**options))
    except Refused as error:
        print(f"fastopt {name}: {error}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    """Argument parser that reports an error in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fastopt", description="In-place optimizer updates for NumPy.")
    parser.add_argument("--version", action="version", version=f"fastopt {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="name")

    def add(command: Callable[..., int], name: str, words: str) -> Callable[..., Any]:
        # Omitted options are suppressed, so that each command applies its own defaults.
        made = commands.add_parser(
            name, help=words, description=words, argument_default=argparse.SUPPRESS
        )
        made.set_defaults(command=command)
        return made.add_argument

    _demo_options(add(_demo, "demo", "train small networks in NumPy and time their optimizer"))
    bench = add(_bench, "bench", "compare updates with memory bandwidth and with plain NumPy")
    bench("names", nargs="*", metavar="NAME", default=None, help="optimizers, default all")
    bench(
        "--sizes",
        nargs="+",
        type=_positive,
        metavar="N",
        help="numbers of elements of the weight, default 1000 1000000 and, in a wide terminal, "
        "10000000; an element takes about 50 bytes of memory",
    )
    bench("--threads", type=_positive, metavar="N", help="default all threads of numba")
    bench(
        "--seconds",
        type=_rate,
        metavar="S",
        help="start no further measurement after S seconds, default 60, including compilation, "
        "which the kernel cache saves in a second run",
    )
    add(_info, "info", "show the environment: versions, CPU, threads, kernel cache, CUDA")
    warmup = add(
        _warmup,
        "warmup",
        "compile kernels ahead of time, for example for a container image or a cluster",
    )
    warmup("names", nargs="*", metavar="NAME", default=None, help="optimizers, default all")
    dtypes = "float32, float64, float16, bfloat16; default float32"
    warmup("--dtypes", nargs="+", metavar="NAME", help=dtypes)
    rows = "also compile the kernels for row-sparse gradients"
    warmup("--rows", action="store_true", help=rows)
    return parser


def _demo_options(add: Callable[..., Any]) -> None:
    add("--optimizer", metavar="NAME", help="name of the optimizer, default adam")
    add(
        "--learning-rate",
        type=_rate,
        metavar="RATE",
        help="default 0.1 for sgd, ccsgd, nag, lbsgd and dcasgd, 2 for lars, 0.001 for signum, "
        "0.0003 for lion, 0.01 for muon, adamuon and normuon, 0.0001 for sgld, "
        "else the optimizer's own",
    )
    add(
        "--dtype",
        choices=("float32", "float64", "float16", "bfloat16"),
        help="of weights and gradients, default float32; half precision has float32 masters",
    )
    add("--no-master", action="store_true", help="half-precision weights without masters")
    add(
        "--rounding",
        choices=("nearest", "stochastic"),
        help="rounding of weights without masters, default nearest",
    )
    add("--epochs", type=_positive, metavar="N", help="default 20")
    add("--batch-size", type=_positive, metavar="N", help="images in a step, default 32")
    seed = "seed of the split, the weights and the order, default 0"
    add("--seed", type=_seed, metavar="N", help=seed)
    plot = "plot the loss over time to this file, with fastopt and with plain NumPy"
    add("--plot", type=Path, metavar="FILE.png", help=plot)
    mpi = "divide batches and state among the ranks of mpiexec"
    add("--mpi", action="store_true", help=mpi)


def _demo(**options: Any) -> int:
    from fastopt.demo import digits

    digits.run(digits.Options(**options))
    return 0


def _bench(names: Sequence[str], **options: Any) -> int:
    from fastopt.bench import report

    return 0 if report.run(names, **options) else 1


def _info() -> int:
    from fastopt import info

    print(info.report())
    return 0


def _warmup(names: Sequence[str], **options: Any) -> int:
    from fastopt import warmup

    warmup.run(names, **options)
    return 0


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"must be an integer of at least {least}, got {text!r}")
    return value


_positive, _seed = partial(_integer, least=1), partial(_integer, least=0)


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
