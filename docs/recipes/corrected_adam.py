"""Adam as torch, Keras, optax, autograd and mynn have it."""

import math

from fastopt import optimizer


class CorrectedAdam(optimizer.Adam):
    """Adam with epsilon beside the root of the corrected average of squares."""

    def hyper(self, t, lr, wd):
        fields = super().hyper(t, lr, wd)
        fields["epsilon"] *= math.sqrt(1 - self.beta2**t)
        return fields
