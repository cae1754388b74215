"""Commands in processes of their own."""

import os
import subprocess


def run(*command, status=0, timeout=900, cwd=None, env=None, **changes):
    """Run a command with changes to the environment; fail unless it exits with the status.

    A status of None is any one, and "fails" any but 0.
    """
    environment = {**(os.environ if env is None else env), **changes}
    done = subprocess.run(
        [*map(str, command)],
        env={name: value for name, value in environment.items() if value is not None},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    ended = done.returncode != 0 if status == "fails" else status in (None, done.returncode)
    assert ended, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done
