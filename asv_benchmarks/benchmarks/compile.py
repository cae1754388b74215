"""First step of Adam in a new process, below and above the size threshold for threads."""

from .common import first_steps


class FirstStep:
    params = (1_000, 1_000_000)
    param_names = ("elements",)
    unit = "s"

    def track_cold_cache(self, elements):
        return first_steps(elements)[0]

    def track_warm_cache(self, elements):
        return first_steps(elements)[1]
