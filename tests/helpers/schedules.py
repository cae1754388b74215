"""Recorded learning rates as schedules."""


def with_schedule(arguments):
    """Arguments with the learning rates of the steps, `rates`, as a schedule."""
    rates = arguments.get("rates")
    if rates is None:
        return arguments
    rest = {name: value for name, value in arguments.items() if name not in ("rates", "lr")}
    return {**rest, "lr": lambda update: rates[update - 1]}
