"""Children that are killed in the middle of their work."""

import os
import signal


def killed_at(step, work, *names):
    """Status of a child that is killed before or after a call of these functions of `os`.

    The work, a function, is given one that counts as a step too.
    """
    child, left = os.fork(), step
    if child:
        return os.waitpid(child, 0)[1]

    def passed():
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(function):
        def call(*args, **kwargs):
            passed()
            result = function(*args, **kwargs)
            passed()
            return result

        return call

    for name in names:
        setattr(os, name, watched(getattr(os, name)))
    work(passed)
    os._exit(0)
