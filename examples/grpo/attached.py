"""Runs a command for as long as standard input is open: a server that ends when its trainer does, even by SIGKILL.

python -m examples.grpo.attached COMMAND ...
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def main() -> int:
    """Run the command until it ends by itself or the pipe closes; returns its status."""
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)

    def end_with_parent() -> None:
        # Not by `sys.stdin`: Python aborts at exit while a thread holds the lock of its buffer.
        while os.read(0, 1024):
            pass
        # A shell starts background jobs with SIGINT ignored, and their children inherit that.
        child.terminate()

    # Ctrl-C reaches the whole foreground group: the trainer decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    return child.wait()


if __name__ == "__main__":
    sys.exit(main())
