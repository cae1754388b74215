"""Dense float32 steps, against a loop that moves the same memory."""

from .common import TABLE_SHAPE, Step, against_limit, names


class _Dense:
    def track_time(self, _):
        return 1e9 * against_limit(self.step)[0] / self.step.weight.size

    track_time.unit = "ns per element"

    def track_slowdown(self, _):
        return 1 / against_limit(self.step)[1]

    track_slowdown.unit = "times the limit"


class Adam(_Dense):
    params = (1_000_000, 50_000_000)
    param_names = ("elements",)

    def setup(self, elements):
        self.step = Step("adam", elements)


class Table(_Dense):
    params = names()
    param_names = ("optimizer",)

    def setup(self, optimizer):
        try:
            self.step = Step(optimizer, TABLE_SHAPE)
        except (TypeError, ValueError) as error:
            raise NotImplementedError(f"{optimizer} refuses {TABLE_SHAPE}: {error}") from error
